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
from dataclasses import dataclass

import numpy as np

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


def deep_copies(trace: MemoryTrace, is_candidate: Bool) -> DeepCopies:
    """Return the deep copies of parameters and tensors.

    Args:
        is_candidate: shape (allocations,), whether no label and no frame names a block's category.
    """
    blocks = trace.allocations
    marks = {text for text in distinct(trace.stacks) if _PARAMETER.fullmatch(text) or _TENSOR.fullmatch(text)}
    stacks = [row for row, stack in enumerate(trace.stacks) if not marks.isdisjoint(stack)] if marks else []
    copying = {row: _copying(trace.stacks[row], marks) for row in stacks}
    rows = np.flatnonzero(is_candidate & np.isin(blocks.stack, list(copying)) & (blocks.born >= 0))
    of_stack = [copying[row] for row in blocks.stack[rows].tolist()]
    number: dict[object, int] = {}
    line, outer = (
        np.array([number.setdefault(text, len(number)) for text in texts], np.intp)
        for texts in ([copied.caller for copied in of_stack], [copied.outer for copied in of_stack])
    )
    is_parameter = np.array([copied.is_parameter for copied in of_stack], bool)
    in_state_dict = np.array([copied.in_state_dict for copied in of_stack], bool)
    device = blocks.device[rows]
    alloc = np.flatnonzero(trace.events.kind == Kind.ALLOC)
    call = np.zeros(len(rows), np.intp)
    count = 0
    for each in np.unique(device).tolist():
        mine = np.flatnonzero(device == each)
        at = np.searchsorted(alloc[trace.events.device[alloc] == each], blocks.born[rows[mine]])
        is_next = (np.diff(at) == 1) & (np.diff(line[mine]) == 0)
        call[mine] = count + np.concatenate(([0], np.cumsum(~is_next)))
        count = int(call[mine[-1]]) + 1
    keeps = np.array([copied.is_parameter or copied.is_storage for copied in of_stack], bool)
    beside = {*zip(call[is_parameter].tolist(), outer[is_parameter].tolist(), strict=True)}
    is_weight = np.array([pair in beside for pair in zip(call.tolist(), outer.tolist(), strict=True)], bool)
    columns = (rows, line, call, is_weight, is_parameter, in_state_dict & ~is_weight)
    return DeepCopies(*(column[keeps] for column in columns))


@dataclass(frozen=True, slots=True)
class _Copying:
    """A tensor's deep copy: of its storage, or else a tensor without elements that receives the copy."""

    is_parameter: bool
    is_storage: bool
    in_state_dict: bool
    outer: tuple[str, ...]
    caller: tuple[str, ...]


def _copying(stack: Sequence[str], marks: set[str]) -> _Copying:
    """Return what a stack says of the tensor that is deep-copied in the innermost of the marked frames."""
    at = next(row for row, text in enumerate(stack) if text in marks)
    outer = tuple(text for text in stack[at + 1 :] if read_frame(text).is_python)
    last = max((row for row, text in enumerate(outer) if _COPYING.fullmatch(text)), default=-1)
    functions = [text.partition(" ")[0] for text in outer[: last + 1]]
    is_parameter = bool(_PARAMETER.fullmatch(stack[at]))
    is_storage = any(map(_STORAGE.fullmatch, stack[:at]))
    return _Copying(is_parameter, is_storage, functions == _OF_STATE_DICT, outer, outer[last + 1 :])


def of_weights(trace: MemoryTrace, copies: DeepCopies, category: UInt8, phase: UInt8) -> UInt8:
    """Return the category of each deep copy: of a parameter that is trained, of another weight, or not known.

    A copy is trained if more gradients of its size are alive at once than other parameters, and it is the
    model's own if its original is gone when the next forward begins, as the first of `[deepcopy(layer) ...]`.

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
        others = here[np.isin(category[here], _ORIGINALS)]
        for call in np.unique(copies.call[mine]).tolist():
            of_call = mine[copies.call[mine] == call]
            line = int(copies.line[of_call[0]])
            if line in trained:
                result[of_call] = trained[line]
                continue
            own = copies.row[copies.line == line]
            begun = int(next_event(forwards, int(blocks.born[copies.row[of_call]].max()), len(trace.events)))
            first = int(blocks.born[copies.row[of_call]].min())
            older = others[(blocks.born[others] < first) & (blocks.freed[others] >= begun)]
            originals = Counter(blocks.bytes[np.setdiff1d(older, own)].tolist())
            copied = Counter(blocks.bytes[copies.row[of_call]].tolist())
            result[of_call] = Category.PARAMETER_COPY if copied <= originals else Category.PARAMETER
        _state_dicts(trace, copies, category, here, result)
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
    known = set[int]().union(*of_line.values())
    lacking = Counter({size: count for size, count in lacking.items() if size in known})
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


def _state_dicts(trace: MemoryTrace, copies: DeepCopies, category: UInt8, here: Rows, result: UInt8) -> None:
    """Set deep copies of state dicts that have the sizes of all parameters and buffers to `PARAMETER_COPY`.

    All are those of the device, or those that one call, as of `model.to`, moved there.
    """
    blocks = trace.allocations
    mine = np.flatnonzero(copies.in_state_dict & np.isin(copies.row, here))
    parameters = here[category[here] == Category.PARAMETER]
    for call in np.unique(copies.call[mine]).tolist():
        of_call = mine[copies.call[mine] == call]
        rows = copies.row[of_call]
        first = blocks.born[rows].min()
        alive = parameters[(blocks.born[parameters] < first) & (blocks.freed[parameters] > first)]
        copied = Counter(blocks.bytes[rows].tolist())
        moved_by = [_mover(trace.stack(int(stack))) for stack in blocks.stack[alive].tolist()]
        for mover in (None, *{text for text in moved_by if text}):
            is_own = np.array([mover is None or text == mover for text in moved_by], bool)
            weights = Counter(blocks.bytes[alive[is_own]].tolist())
            least = (1 - MOST_OUTSIDE) * _total(weights)
            if len(rows) >= FEWEST and copied <= weights and _total(copied) >= least:
                result[of_call] = Category.PARAMETER_COPY
                break


def _mover(stack: Sequence[str]) -> tuple[str, ...]:
    """Return the frames outside of the method of a module that moved it; none if no method did."""
    last = max((row for row, text in enumerate(stack) if _MOVING.fullmatch(text)), default=-1)
    return tuple(stack[last + 1 :]) if last >= 0 else ()
