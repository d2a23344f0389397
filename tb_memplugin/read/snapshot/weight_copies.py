"""Deep copies of weights in a snapshot: averages of weights, target and reference models, kept state dicts.

`copy.deepcopy(model)` copies each parameter in `Parameter.__deepcopy__`, and buffers in `Tensor.__deepcopy__`
below the same frames of copy.py. A deep copy of a state dict shows tensors directly in one dictionary: it is
a copy of the weights if it has the sizes of all parameters and buffers. Clones outside of `copy.deepcopy` are
not told: gradients and an optimizer's state are cloned by lines that look the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from tb_memplugin.read.categories import numbered
from tb_memplugin.read.snapshot.phases import next_event
from tb_memplugin.read.snapshot.same_sizes import most_alive
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase
from tb_memplugin.trace.frames import distinct, read_frame
from tb_memplugin.trace.tables import Bool, Int64, Rows, UInt8

FEWEST = 3
"""The fewest blocks of a state dict that can be told by their sizes."""

MOST_OUTSIDE = 0.02
"""The most of the parameters' and buffers' bytes that a state dict may lack, as buffers that are not kept."""

_PARAMETER = re.compile(r"__deepcopy__ .*torch[/\\]nn[/\\]parameter\.py:\d+")
_TENSOR = re.compile(r"__deepcopy__ .*torch[/\\]_tensor\.py:\d+")
_STORAGE = re.compile(r"\w+ .*torch[/\\]storage\.py:\d+")
_COPYING = re.compile(r"(deepcopy|_deepcopy_\w+|_reconstruct) .*[/\\]copy\.py:\d+")
_MOVING = re.compile(r"\w+ .*torch[/\\]nn[/\\]modules[/\\]module\.py:\d+")
_OF_STATE_DICT = ["deepcopy", "_reconstruct", "deepcopy"]
"""Functions of copy.py for a tensor in an ordered dictionary, innermost first."""

_ORIGINALS = (Category.PARAMETER, Category.UNKNOWN, Category.INPUT)
"""Categories of what may have been copied: parameters that no frame names are one of the others."""


@dataclass(frozen=True, slots=True)
class DeepCopies:
    """Blocks that `copy.deepcopy` made of parameters and tensors, columns of equal length.

    `row` is of `trace.allocations`; `line` is a number for the stack that called `copy.deepcopy`, and `call`
    for each call of it; `is_weight` says that frames show a parameter, or a buffer beside one, and
    `is_parameter` the first of these; `in_state_dict` that the tensor was directly in an ordered dictionary.
    """

    row: Int64
    line: Rows
    call: Rows
    is_weight: Bool
    is_parameter: Bool
    in_state_dict: Bool

    def only(self, mask: Bool) -> DeepCopies:
        """Return the copies of a mask."""
        return DeepCopies(*(getattr(self, column.name)[mask] for column in fields(self)))


def deep_copies(trace: MemoryTrace, is_candidate: Bool) -> DeepCopies:
    """Return the deep copies of parameters and tensors.

    Args:
        is_candidate: shape (allocations,), whether no label and no frame names a block's category.
    """
    blocks = trace.allocations
    copying = _copying_stacks(trace)
    rows = np.flatnonzero(is_candidate & np.isin(blocks.stack, list(copying)) & (blocks.born >= 0))
    number: dict[object, int] = {}
    columns = np.array(
        [
            (
                number.setdefault(copied.caller, len(number)),
                number.setdefault(copied.outer, len(number)),
                copied.is_parameter,
                copied.is_storage,
                copied.in_state_dict,
            )
            for copied in copying.values()
        ],
        np.intp,
    ).reshape(-1, 5)[np.searchsorted(list(copying), blocks.stack[rows])]
    line, outer = columns[:, 0], columns[:, 1]
    is_parameter, is_storage, in_state_dict = columns[:, 2:].astype(bool).T
    call = _calls(trace, rows, line)
    pair = numbered(call, outer)
    is_weight = np.isin(pair, pair[is_parameter])
    every = DeepCopies(rows, line, call, is_weight, is_parameter, in_state_dict & ~is_weight)
    return every.only(is_parameter | is_storage)


def _calls(trace: MemoryTrace, rows: Int64, line: Rows) -> Rows:
    """Return a number for each call of `copy.deepcopy`: blocks of one line with no others between them."""
    device = trace.allocations.device[rows]
    alloc = np.flatnonzero(trace.events.kind == Kind.ALLOC)
    call = np.zeros(len(rows), np.intp)
    for each in np.unique(device).tolist():
        mine = np.flatnonzero(device == each)
        at = np.searchsorted(alloc[trace.events.device[alloc] == each], trace.allocations.born[rows[mine]])
        is_next = (np.diff(at) == 1) & (np.diff(line[mine]) == 0)
        call[mine] = np.concatenate(([0], np.cumsum(~is_next)))
    return numbered(device, call)


@dataclass(frozen=True, slots=True)
class _Copying:
    """A stack in which a tensor is copied: its storage, or else a tensor without elements that receives it.

    `outer` are the frames outside of `__deepcopy__`, and `caller` those outside of copy.py.
    """

    is_parameter: bool
    is_storage: bool
    in_state_dict: bool
    outer: tuple[str, ...]
    caller: tuple[str, ...]


def _copying_stacks(trace: MemoryTrace) -> dict[int, _Copying]:
    """Return what the stacks (by row) say in which a tensor is copied, by the innermost `__deepcopy__`."""
    texts = distinct(trace.stacks)
    parameter = {text for text in texts if _PARAMETER.fullmatch(text)}
    marks = parameter | {text for text in texts if _TENSOR.fullmatch(text)}
    if not marks:
        return {}
    copying = {text for text in texts if _COPYING.fullmatch(text)}
    storage = {text for text in texts if _STORAGE.fullmatch(text)}
    python = {text for text in texts if read_frame(text).is_python}
    result: dict[int, _Copying] = {}
    for row, stack in enumerate(trace.stacks):
        at = next((at for at, text in enumerate(stack) if text in marks), None)
        if at is None:
            continue
        outer = tuple(text for text in stack[at + 1 :] if text in python)
        last = max((at for at, text in enumerate(outer) if text in copying), default=-1)
        result[row] = _Copying(
            is_parameter=stack[at] in parameter,
            is_storage=not storage.isdisjoint(stack[:at]),
            in_state_dict=[text.partition(" ")[0] for text in outer[: last + 1]] == _OF_STATE_DICT,
            outer=outer,
            caller=outer[last + 1 :],
        )
    return result


def of_weights(trace: MemoryTrace, copies: DeepCopies, category: UInt8, phase: UInt8) -> UInt8:
    """Return the category of each deep copy: of a parameter that is trained, of another weight, or not known.

    A copy is trained if more gradients of its size are alive at once than other parameters, and it is the
    model's own if its original is gone when the next forward begins, as the first of `[deepcopy(layer) ...]`.
    All calls of a line are as its first.

    Args:
        category: the category of each allocation as far as it is known.
        phase: the phase of each event.
    """
    blocks = trace.allocations
    result: UInt8 = category[copies.row]
    for device in np.unique(blocks.device[copies.row]).tolist():
        here = np.flatnonzero(blocks.device == device)
        mine = np.flatnonzero(copies.is_weight & (blocks.device[copies.row] == device))
        mine = mine[result[mine] != Category.PARAMETER]
        forwards = np.flatnonzero((trace.events.device == device) & (phase == Phase.FORWARD))
        trained = _trained(trace, copies, mine, category, here)
        originals = here[np.isin(category[here], _ORIGINALS)]
        for line in np.unique(copies.line[mine]).tolist():
            of_line = mine[copies.line[mine] == line]
            if line in trained:
                result[of_line] = trained[line]
                continue
            first = copies.row[of_line[copies.call[of_line] == copies.call[of_line[0]]]]
            begun = int(next_event(forwards, int(blocks.born[first[-1]]), len(trace.events)))
            kept = originals[
                (blocks.born[originals] < blocks.born[first[0]]) & (blocks.freed[originals] >= begun)
            ]
            has_originals = Counter(blocks.bytes[first].tolist()) <= Counter(blocks.bytes[kept].tolist())
            result[of_line] = Category.PARAMETER_COPY if has_originals else Category.PARAMETER
        in_dict = np.flatnonzero(copies.in_state_dict & (blocks.device[copies.row] == device))
        result[in_dict[_of_all_weights(trace, copies, in_dict, category, here)]] = Category.PARAMETER_COPY
    return result


def _trained(
    trace: MemoryTrace, copies: DeepCopies, mine: Rows, category: UInt8, here: Rows
) -> dict[int, Category]:
    """Return the lines whose copies have the gradients that other parameters lack, `PARAMETER`.

    Where several lines may have them, all are `UNKNOWN`.

    Args:
        mine: rows of `copies`, those of one device that are weights.
        here: the allocations of the device.
    """
    blocks = trace.allocations
    gradients = here[category[here] == Category.GRADIENT]
    if not len(gradients) or not len(mine):
        return {}
    moment = most_alive(blocks.born[gradients], blocks.freed[gradients], len(trace.events))
    alive = here[(blocks.born[here] <= moment) & (blocks.freed[here] > moment)]
    mine = mine[np.isin(copies.row[mine], alive) & copies.is_parameter[mine]]
    parameters = alive[category[alive] == Category.PARAMETER]
    lacking = Counter(blocks.bytes[alive[category[alive] == Category.GRADIENT]].tolist())
    lacking -= Counter(blocks.bytes[parameters].tolist())
    of_line = {
        line: Counter(blocks.bytes[copies.row[mine[copies.line[mine] == line]]].tolist())
        for line in np.unique(copies.line[mine]).tolist()
    }
    copied_sizes = set[int]().union(*of_line.values())
    lacking = Counter({size: count for size, count in lacking.items() if size in copied_sizes})
    if not lacking:
        return {}
    fitting = [line for line, sizes in of_line.items() if sizes == lacking]
    fitting = fitting or [
        line for line, sizes in of_line.items() if lacking <= sizes and 2 * _total(lacking) >= _total(sizes)
    ]
    if len(fitting) == 1:
        return {fitting[0]: Category.PARAMETER}
    return {line: Category.UNKNOWN for line, sizes in of_line.items() if sizes & lacking}


def _total(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _of_all_weights(trace: MemoryTrace, copies: DeepCopies, mine: Rows, category: UInt8, here: Rows) -> Bool:
    """Return a mask of deep copies of state dicts that have the sizes of all parameters and buffers.

    All are those of the device, or those that one call, as of `model.to`, moved there.

    Args:
        mine: rows of `copies`, those of one device that were in ordered dictionaries.
        here: the allocations of the device.
    """
    blocks = trace.allocations
    mask = np.zeros(len(mine), bool)
    parameters = here[category[here] == Category.PARAMETER] if len(mine) else here[:0]
    callers: dict[tuple[str, ...], int] = {(): 0}
    moved_by = {
        stack: callers.setdefault(_mover(trace.stack(stack)), len(callers))
        for stack in np.unique(blocks.stack[parameters]).tolist()
    }
    mover = np.array([moved_by[stack] for stack in blocks.stack[parameters].tolist()], np.intp)
    rows = copies.row[mine]
    bounds = np.flatnonzero(np.diff(copies.call[mine], prepend=-1, append=-1)).tolist()
    changes = np.sort(np.concatenate((blocks.born[parameters], blocks.freed[parameters])))
    is_whole: dict[tuple[int, bytes], bool] = {}  # by the changes of parameters until then, and sizes
    for start, end in pairwise(bounds):
        first, size = blocks.born[rows[start]], blocks.bytes[rows[start:end]]
        key = int(np.searchsorted(changes, first)), size.tobytes()
        if key not in is_whole:
            is_alive = (blocks.born[parameters] < first) & (blocks.freed[parameters] > first)
            groups = (is_alive, *(is_alive & (mover == each) for each in np.unique(mover[mover > 0])))
            weights = [Counter(blocks.bytes[parameters[is_own]].tolist()) for is_own in groups]
            is_whole[key] = any(_is_whole(Counter(size.tolist()), of_model) for of_model in weights)
        mask[start:end] = is_whole[key]
    return mask


def _is_whole(copied: Counter[int], weights: Counter[int]) -> bool:
    """Whether some sizes are those of all weights of a model, apart from small buffers."""
    least = (1 - MOST_OUTSIDE) * _total(weights)
    return copied.total() >= FEWEST and copied <= weights and _total(copied) >= least


def _mover(stack: Sequence[str]) -> tuple[str, ...]:
    """Return the frames outside of the method of a module that moved it; none if no method did."""
    last = max((row for row, text in enumerate(stack) if _MOVING.fullmatch(text)), default=-1)
    return tuple(stack[last + 1 :]) if last >= 0 else ()
