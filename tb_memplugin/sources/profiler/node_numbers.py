"""Autograd's number of a node that torch's profiler gave none."""

from __future__ import annotations

from collections.abc import Iterable

from torch._C._profiler import _ExtraFields_TorchOp, _ProfilerEvent


def number_behind_hooks(own: str, inside: Iterable[_ProfilerEvent]) -> int:
    """A node's sequence number, -1 for none: that of its own function.

    torch reads it off the event that follows the node's start (csrc/profiler/collection.cpp,
    `set_autograd_evaluate`). Where a tensor has a hook, that event is the hook's, and the node stays without.

    Args:
        own: the name of the node's own function.
        inside: the events in it.
    """
    numbers = (
        fields.sequence_number
        for event in inside
        if isinstance(fields := event.extra_fields, _ExtraFields_TorchOp) and event.name == own
    )
    return max(numbers, default=-1)
