"""Give parameters, buffers and optimizer state the modules whose gradients have their sizes, in their order.

A model is moved, and an optimizer makes its state, in the order in which modules register parameters.
Backward tells the sizes of each module's gradients, which are those of its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

import numpy as np

from tb_memplugin.read.layers.backward import ACCUMULATE, BETWEEN, SUM, Meaning, surely_common
from tb_memplugin.read.layers.calls import Call
from tb_memplugin.read.layers.frames import Frames, PythonFrame, Role
from tb_memplugin.read.layers.source_text import NOT_KNOWN
from tb_memplugin.trace import Category, Kind, MemoryTrace
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8

MOST_STATES = 4
"""The largest number of tensors that an optimizer keeps of a parameter."""

KEPT = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)
"""What is alive between steps and has the bytes of a parameter."""

COUNTER_BYTES = 8
"""The bytes of a buffer that only counts, such as `num_batches_tracked`."""


EMBEDDING = "embedding"
OF_WEIGHTS = (EMBEDDING, "mm", "addmm", "bmm", "convolution", "cudnnconvolution")
"""Nodes whose operators take a weight."""

ATTENTION, OF_ATTENTION = "multi_head_attention_forward", "out_proj"
"""The function of torch that uses the weights of a module below `MultiheadAttention`, and that module."""

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


class Gradients:
    """Tells which gradients are of a module other than that whose operators made them.

    Args:
        stacks, meanings: the numbers of the frames of each stack, and what it says.
        calls: all module calls; those of modules that only lend their weights are added.
    """

    def __init__(
        self,
        trace: MemoryTrace,
        frames: Frames,
        stacks: Sequence[tuple[int, ...]],
        meanings: Sequence[Meaning],
        calls: list[Call],
    ) -> None:
        self._trace, self._frames, self._stacks = trace, frames, stacks
        self._meanings, self._calls = meanings, calls
        self._lent: dict[tuple[int, str], Call] = {}
        self._inner: dict[int, list[PythonFrame]] = {}

    def refine(self, owner: Int32, confidence: UInt8, operator: Int32) -> None:
        """Set the call of each gradient's module, in place; -1 where it is not sure.

        Args:
            owner: shape (events,), the row of the call in which each event allocates.
            confidence: shape (events,), as `Matched.evidence`.
            operator: shape (events,), as `Matched.operator`.
        """
        events = self._trace.events
        is_gradient = (events.kind == Kind.ALLOC) & (events.category == Category.GRADIENT)
        whose = owner.copy()

        def lender(event: int) -> Call | None:
            row = int(whose[event])
            meaning = self._meanings[events.stack[event]]
            return None if row < 0 else self._lender(self._calls[row], meaning, int(operator[event]))

        by_node = np.array([meaning.node == EMBEDDING for meaning in self._meanings] + [False])
        in_place = (events.kind == Kind.ALLOC) & by_node[events.stack] & ~is_gradient
        is_sum = np.array([_adds(meaning) for meaning in self._meanings] + [False])[events.stack]
        gradients = np.flatnonzero(is_gradient & (is_sum | (owner >= 0))).tolist()
        summands = {event: list(self._summands(event, is_sum)) for event in gradients if is_sum[event]}
        in_place[[row for rows in summands.values() for row in rows]] = False
        is_backward = np.array([meaning.is_backward for meaning in self._meanings] + [True])[events.stack]
        step = np.cumsum((events.kind == Kind.ALLOC) & ~is_backward)  # the same within a backward
        added = {(int(step[row]), int(events.bytes[row])): row for row in np.flatnonzero(in_place).tolist()}
        for event in gradients:
            meaning = self._meanings[events.stack[event]]
            has_summands = event in summands
            later = added.get((int(step[event]), int(events.bytes[event])), -1)
            if confidence[event] == BETWEEN:
                call = None
            elif later > event and (has_summands or meaning.node == EMBEDDING):
                call = None  # another embedding's gradient is added to this one, in place
            elif has_summands:
                call = self._first(list(map(lender, summands[event])))
            else:
                call = lender(event)
            owner[event] = -1 if call is None else call.row

    def _summands(self, event: int, is_sum: Bool) -> Iterator[int]:
        """Yield the events that allocated what an event adds up: what has its bytes and is freed next."""
        kind, blocks = self._trace.events.kind, self._trace.allocations
        size, waiting = self._trace.events.bytes[event], [event]
        while waiting:
            last = waiting.pop()
            after = last + 1
            while after < len(kind) and kind[after] != Kind.ALLOC:
                block = blocks.freed_by[after]
                born = int(blocks.born[block])
                if block >= 0 and 0 <= born < last and blocks.bytes[block] == size:
                    if is_sum[born]:
                        waiting.append(born)
                    else:
                        yield born
                after += 1

    @staticmethod
    def _first(calls: Sequence[Call | None]) -> Call | None:
        """Return the call of the module that registers a parameter that several share; None if not known."""
        places = {_place(call): call for call in calls if call is not None}
        if not calls or None in calls:
            return None
        first, *others = sorted(places, key=_order)
        if not others:
            return places[first]
        at = next(
            (at for at, levels in enumerate(zip(first, others[0], strict=False)) if len(set(levels)) > 1), -1
        )
        is_known = at >= 0 and 0 < first[at][0] < others[0][at][0]
        return places[first] if len(others) == 1 and is_known else None

    def _lender(self, call: Call, meaning: Meaning, operator: int) -> Call | None:
        """Return the call of the module whose weight an operator of a call uses; None if not known."""
        if operator < 0:
            return call
        inner = self._inside_call(operator)
        names = [frame.name for frame in inner]
        if ATTENTION in names:
            return self._below(call, OF_ATTENTION, 1 << 29) if names[-1] == ATTENTION else call
        text = self._frames.text
        targets = next((found for f in reversed(inner) if (found := text.weights(f.file, f.line))), ())
        if targets:
            return self._below(call, targets[0].path, targets[0].position) if len(targets) == 1 else None
        if meaning.node in OF_WEIGHTS and any(text.uses_weights(frame.file, frame.line) for frame in inner):
            return None
        return call

    def _inside_call(self, stack: int) -> list[PythonFrame]:
        """Return the Python frames of a stack (its row) inside its innermost module call, outermost first."""
        if stack not in self._inner:
            every = self._frames.all
            frames = [every[number] for number in self._stacks[stack]]
            outer = max((at for at, frame in enumerate(frames) if frame.role == Role.CALL), default=-1)
            self._inner[stack] = frames[outer + 1 :]
        return self._inner[stack]

    def _below(self, call: Call, path: str, position: int) -> Call:
        if (call.row, path) not in self._lent:
            below = Call(call, (), (), -1, len(self._calls), name=path, position=position, is_by_text=True)
            self._lent[call.row, path] = below
            self._calls.append(below)
        return self._lent[call.row, path]


def _adds(meaning: Meaning) -> bool:
    """Whether the engine adds a gradient to another."""
    return SUM in meaning.operators and meaning.node in ("", ACCUMULATE)


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
    for of_module in by_module.values():
        if _is_weight_and_bias(of_module):
            of_module.sort(key=lambda gradient: -gradient.size)
    return [gradient for path in sorted(by_module, key=_order) for gradient in by_module[path]]


def _is_weight_and_bias(gradients: Sequence[Gradient]) -> bool:
    """Whether a module has two gradients, of which one has a row for each element of the other.

    The larger one is registered first, but where a module ran twice, its sum may come last.
    """
    sizes = sorted(gradient.size for gradient in gradients)
    return len(sizes) == 2 and sizes[0] > 0 and sizes[1] % sizes[0] == 0


def _place(call: Call) -> Place:
    """Return where a module is in the tree: at each level, when its parent's class makes it, and its name."""
    levels: list[tuple[int, str]] = []
    outer: Call | None = call
    while outer is not None:
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


def _is_order_known(tree: Iterable[Place]) -> bool:
    """Whether it is known that modules are registered in an order, not only supposed.

    Attributes are if a text has the class that sets them, and the modules of a list are.
    """
    for first, second in pairwise(tree):
        levels = next((pair for pair in zip(first, second, strict=False) if len(set(pair)) > 1), None)
        if levels is None:
            continue  # the same module, or one within the other
        (position, name), (position_after, name_after) = levels
        if NOT_KNOWN in name + name_after or position == position_after:
            list_name, _, index = name.rpartition(".")
            list_after, _, index_after = name_after.rpartition(".")
            if list_name != list_after or not (index + index_after).isdecimal():
                return False
        elif not position or not position_after:
            return False
    return True


def _matched(
    rows: Sequence[tuple[int, ...]],
    columns: Sequence[tuple[int, ...]],
    owners: Sequence[Call],
    every: list[Call],
) -> dict[int, Call]:
    """Return the call that each column surely is of: of a parameter with its depth and bytes, in their order.

    Where the order of all is not known, those of one depth and size match if there are as many columns. A
    column that may be of several modules is of the innermost one around these, in a part that is not known.

    Args:
        rows, columns: the depth and bytes, or bytes alone, of parameters and of what may be of them.
        every: all module calls; to which those of the parts are added.
    """
    tree = list(map(_place, owners))
    if _is_order_known(tree):
        match = surely_common(list(map(_alone, rows)), list(map(_alone, columns)), tree)
        return {column: owners[row] for column, row in match.items()}
    owner: dict[int, Call] = {}
    for key in set(rows):
        of_rows = [row for row, each in enumerate(rows) if each == key]
        of_columns = [column for column, each in enumerate(columns) if each == key]
        if len(of_rows) == len(of_columns):
            between = enumerate(pairwise([tree[row] for row in of_rows]), 1)
            ends = [at for at, pair in between if len(set(pair)) > 1 and _is_order_known(pair)]
            for first, end in pairwise([0, *ends, len(of_rows)]):
                call = _around([owners[row] for row in of_rows[first:end]], every)
                owner |= {column: call for column in of_columns[first:end] if call is not None}
    return owner


def _alone(key: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    return frozenset((key,))


def _around(calls: Sequence[Call], every: list[Call]) -> Call | None:
    """Return the call of a part, not known, of the innermost module around some others; None for the model.

    If they are of one module, it is its call.
    """
    tree = list(map(_place, calls))
    if len(set(tree)) == 1:
        return calls[0]
    shared = next((at for at, each in enumerate(zip(*tree, strict=False)) if len(set(each)) > 1), 0)
    outer: Call | None = calls[0]
    while outer is not None and len(_place(outer)) > shared:
        outer = outer.parent
    if outer is None or outer.parent is None:
        return None
    every.append(Call(outer, (), (), -1, len(every), name=NOT_KNOWN))
    return every[-1]


def match_moved(moved: Sequence[Moved], gradients: Sequence[Gradient], every: list[Call]) -> dict[int, Call]:
    """Return the calls of the modules that moved parameters and buffers belong to, by event.

    Args:
        every: as for `match_state`.
    """
    depths = _depths_when_moved(moved, gradients)
    match = _matched(
        [(depth, gradient.size) for depth, gradient in zip(depths, gradients, strict=True)],
        [(tensor.depth, tensor.size) for tensor in moved],
        [gradient.call for gradient in gradients],
        every,
    )
    owner: dict[int, Call] = {}
    before: tuple[Moved, Call] | None = None
    for column, tensor in enumerate(moved):
        if column in match:
            before = tensor, match[column]
        elif before and not (
            tensor.depth == before[0].depth and tensor.size in (before[0].size, COUNTER_BYTES)
        ):
            before = None  # else a buffer, which follows the module's parameters
        if before:
            owner[tensor.event] = before[1]
    return owner


def _depths_when_moved(moved: Sequence[Moved], gradients: Sequence[Gradient]) -> list[int]:
    """Return how many `_apply` were open when the parameter of each gradient was moved.

    A model may be moved before it is wrapped, as by `DistributedDataParallel`. So as many of the modules
    around all gradients are left out as make the most parameters fit, and none if none is better.
    """
    depths = list(map(depth_of, gradients))
    levels = zip(*(_place(gradient.call) for gradient in gradients), strict=False)
    around = takewhile(lambda level: len(set(level)) == 1, levels)
    wrapping = [0, *accumulate(level[0][1].count(".") + 1 for level in around)]
    tensors = Counter((tensor.depth, tensor.size) for tensor in moved)

    def fitting(left_out: int) -> int:
        pairs = zip(depths, gradients, strict=True)
        return (Counter((depth - left_out, each.size) for depth, each in pairs) & tensors).total()

    left_out = max(wrapping, key=fitting)  # the first of those that are equally good
    return [depth - left_out for depth in depths]


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
    for depth, gradient in zip(_depths_when_moved(moved, gradients), gradients, strict=True):
        inner = gradient.call
        while inner.parent is not None:
            if inner.may_skip:
                loop = (inner.parent.fqn(), inner.site)
                has_owner = (depth, gradient.size) not in lost
                loops[loop] = loops.get(loop, bool(moved)) and has_owner
            inner = inner.parent
    return {loop for loop, skipped_none in loops.items() if skipped_none}


def before_the_window(
    category: UInt8, size: Int64, gradients: Sequence[Gradient]
) -> Iterator[tuple[Int64, str]]:
    """Yield the blocks of the start state that are of some modules, and the name that these share.

    A module's parameter, gradient and state have the bytes of its gradient. Which block is of which module is
    not known, so what the names of the modules differ in is `NOT_KNOWN`. Nothing is said of state and of
    gradients unless the parameters fit.

    Args:
        category, size: shape (blocks,), a `Category` and the bytes of each block.
        gradients: one of each parameter.
    """
    of_size: dict[int, list[Place]] = {}
    for gradient in gradients:
        of_size.setdefault(gradient.size, []).append(_place(gradient.call))
    for bytes_each, tree in of_size.items():
        blocks = [np.flatnonzero((category == kind) & (size == bytes_each)) for kind in KEPT]
        if len(blocks[0]) == len(tree):  # else another module has parameters of these bytes
            for of_kind in blocks:
                if len(of_kind) in range(len(tree), MOST_STATES * len(tree) + 1, len(tree)):
                    yield of_kind, _shared_name(tree)


def _shared_name(tree: Sequence[Place]) -> str:
    """Return the name that modules share: `layers.?.mlp` for those of a list, "" for none."""
    parts: list[str] = []
    for level in zip(*tree, strict=False):
        names = {name for _, name in level}
        lists = {name.rpartition(".")[0] for name in names}
        if len(names) == 1:
            parts += names
        elif len(lists) == 1 and all(name.rpartition(".")[2].isdecimal() for name in names):
            parts.append(f"{lists.pop()}.{NOT_KNOWN}")
        else:
            break
    is_module = all(len(place) == len(parts) for place in tree)
    return ".".join(parts if is_module or not parts else [*parts, NOT_KNOWN])


def depth_of(gradient: Gradient) -> int:
    """Return how many `_apply` are open when the parameter of a gradient is moved."""
    return 1 + sum(name.count(".") + 1 for _, name in _place(gradient.call))


def in_parameter_order(moved: Iterable[tuple[int, int, Call | None]]) -> list[tuple[int, Call | None]]:
    """Return parameters as `Module.parameters` has them: what is a module's own before its submodules.

    Args:
        moved: (bytes, depth of `_apply`, call) of each as they are moved: after the submodules.
    """
    result: list[tuple[int, Call | None]] = []
    at, depth_before = -1, -1
    for size, depth, call in moved:
        at = at + 1 if call is None and depth == depth_before else len(result)
        while call is not None and at and _is_below(result[at - 1][1], call):
            at -= 1
        result.insert(at, (size, call))
        depth_before = depth
    return result


def _is_below(inner: Call | None, outer: Call) -> bool:
    """Whether a module is below another in the tree."""
    place = _place(outer)
    return inner is not None and _place(inner)[: len(place)] == place != _place(inner)


def match_state(
    state: Sequence[tuple[int, int]],
    parameters: Sequence[tuple[int, Call | None]],
    every: list[Call],
    *,
    is_order_known: bool,
) -> dict[int, Call]:
    """Return the calls of the modules that an optimizer's state belongs to, by event.

    Args:
        made: (event, bytes) of each tensor of the state, in time order.
        parameters: the bytes of each parameter, and the call of its module, as they are registered.
        every: all module calls; those of parts that are not known are added.
        is_order_known: whether this order was seen; else it is that of their modules, as far as it is known.
    """
    sizes = Counter(size for size, _ in parameters)
    times = max(
        (count // sizes[size] for size, count in Counter(s for _, s in state).items() if sizes[size]),
        default=0,
    )
    repeated = [parameter for parameter in parameters for _ in range(min(times, MOST_STATES))]
    of_state = [(size,) for _, size in state]
    if is_order_known:
        tree = [call and _place(call) for _, call in repeated]
        rows = surely_common([_alone((size,)) for size, _ in repeated], list(map(_alone, of_state)), tree)
        owners = {column: repeated[row][1] for column, row in rows.items()}
    else:
        named = [(size, call) for size, call in repeated if call is not None]
        owners = {**_matched([(size,) for size, _ in named], of_state, [call for _, call in named], every)}
    return {state[column][0]: call for column, call in owners.items() if call is not None}
