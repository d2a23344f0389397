"""Who fills the peak of a device: parts that sum to it, by what names most of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.divisions import By, codes, informative
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.source_lines import runs_library_model
from tb_memplugin.analysis.steps import highest_step
from tb_memplugin.analysis.subcategories import variables
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.kinds import MODELS_OWN
from tb_memplugin.trace.result import AnalysisResult
from tb_memplugin.trace.tables import Int64, Rows, module_text

NAMED_BY: tuple[By, ...] = ("line", "module", "operator")
"""What names all other memory: the first of these for which the recording has data, else the category."""


@dataclass(frozen=True, slots=True)
class Holder(AnalysisResult):
    """A part of a peak."""

    name: str
    """A source line, a module, an operator, a variable that holds what was alive before, or a category."""
    bytes: int
    """What it holds."""
    blocks: int
    """How many blocks have these bytes."""
    category: str
    """The category that most of them have."""
    is_name: bool
    """Whether `name` is a name from outside; false for a category."""


@dataclass(frozen=True, slots=True)
class PeakHolders(AnalysisResult):
    """Who fills the highest peak of a device."""

    device: str
    """The name of the device."""
    step: int
    """The number of its step."""
    event: int
    """The index of its event; -1 is the moment before the first."""
    bytes: int
    """The peak."""
    by: By
    """What names the holders besides parameters, gradients and optimizer state.

    Of a line that runs a whole model of a library, the layers are named.
    """
    holders: tuple[Holder, ...]
    """The largest first; they sum to the peak."""
    categories: tuple[tuple[str, int], ...]
    """Bytes by category, largest first; they sum to the peak."""


def peak_holders(trace: MemoryTrace, device: int) -> PeakHolders:
    """Divide the peak of a device (its row): the model's own memory by category, the rest by name."""
    step = highest_step(trace, device)
    rows = trace.allocations.alive_at(step.peak_event, device)
    offered = informative(trace, device, NAMED_BY)
    by: By = next((by for by in NAMED_BY if by in offered), "category")
    holders = _holders(trace, rows, by)
    categories: Counter[str] = Counter()
    for category in np.unique(trace.allocations.category[rows]).tolist():
        own = rows[trace.allocations.category[rows] == category]
        categories[Category(category).key] = int(trace.allocations.bytes[own].sum())
    return PeakHolders(
        device=trace.devices[device].name,
        step=step.number,
        event=step.peak_event,
        bytes=step.peak_bytes,
        by=by,
        holders=holders,
        categories=tuple(categories.most_common()),
    )


def _holders(trace: MemoryTrace, rows: Rows, by: By) -> tuple[Holder, ...]:
    part, keys = codes(trace, by, rows)
    if by == "module":
        part, keys = _folded(part, keys, folds([module.key for module in trace.modules]))
    elif by == "line":
        part, keys = _with_layers(trace, rows, part, keys)
    part, names = _with_variables(trace, rows, part, keys)
    category = trace.allocations.category[rows]
    own = np.isin(category, MODELS_OWN)
    used, group = np.unique(np.where(own, -1 - category.astype(np.int64), part), return_inverse=True)
    holders = []
    for number, key in enumerate(used.tolist()):
        inside = rows[group == number]
        size = trace.allocations.bytes[inside]
        by_category = np.bincount(trace.allocations.category[inside], size, len(Category))
        most = Category(int(np.argmax(by_category))).key
        name = most if key < 0 else names[key]
        is_name = key >= 0 and by != "category"
        holders.append(Holder(name, int(size.sum()), len(inside), most, is_name))
    return tuple(sorted(holders, key=lambda holder: (-holder.bytes, holder.name)))


def _folded(part: Int64, keys: Sequence[str], rows: Mapping[str, str]) -> tuple[Int64, tuple[str, ...]]:
    """Return parts in which repeated layers are one, as in the tables of the tab."""
    names = tuple(rows.get(key, key) for key in keys)
    first = {name: number for number, name in reversed(list(enumerate(names)))}
    return np.array([first[name] for name in names])[part], names


def _with_layers(
    trace: MemoryTrace, rows: Rows, part: Int64, keys: Sequence[str]
) -> tuple[Int64, tuple[str, ...]]:
    """Return parts in which the blocks of a line that runs a model from outside are of the model's layers."""
    stack, module = trace.allocations.stack[rows], trace.allocations.module[rows]
    runs_model = {row: runs_library_model(trace.stack(row)) for row in np.unique(stack).tolist()}
    in_layer = np.array([*(each.is_module for each in trace.modules), False])[module]
    in_layer &= np.array([runs_model[row] for row in stack.tolist()], bool)
    numbers: dict[str, int] = {}
    folded = folds([each.key for each in trace.modules])
    layers = [
        numbers.setdefault(_up_to_star(folded[each.key]), len(keys) + len(numbers)) for each in trace.modules
    ]
    return np.where(in_layer, np.array([*layers, -1])[module], part), (*keys, *numbers)


def _up_to_star(key: str) -> str:
    """Return the name of a folded layer, without what is inside of it."""
    segments = key.split(".")
    return module_text(".".join(segments[: [*segments, "*"].index("*") + 1]))


def _with_variables(
    trace: MemoryTrace, rows: Rows, part: Int64, keys: Sequence[str]
) -> tuple[Int64, list[str]]:
    """Return parts in which blocks of which only a variable is known are of that variable."""
    part, names = part.copy(), list(keys)
    for name, of_variable in variables(trace):
        part[np.isin(rows, of_variable)] = len(names)
        names.append(name)
    return part, names
