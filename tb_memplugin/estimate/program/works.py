"""Works of collectives, and how long they keep what was sent or reduced.

A work keeps its tensors as long as it lives. If the program waits on its future alone, and not on the work,
NCCL keeps them longer: a thread notices that the work is complete, and the next call of the group lets them
go (ProcessGroupNCCL.cpp: stashed_for_allocator_safety_, shelvesToUnstash_, workEnqueue).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tb_memplugin.estimate.libraries.plugins.distributed import Done

Watcher = Callable[[list[torch.Tensor]], None]
"""Called with what NCCL stashes for a work that begins; `Work.wait` empties the list."""

_watching: list[Watcher] = []


class Underway(Done):
    """The work of a send, receive or all-reduce."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._stashed = list(tensors), list(tensors)
        for watcher in _watching:
            watcher(self._stashed)

    def wait(self, *_: object, **__: object) -> bool:
        """Let NCCL's stash go."""
        self._stashed.clear()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a finished future with the tensors as its result."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` for each work that begins inside the block."""
    _watching.append(watcher)
    try:
        yield
    finally:
        _watching.remove(watcher)
