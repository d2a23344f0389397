"""A callback that records chosen steps of a Lightning `Trainer`, from either of Lightning's packages."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import nn

from tb_memplugin.callbacks.recorder import StepCallback, Training
from tb_memplugin.record.guard import guarded

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """Return `Callback` of each Lightning package that is imported; if none is, of the installed one."""
    imported = [name for name in _NAMES if sys.modules.get(name)]
    if imported:
        return tuple(import_module(f"{name}.callbacks").Callback for name in imported)
    for name in _NAMES:
        try:
            return (import_module(f"{name}.callbacks").Callback,)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != name.partition(".")[0]:  # a dependency
                raise
    raise ImportError(
        "tb_memplugin.callbacks.lightning needs lightning: pip install 'tb-memplugin[lightning]'"
    )


Callback: Any = type("Callback", _callback_classes(), {})


class MemoryTraceCallback(StepCallback, Callback):  # type: ignore[misc]  # a class found at run time
    """Record the memory of chosen training steps for the Memory tab, next to what the Trainer logs.

    A step is one optimizer step with all its micro-batches; step N is the one that loggers show at N
    (N batches have stepped before it). Validation is not profiled. The callback does not change what the
    training computes, and an error in it does not stop the training. If the training raises, its error
    passes unchanged and the failed step is still written.

    Example:
        >>> trainer = Trainer(callbacks=[MemoryTraceCallback(steps=range(10, 13))])
    """

    _stepped_before = 0

    @guarded("on_train_start")
    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Take the module and the optimizers from the Trainer."""
        folder = logging_folder(trainer)  # every rank must ask: the Trainer broadcasts the first one's answer
        training = Training(lambda: folder, lambda: pl_module, lambda: tuple(trainer.optimizers))
        self._recorder.begin_training(training, _steps_done(trainer))
        if _is_named(trainer.profiler, "PyTorchProfiler"):
            self._recorder.decline(
                "The Trainer's own PyTorchProfiler is on, and only one torch profiler can run at a "
                "time, so this training records no memory.\n  fix: remove profiler= from the Trainer; "
                "or keep it as PyTorchProfiler(profile_memory=True, "
                "on_trace_ready=tb_memplugin.memory_trace_handler(...)), and remove this callback."
            )
        self._recorder.expect(_steps_done(trainer))

    @guarded("on_train_batch_start")
    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Begin a step, unless this micro-batch belongs to a step that has begun."""
        self._stepped_before = trainer.global_step
        self._recorder.begin_step(_steps_done(trainer))

    @guarded("on_train_batch_end")
    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step if an optimizer stepped in this micro-batch."""
        if trainer.global_step != self._stepped_before:
            self._recorder.end_step()

    @guarded("on_validation_start")
    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Stop recording: validation is not part of a step."""
        self._recorder.pause()

    @guarded("on_validation_end")
    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Expect the next step."""
        self._recorder.resume()

    @guarded("on_train_end")
    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Write the open window."""
        self._recorder.end_training()

    @guarded("on_exception")
    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Write the open window and stop the profiler, because the training raised."""
        self._recorder.end_training(raised=True)


def logging_folder(trainer: Any) -> str:
    """Return where a Lightning Trainer logs: the folder of its TensorBoard logger if it has one.

    Every rank must call this, as for `trainer.log_dir`; all get the first rank's answer.
    """
    boards = [logger for logger in trainer.loggers if _is_named(logger, "TensorBoardLogger")]
    folder = trainer.strategy.broadcast(boards[0].log_dir) if boards else trainer.log_dir
    return str(folder or trainer.default_root_dir)


def _steps_done(trainer: Any) -> int:
    """Return the step that loggers show: the number of batches in which at least one optimizer stepped."""
    loop = trainer.fit_loop.epoch_loop
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))


def _is_named(thing: object, name: str) -> bool:
    """Return whether a thing has a class of this name; both Lightning packages define each class."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)
