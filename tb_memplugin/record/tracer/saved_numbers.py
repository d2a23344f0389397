"""Python numbers that autograd saves for backward as tensors, such as the 2 in `x * 2`.

torch makes a tensor of the number, saves it with the node, and only then calls a dispatch mode, which
receives the number and makes a second tensor of it. The allocator reports only the second one. So its free is
delayed until the result has its node: if the node saved the number, the block lives as long as the saved
tensor, else it was freed at the reported time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tb_memplugin.record.storage_lifetimes import Buffer, Ledger
from tb_memplugin.record.tensors_inside import isinstance_of
from tb_memplugin.record.torch_private.autograd import saved_names
from tb_memplugin.record.torch_private.dispatch import schema_of
from tb_memplugin.record.torch_private.tensors import needs_grad, storage_key
from tb_memplugin.trace import Phase

NUMBER_BYTES: dict[type, int] = {float: 8, int: 8, bool: 1, complex: 16}
"""Bytes of a number of each type as a tensor."""

WaitingNumber = tuple[Buffer, int, int, Phase]
"""(buffer of the second tensor, time of its free in epoch nanoseconds, module's row or -1, phase)."""

_tensor_positions: dict[Any, tuple[int, ...]] = {}


def numbers_in(operator: Any, args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each number that is passed for a tensor argument, if autograd may save it."""
    if not torch.is_grad_enabled():
        return []
    positions = _tensor_positions.get(operator)
    if positions is None:
        positions = _tensor_positions[operator] = _positions_of_tensors(operator)
    sizes = [
        NUMBER_BYTES[type(args[at])] for at in positions if at < len(args) and type(args[at]) in NUMBER_BYTES
    ]
    return sizes if sizes and any(map(_may_have_node, args)) else []


def _may_have_node(argument: Any) -> bool:
    """Whether autograd may make a node for an operator with this argument."""
    if isinstance_of(argument, torch.Tensor):
        return bool(needs_grad(argument))
    return isinstance(argument, list | tuple)


def _positions_of_tensors(operator: Any) -> tuple[int, ...]:
    """Return the positions of an operator's tensor arguments; none if it has fewer than two.

    Only in an operator with several tensor arguments is a number converted to a tensor.
    """
    schema = schema_of(operator)
    arguments = enumerate(schema.arguments) if schema is not None else ()
    positions = tuple(
        at for at, argument in arguments if str(argument.type) == "Tensor" and not argument.kwarg_only
    )
    return positions if len(positions) > 1 else ()


class SavedNumbers:
    """The numbers of one thread's last operator, until its result has an autograd node.

    Args:
        ledger: the ledger in which their frees are recorded.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.waiting: list[WaitingNumber] = []
        self._result: Callable[[], torch.Tensor | None] = _none

    def wait_for(self, result: Any) -> None:
        """Set the result of the operator that received the numbers."""
        self._result = weakref.ref(result) if type(result) is torch.Tensor else _none

    def settle(self) -> Iterator[int]:
        """Record the free of each number that was not saved, and yield its module's row.

        The caller must hold the ledger's lock.
        """
        waiting, self.waiting = self.waiting, []
        kept = [
            storage for storage in _saved(self._result()) if storage_key(storage) not in self._ledger.blocks
        ]
        self._result = _none
        for buffer, freed_ns, row, phase in waiting:
            mine = next((storage for storage in kept if storage.nbytes() == buffer.bytes), None)
            if mine is None:
                self._ledger.free(buffer, row, phase, freed_ns)
                yield row
            else:
                kept.remove(mine)
                self._ledger.held_by(buffer, mine)


def _none() -> None:
    return None


def _saved(result: torch.Tensor | None) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the numbers that a result's node saved."""
    node = result.grad_fn if result is not None else None
    if node is None:
        return
    for name in saved_names(type(node)):
        try:
            tensor = getattr(node, name).data
        except (AttributeError, RuntimeError):
            continue  # nothing was saved, or it was freed already
        if isinstance(tensor, torch.Tensor) and not tensor.ndim:
            yield tensor.untyped_storage()
