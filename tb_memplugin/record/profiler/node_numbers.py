"""Find the sequence number of autograd nodes for which torch's profiler recorded none."""

from __future__ import annotations

from collections.abc import Iterable

from tb_memplugin.record.torch_private.profiler import Event, OperatorFields


def number_behind_hooks(own: str, inside: Iterable[Event]) -> int:
    """Return a node's sequence number, taken from the event of its own function; -1 for none.

    torch takes the number from the first event inside the node (csrc/profiler/collection.cpp,
    `set_autograd_evaluate`). If a tensor has a hook, that event is the hook's, and the node has no number.

    Args:
        own: the name of the node's own function.
        inside: the events inside the node.
    """
    numbers = (
        fields.sequence_number
        for event in inside
        if isinstance(fields := event.extra_fields, OperatorFields) and event.name == own
    )
    return max(numbers, default=-1)
