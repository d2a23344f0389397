"""Memory of chosen steps of a Hugging Face `Trainer`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tb_memplugin.callbacks.recorder import Training
from tb_memplugin.callbacks.step_callback import StepCallback

try:
    import transformers
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "tb_memplugin.callbacks.transformers needs transformers: pip install 'tb-memplugin[transformers]'"
    ) from error


class MemoryTraceCallback(StepCallback, TrainerCallback):  # type: ignore[misc]  # untyped where it is not installed
    """Records the memory of chosen training steps for the Memory tab, beside what the Trainer logs.

    A step is one optimizer step with all its micro batches; step N takes `state.global_step` from N to
    N + 1. Evaluations and checkpoints are not profiled. The training computes the same, and goes on
    whatever happens here; where it raises, the error stays as it is, and the step that failed is written.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryTraceCallback(steps=[10])])
    """

    def _listen(self) -> None:
        _listen_to_trainers()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take model and optimizer from the Trainer."""
        optimizer = _unwrapped(kwargs.get("optimizer"))
        training = Training(
            folder=lambda: logging_folder(args),
            model=kwargs.get("model"),
            optimizers=() if optimizer is None else (optimizer,),
        )
        self._recorder.begin_training(training, state.global_step)
        if not getattr(args, "eval_on_start", False):
            self._recorder.expect(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro batch of a step."""
        self._recorder.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped, gradients are gone."""
        self._recorder.end_step(pause=_is_interrupted(control))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch's evaluation may follow."""
        if _is_interrupted(control):
            self._recorder.pause()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A prediction that nobody announced."""
        self._recorder.pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The evaluation is over."""
        if not _is_interrupted(control):
            self._recorder.resume()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint is written."""
        self._recorder.resume()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is open."""
        self._recorder.end_training()

    def evaluation_begins(self) -> None:
        """`Trainer.evaluate` was called, by the Trainer or by somebody else: it is in no step."""
        self._recorder.pause()

    def training_raised(self) -> None:
        """`Trainer.train` raised: write what is open, and switch the profiler off."""
        self._recorder.end_training(raised=True)


def logging_folder(args: Any) -> str:
    """Where a Trainer logs for TensorBoard.

    Transformers 4 says so (`args.logging_dir`). From version 5 on it is `TENSORBOARD_LOGGING_DIR`, or a
    folder named after the time, below `<output_dir>/runs`: then the one that this process has begun.
    Only the first of several processes logs there, and without TensorBoard none does; so that all
    ranks write to one folder without waiting for each other, it is then `<output_dir>/runs/memory`.
    """
    told = getattr(args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if told:
        return str(Path(told).expanduser())
    runs = Path(args.output_dir) / "runs"
    own = _begun_here(runs) if args.world_size == 1 else None
    return str(own or runs / "memory")


def _begun_here(runs: Path) -> Path | None:
    """The folder of the newest event file that a SummaryWriter of this process has made."""
    end = re.compile(rf"\.{re.escape(socket.gethostname())}\.{os.getpid()}\.\d+$")  # see EventFileWriter
    files = [path for path in runs.rglob("events.out.tfevents.*") if end.search(path.name)]
    return max(files, key=lambda path: path.stat().st_mtime_ns).parent if files else None


def _is_interrupted(control: Any) -> bool:
    return bool(control.should_evaluate or control.should_save)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside accelerate's: the one that torch sees stepping."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def _listen_to_trainers() -> None:
    """Have the Trainer tell our callbacks what it has no event for: that training raised, that it evaluates.

    Otherwise the profiler would stay on after a failed training, and the first batch of an evaluation that
    a later callback asks for would count to a step. Arguments, results and errors pass unchanged.
    """
    if not getattr(transformers.Trainer.train, "has_listeners", False):
        transformers.Trainer.train = _telling_errors(transformers.Trainer.train)
        transformers.Trainer.evaluate = _telling_begins(transformers.Trainer.evaluate)


def _telling_errors(train: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(train)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        except BaseException:
            for callback in _ours(self):
                callback.training_raised()
            raise

    telling.has_listeners = True  # type: ignore[attr-defined]
    return telling


def _telling_begins(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(evaluate)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        for callback in _ours(self):
            callback.evaluation_begins()
        return evaluate(self, *args, **kwargs)

    return telling


def _ours(trainer: Any) -> list[MemoryTraceCallback]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, MemoryTraceCallback)]
