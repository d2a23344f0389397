"""The arguments that the callbacks for all libraries have in common."""

from __future__ import annotations

import os
from typing import Any

from tb_memplugin.callbacks.recorder import StepRecorder
from tb_memplugin.callbacks.steps import Steps
from tb_memplugin.record.trackers.log import LogTo


class StepCallback:
    """A mixin with a recorder of chosen steps; list it before the library's own callback class."""

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002  # as the libraries call it
        *,
        steps: Steps = None,
        worker_name: str | None = None,
        with_stack: bool = False,
        snapshot: bool = False,
        log_level: int | str | None = None,
        log_to: LogTo = None,
    ) -> None:
        """Choose what to record.

        Args:
            dir: where to write. Default: where the library logs, see `logging_folder`.
            steps: numbers (`[10, 500]`, `range(10, 13)`) or `torch.profiler.schedule(...)`, which counts
                from where the training begins. Default: the third and fourth step of each training.
            worker_name: unique per process. Default: `rank<N>`, or `<host>_<pid>` in a single process.
            with_stack: record Python stacks as well: slower, with source lines.
            snapshot: record the allocator's history as well, on CUDA, ROCm and XPU.
            log_level: level of this callback's own messages, a name or number. Default: that of the package.
            log_to: as for `memory_trace_handler`.

        Raises:
            TypeError, ValueError: `steps` is not a valid choice of steps.
            MemPluginError: `log_level` is no level, or `log_to` no tracker that is installed.
        """
        super().__init__()
        self._recorder = StepRecorder(
            steps,
            folder=dir,
            worker_name=worker_name,
            with_stack=with_stack,
            snapshot=snapshot,
            log_level=log_level,
            log_to=log_to,
        )
        self._listen()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._listen()

    def fail(self, where: str, error: BaseException) -> None:
        """Drop the open window because of an error."""
        self._recorder.fail(where, error)

    def _listen(self) -> None:
        """Hook into the library for what it has no callback event for; does nothing by default."""
