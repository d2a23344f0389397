"""Memory of chosen steps of a Lightning `Trainer`, under either of the names that Lightning goes by."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import nn

from tb_memplugin.callbacks.recorder import Training
from tb_memplugin.callbacks.step_callback import StepCallback

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """`Callback` of each copy that the program has imported; where none is, of the one that is installed."""
    imported = [name for name in _NAMES if sys.modules.get(name)]
    if imported:
        return tuple(import_module(f"{name}.callbacks").Callback for name in imported)
    for name in _NAMES:
        try:
            return (import_module(f"{name}.callbacks").Callback,)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != name.partition(".")[0]:  # one that it needs
                raise
    raise ImportError(
        "tb_memplugin.callbacks.lightning needs lightning: pip install 'tb-memplugin[lightning]'"
    )


Callback: Any = type("Callback", _callback_classes(), {})


class MemoryTraceCallback(StepCallback, Callback):  # type: ignore[misc]  # a class found at run time
    """Records the memory of chosen training steps for the Memory tab, beside what the Trainer logs.

    A step is one optimizer step with all its micro batches; step N is the one that loggers show at N
    (N batches have stepped before it). Validation is not profiled. The training computes the same, and
    goes on whatever happens here; where it raises, the error stays as it is, and the step that failed
    is written.

    Example:
        >>> trainer = Trainer(callbacks=[MemoryTraceCallback(steps=range(10, 13))])
    """

    _stepped_before = 0

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Take module and optimizers from the Trainer."""
        folder = logging_folder(trainer)  # every rank asks: the Trainer shares the first one's answer
        training = Training(lambda: folder, pl_module, tuple(trainer.optimizers))
        self._recorder.begin_training(training, _steps_done(trainer))
        if _is_named(trainer.profiler, "PyTorchProfiler"):
            self._recorder.decline(
                "The Trainer's own PyTorchProfiler is on, and there can be only one torch profiler: no "
                "memory is recorded in this training.\n"
                "  fix: leave profiler= out; or keep it, as PyTorchProfiler(profile_memory=True, "
                "on_trace_ready=tb_memplugin.memory_trace_handler(...)), and leave this callback out."
            )
        self._recorder.expect(_steps_done(trainer))

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """A micro batch: the first of a step, or one more of the same."""
        self._stepped_before = trainer.global_step
        self._recorder.begin_step(_steps_done(trainer))

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: nn.Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """The step ends, if an optimizer stepped in this micro batch."""
        if trainer.global_step != self._stepped_before:
            self._recorder.end_step()

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Validation is no part of a step."""
        self._recorder.pause()

    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Training goes on."""
        self._recorder.resume()

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Write what is open."""
        self._recorder.end_training()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """The training raised: write what is open, and switch the profiler off."""
        self._recorder.end_training(raised=True)


def logging_folder(trainer: Any) -> str:
    """Where a Lightning Trainer logs: its TensorBoard logger's folder, where it has one among others.

    Every rank must ask, as for `trainer.log_dir`: they get the first rank's answer.
    """
    boards = [logger for logger in trainer.loggers if _is_named(logger, "TensorBoardLogger")]
    folder = trainer.strategy.broadcast(boards[0].log_dir) if boards else trainer.log_dir
    return str(folder or trainer.default_root_dir)


def _steps_done(trainer: Any) -> int:
    """The step that loggers show: batches in which an optimizer has stepped, however many did."""
    loop = trainer.fit_loop.epoch_loop
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))


def _is_named(thing: object, name: str) -> bool:
    """Whether a class of this name is among a thing's classes: Lightning has each twice."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)
