"""Memory of chosen steps of a Hugging Face `Trainer`."""

from __future__ import annotations

import os
import re
import socket
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tb_memplugin.callbacks.recorder import StepRecorder, Training
from tb_memplugin.callbacks.steps import Steps

try:
    import transformers
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "tb_memplugin.callbacks.transformers needs transformers: pip install 'tb-memplugin[transformers]'"
    ) from error


class MemoryTraceCallback(TrainerCallback):  # type: ignore[misc]  # untyped where it is not installed
    """Records the memory of chosen training steps for the Memory tab, beside what the Trainer logs.

    A step is one optimizer step with all its micro batches; step N takes `state.global_step` from N to
    N + 1. Evaluations and checkpoints are not profiled. The training computes the same, and goes on
    whatever happens here; where it raises, the error stays as it is, and the step that failed is written.

    Args:
        dir: where to write. Default: where the Trainer logs for TensorBoard, see `logging_folder`.
        steps: numbers (`[10, 500]`, `range(10, 13)`) or `torch.profiler.schedule(...)`, which counts from
            where `train()` begins. Default: the third and fourth step of each `train()`.
        worker_name: unique per process. Default: `rank<N>`, or `<host>_<pid>` outside torchrun.
        with_stack: record Python stacks as well: slower, with source lines.
        snapshot: record the allocator's history as well, on CUDA, ROCm and XPU.
        log_level: of this callback's own messages, as a name or number. Default: as the package's.

    Raises:
        TypeError, ValueError: `steps` are none.
        MemPluginError: there is no such level.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryTraceCallback(steps=[10])])
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002  # as the libraries call it
        *,
        steps: Steps = None,
        worker_name: str | None = None,
        with_stack: bool = False,
        snapshot: bool = False,
        log_level: int | str | None = None,
    ) -> None:
        self._recorder = StepRecorder(
            steps,
            folder=dir,
            worker_name=worker_name,
            with_stack=with_stack,
            snapshot=snapshot,
            log_level=log_level,
        )
        _tell_of_errors()

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
        """An evaluation that nobody announced."""
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


def _tell_of_errors() -> None:
    """Have `Trainer.train` tell our callbacks when it raises: the Trainer has no event for that.

    Otherwise the profiler would stay on after a failed training. The error itself passes unchanged.
    """
    train = transformers.Trainer.train
    if getattr(train, "tells_of_errors", False):
        return

    @wraps(train)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        except BaseException:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, MemoryTraceCallback):
                    callback.training_raised()
            raise

    telling.tells_of_errors = True  # type: ignore[attr-defined]
    transformers.Trainer.train = telling
