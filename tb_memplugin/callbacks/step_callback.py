"""What the libraries' callbacks take, in one place."""

from __future__ import annotations

import os

from tb_memplugin.callbacks.recorder import StepRecorder
from tb_memplugin.callbacks.steps import Steps


class StepCallback:
    """Has a recorder of chosen steps; stands before the library's own class of callbacks."""

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
        """Choose what is recorded.

        Args:
            dir: where to write. Default: where the library logs, see `logging_folder`.
            steps: numbers (`[10, 500]`, `range(10, 13)`) or `torch.profiler.schedule(...)`, which counts
                from where the training begins. Default: the third and fourth step of each training.
            worker_name: unique per process. Default: `rank<N>`, or `<host>_<pid>` in a single process.
            with_stack: record Python stacks as well: slower, with source lines.
            snapshot: record the allocator's history as well, on CUDA, ROCm and XPU.
            log_level: of this callback's own messages, as a name or number. Default: as the package's.

        Raises:
            TypeError, ValueError: `steps` are none.
            MemPluginError: there is no such level.
        """
        super().__init__()
        self._recorder = StepRecorder(
            steps,
            folder=dir,
            worker_name=worker_name,
            with_stack=with_stack,
            snapshot=snapshot,
            log_level=log_level,
        )
        self._listen()

    def _listen(self) -> None:
        """Have the library tell what it has no event for."""
