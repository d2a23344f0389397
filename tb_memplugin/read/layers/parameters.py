"""Give parameters, buffers and optimizer state the modules whose gradients have their sizes, in their order.

A model is moved, and an optimizer makes its state, in the order in which modules register parameters.
Backward tells the sizes of each module's gradients, which are those of its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from tb_memplugin.read.layers.calls import Call
from tb_memplugin.read.layers.matching import longest_common

MOST_STATES = 4
"""The largest number of tensors that an optimizer keeps of a parameter."""

COUNTER_BYTES = 8
"""The bytes of a buffer that only counts, such as `num_batches_tracked`."""


Place = tuple[tuple[int, str], ...]
"""Where a module is in the tree: at each level, which attribute of its parent it is, and its name."""


class Moved(NamedTuple):
    """A parameter or buffer that `Module._apply` allocated: its event, bytes, and the depth of `_apply`."""

    event: int
    size: int
    depth: int


class Gradient(NamedTuple):
    """A gradient: its bytes, and the call whose operators it is of."""

    size: int
    call: Call


def registered(gradients: Iterable[Gradient]) -> list[Gradient]:
    """Return one gradient of each parameter, in the order in which the modules register them.

    Args:
        gradients: gradients in time order, which may be of several steps.
    """
    by_module: dict[Place, list[Gradient]] = {}
    for gradient in gradients:
        of_module = by_module.setdefault(_place(gradient.call), [])
        if not of_module or of_module[0].call is gradient.call:
            of_module.append(gradient)
    return [gradient for path in sorted(by_module, key=_order) for gradient in by_module[path]]


def _place(call: Call) -> Place:
    """Return where a module is in the tree: at each level, when its parent's class makes it, and its name."""
    levels: list[tuple[int, str]] = []
    outer: Call | None = call
    while outer is not None and outer.parent is not None:
        named = outer.repeats or outer
        if named.name:
            levels.append((named.position, named.name))
        outer = outer.parent
    return tuple(reversed(levels))


def _order(path: Place) -> list[tuple[int, int, str]]:
    """Return a key that sorts modules as they are moved: submodules before what is the module's own."""
    last = (1 << 30, 0, "")
    key = []
    for position, name in path:
        index = name.rpartition(".")[2]
        key.append((position, int(index) if index.isdecimal() else 0, name))
    return [*key, last]


def match_moved(moved: Sequence[Moved], gradients: Sequence[Gradient]) -> dict[int, Call]:
    """Return the calls of the modules that moved parameters and buffers belong to, by event."""
    match = longest_common(
        [frozenset(((_depth(gradient), gradient.size),)) for gradient in gradients],
        [frozenset(((tensor.depth, tensor.size),)) for tensor in moved],
    )
    owner: dict[int, Call] = {}
    before: tuple[Moved, Call] | None = None
    for column, tensor in enumerate(moved):
        if column in match:
            before = tensor, gradients[match[column]].call
        elif before and not (
            tensor.depth == before[0].depth and tensor.size in (before[0].size, COUNTER_BYTES)
        ):
            before = None  # else a buffer, which follows the module's parameters
        if before:
            owner[tensor.event] = before[1]
    return owner


def complete_loops(
    moved: Sequence[Moved], gradients: Sequence[Gradient], owner: Container[int]
) -> set[tuple[str, tuple[int, ...]]]:
    """Return the loops that skipped no module: the names of the calls that looped, and the loops' sites.

    A module that was skipped has no gradients, so parameters with the sizes of its neighbours' have no owner.

    Args:
        owner: has the events of the parameters that match a gradient.
    """
    lost = {(tensor.depth, tensor.size) for tensor in moved if tensor.event not in owner}
    loops: dict[tuple[str, tuple[int, ...]], bool] = {}
    for gradient in gradients:
        inner = gradient.call
        while inner.parent is not None:
            if inner.may_skip:
                loop = (inner.parent.fqn(), inner.site)
                has_owner = (_depth(gradient), gradient.size) not in lost
                loops[loop] = loops.get(loop, bool(moved)) and has_owner
            inner = inner.parent
    return {loop for loop, skipped_none in loops.items() if skipped_none}


def _depth(gradient: Gradient) -> int:
    """Return how many `_apply` are open when the parameter of a gradient is moved."""
    return 1 + sum(name.count(".") + 1 for _, name in _place(gradient.call))


def match_state(
    state: Sequence[tuple[int, int]], parameters: Sequence[tuple[int, Call | None]]
) -> dict[int, Call]:
    """Return the calls of the modules that an optimizer's state belongs to, by event.

    Args:
        made: (event, bytes) of each tensor of the state, in time order.
        parameters: the bytes of each parameter, and the call of its module, as they are registered.
    """
    sizes = Counter(size for size, _ in parameters)
    times = max(
        (count // sizes[size] for size, count in Counter(s for _, s in state).items() if sizes[size]),
        default=0,
    )
    repeated = [parameter for parameter in parameters for _ in range(min(times, MOST_STATES))]
    match = longest_common(
        [frozenset((size,)) for size, _ in repeated], [frozenset((size,)) for _, size in state]
    )
    owners = ((state[column][0], repeated[row][1]) for column, row in match.items())
    return {event: call for event, call in owners if call is not None}
