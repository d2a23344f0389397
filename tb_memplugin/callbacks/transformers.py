"""A callback that records chosen steps of a Hugging Face `Trainer`."""

from __future__ import annotations

import os
import platform
import re
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tb_memplugin.callbacks.recorder import StepCallback, Training
from tb_memplugin.record.guard import UNOWNED, guarded, on_free

try:
    import transformers
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "tb_memplugin.callbacks.transformers needs transformers: pip install 'tb-memplugin[transformers]'"
    ) from error


class MemoryTraceCallback(StepCallback, TrainerCallback):  # type: ignore[misc]  # untyped where it is not installed
    """Record the memory of chosen training steps for the Memory tab, next to what the Trainer logs.

    A step is one optimizer step with all its micro-batches; step N takes `state.global_step` from N to
    N + 1. Evaluations and checkpoints are not profiled. The callback does not change what the training
    computes, and an error in it does not stop the training. If the training raises, its error passes
    unchanged and the failed step is still written.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryTraceCallback(steps=[10])])
    """

    def _listen(self) -> None:
        _LISTENING.add(self)

    @guarded("on_train_begin")
    def on_train_begin(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the model and the optimizer from the Trainer."""
        _LISTENING.add(self)
        optimizer = _unwrapped(kwargs.get("optimizer"))
        training = Training(
            folder=lambda: logging_folder(args),
            model=lambda: kwargs.get("model"),
            optimizers=lambda: () if optimizer is None else (optimizer,),
        )
        self._recorder.begin_training(training, state.global_step)
        if not getattr(args, "eval_on_start", False):
            self._recorder.expect(state.global_step)

    @guarded("on_step_begin")
    def on_step_begin(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step, at its first micro-batch."""
        self._recorder.begin_step(state.global_step)

    @guarded("on_step_end")
    def on_step_end(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step: the optimizer has stepped and the gradients are freed."""
        self._recorder.end_step(pause=_is_interrupted(control))

    @guarded("on_epoch_end")
    def on_epoch_end(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pause if an evaluation or a checkpoint follows the epoch."""
        if _is_interrupted(control):
            self._recorder.pause()

    @guarded("on_prediction_step")
    def on_prediction_step(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pause at a prediction that no other event announced."""
        self._recorder.pause()

    @guarded("on_evaluate")
    def on_evaluate(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resume after an evaluation, unless a checkpoint follows."""
        if not _is_interrupted(control):
            self._recorder.resume()

    @guarded("on_save")
    def on_save(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resume after a checkpoint is written."""
        self._recorder.resume()

    @guarded("on_train_end")
    def on_train_end(self, /, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the open window, and give the Trainer's methods back."""
        _LISTENING.remove(self)
        self._recorder.end_training()

    def evaluation_begins(self) -> None:
        """Pause because `Trainer.evaluate` was called, by the Trainer or by other code."""
        self._recorder.pause()

    def training_raised(self) -> None:
        """Write the open window and stop the profiler, because the training raised."""
        _LISTENING.remove(self)
        self._recorder.end_training(raised=True)


def logging_folder(args: Any) -> str:
    """Return where a Trainer logs for TensorBoard.

    In Transformers 4 it is `args.logging_dir`. From version 5 on it is `TENSORBOARD_LOGGING_DIR` or, if that
    is not set, the folder below `<output_dir>/runs` that this process has created, named after the time.
    With several processes only the first one logs there, and without TensorBoard none does. Then the folder
    is `<output_dir>/runs/memory`, so that all ranks use the same one without waiting for each other.
    """
    configured = getattr(args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if configured:
        return str(Path(configured).expanduser())
    runs = Path(args.output_dir) / "runs"
    own = _begun_here(runs) if args.world_size == 1 else None
    return str(own or runs / "memory")


def _begun_here(runs: Path) -> Path | None:
    """Return the folder of the newest event file that a SummaryWriter of this process has created."""
    end = re.compile(rf"\.{re.escape(platform.node())}\.{os.getpid()}\.\d+$")  # see EventFileWriter
    files = [path for path in runs.rglob("events.out.tfevents.*") if end.search(path.name)]
    return max(files, key=lambda path: path.stat().st_mtime_ns).parent if files else None


def _is_interrupted(control: Any) -> bool:
    return bool(control.should_evaluate or control.should_save)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer inside accelerate's wrapper: the one that torch sees stepping."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


class _Listening:
    """Wraps methods of `Trainer` while callbacks of ours wait for a training or are in one.

    The Trainer has no events for errors and for the begin of an evaluation. Without them the profiler would
    stay on after a failed training, and the first batch of an evaluation that a later callback starts would
    count to a step. Arguments, results and errors pass unchanged.

    `train` is called before a callback hears of its training, so it is wrapped from the creation of a
    callback to the end of its training. Errors in later trainings are those of the methods that these call.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, weakref.ref[MemoryTraceCallback]] = {}
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        """The methods of the class by name: its own, and what stands in its place."""
        self._lock = threading.RLock()

    def add(self, callback: MemoryTraceCallback) -> None:
        """Tell a callback of errors and evaluations, until `remove` or as long as it exists."""
        key = id(callback)
        gone = on_free(lambda: self._drop(key), UNOWNED.end, "the end of a callback")
        with self._lock:
            self._callbacks[key] = weakref.ref(callback, gone)
            for name, telling in _METHODS.items():
                own = vars(transformers.Trainer).get(name)
                if own is not None and name not in self._wrapped:
                    self._wrapped[name] = own, telling(own)
                    setattr(transformers.Trainer, name, self._wrapped[name][1])

    def remove(self, callback: MemoryTraceCallback) -> None:
        """Stop to tell a callback; after the last one, the class is as it was."""
        self._drop(id(callback))

    def _drop(self, key: int) -> None:
        with self._lock:
            self._callbacks.pop(key, None)
            for name, (own, telling) in list(self._wrapped.items()) if not self._callbacks else ():
                if vars(transformers.Trainer).get(name) is telling:  # else someone else has wrapped ours
                    setattr(transformers.Trainer, name, own)
                    del self._wrapped[name]


def _telling_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            _call_each(self, MemoryTraceCallback.training_raised)
            raise

    return telling


def _telling_begins(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(evaluate)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        _call_each(self, MemoryTraceCallback.evaluation_begins)
        return evaluate(self, *args, **kwargs)

    return telling


_EPOCH = "_run_epoch" if hasattr(transformers.Trainer, "_run_epoch") else "training_step"
"""A method that `train` calls for each epoch in version 5, and for each step in version 4."""

_METHODS = {"train": _telling_errors, _EPOCH: _telling_errors, "evaluate": _telling_begins}
_LISTENING = _Listening()


def _call_each(trainer: Any, method: Callable[[MemoryTraceCallback], None]) -> None:
    """Call a method of each of a Trainer's callbacks that is ours."""
    try:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, MemoryTraceCallback):
                method(callback)
    except BaseException as error:
        UNOWNED.end("Trainer", error)
