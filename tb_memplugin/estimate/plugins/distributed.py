"""torch.distributed with no process group: collectives that move nothing, for a world of one rank.

Code that calls collectives runs in a plain `MemoryEstimator`. In the world of `estimate_ranks`, or where the
program has a process group of its own, this plugin stays away: torch's own calls run then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tb_memplugin.estimate.plugins.plugin import replaced

_IN_PLACE = ("all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "barrier", "monitored_barrier")
_INTO_OUTPUT = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "scatter",
)
_POINT_TO_POINT = ("send", "isend", "irecv")
_OBJECTS = ("broadcast_object_list", "send_object_list", "recv_object_list")
_TOLD: dict[str, Callable[..., Any]] = {
    "get_rank": lambda *_, **__: 0,
    "get_world_size": lambda *_, **__: 1,
    "get_backend": lambda *_, **__: "fake",
    "get_global_rank": lambda *_, **__: 0,
    "recv": lambda *_, **__: 0,
}
"""What is asked, and the answer of the only rank."""


class Done:
    """The work of a collective that has happened."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """One that is set."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class LoneGroup:
    """A process group of this process alone."""

    def size(self) -> int:
        """One."""
        return 1

    def rank(self) -> int:
        """The first."""
        return 0


class Operation:
    """Stands for `torch.distributed.P2POp`, which only takes torch's own calls."""

    def __init__(self, op: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self.op, self.tensor = op, tensor


class Distributed:
    """Collectives and point-to-point calls of torch.distributed, where there is no process group."""

    name = "torch.distributed"

    def applies(self) -> bool:
        """Whether torch.distributed is there, and this process is no rank of anything."""
        return dist.is_available() and not dist.is_initialized()

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Replace the calls: results have the shapes that the caller made room for."""
        calls: dict[str, Callable[..., Any]] = dict.fromkeys((*_IN_PLACE, *_INTO_OUTPUT), _collective)
        calls |= dict.fromkeys(_POINT_TO_POINT, _point_to_point)
        calls |= dict.fromkeys(_OBJECTS, _nothing)
        calls |= {"batch_isend_irecv": _batch, "all_gather_object": _nothing, **_TOLD}
        calls |= {"P2POp": Operation, "new_group": lambda *_, **__: LoneGroup()}
        calls = {name: _unless_there_is_a_group(name, call) for name, call in calls.items()}
        there = [(dist, name, call) for name, call in calls.items() if hasattr(dist, name)]
        with replaced(*there):
            yield


def _unless_there_is_a_group(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A program may make its process group inside the estimate; then its calls are torch's again."""
    original = getattr(dist, name, None)
    is_initialized = dist.is_initialized

    def run(*args: Any, **keywords: Any) -> Any:
        if original is not None and is_initialized():
            return original(*args, **keywords)
        return call(*args, **keywords)

    return run


def _collective(*args: Any, async_op: bool = False, **_: Any) -> Done | None:
    """Output and input are the caller's own tensors, so that nothing is allocated."""
    return Done() if async_op or any(one is True for one in args) else None


def _point_to_point(*_: Any, **__: Any) -> Done:
    return Done()


def _batch(operations: Any) -> list[Done]:
    return [Done() for _ in operations]


def _nothing(*_: Any, **__: Any) -> None:
    return None
