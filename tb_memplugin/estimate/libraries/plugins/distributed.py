"""torch.distributed without a process group: collectives that transfer nothing, for a single rank.

With it, code that calls collectives runs in a plain `MemoryEstimator`. Inside `estimate_ranks`, or if the
program has its own process group, torch's own calls run instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tb_memplugin.estimate.libraries.plugins.plugin import replaced

_IN_PLACE = ("all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "barrier", "monitored_barrier")
_INTO_OUTPUT = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single"),
    *("gather", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter"),
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
"""Functions that return a value, and the values for the only rank."""


class Done:
    """The work of a collective that is already complete."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """Return True at once: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a finished future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class LoneGroup:
    """A process group with only this process."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0


class Operation:
    """A stand-in for `torch.distributed.P2POp`, which accepts only torch's own functions."""

    def __init__(self, op: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self.op, self.tensor = op, tensor


class Distributed:
    """The plugin for collectives and point-to-point calls of torch.distributed without a process group."""

    name = "torch.distributed"

    def applies(self) -> bool:
        """Return whether torch.distributed is available and no process group exists."""
        return dist.is_available() and not dist.is_initialized()

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Replace the calls; results are the output tensors that the caller allocated."""
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
    """Wrap a replaced call to use torch's own if the program creates a process group in the estimate."""
    original = getattr(dist, name, None)
    is_initialized = dist.is_initialized

    def run(*args: Any, **keywords: Any) -> Any:
        if original is not None and is_initialized():
            return original(*args, **keywords)
        return call(*args, **keywords)

    return run


def _collective(*args: Any, async_op: bool = False, **_: Any) -> Done | None:
    """Do nothing: input and output are the caller's tensors. Return a work if the call is asynchronous."""
    return Done() if async_op or any(argument is True for argument in args) else None


def _point_to_point(*_: Any, **__: Any) -> Done:
    return Done()


def _batch(operations: Any) -> list[Done]:
    return [Done() for _ in operations]


def _nothing(*_: Any, **__: Any) -> None:
    return None
