"""Find copies of a model's weights: deepcopies, EMA weights, clones of state dicts.

A copy of one tensor looks like any tensor of its size. A copy of a model does not: its tensors have the sizes
of all parameters in the parameters' order, or the variables that hold them end in the parameters' names.
Gradients have the same sizes in the same order, so what is made between a backward and the optimizer's step
is not taken for a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.read.categories import Born
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.storages import Sighting
from tb_memplugin.trace import Category, Phase, Reason, Spans
from tb_memplugin.trace.labels import ALIVE_BEFORE
from tb_memplugin.trace.tables import NO_OPERATOR, Bool, Int64, UInt8, code_mask

FEWEST = 3
"""A model with fewer parameters has no copies that can be told: few sizes agree by accident."""

COPYING = (
    "clone",
    "empty_like",
    "empty_strided",
    "_to_copy",
    "to",
    "copy_",
    "contiguous",
    "set_",
    NO_OPERATOR,
)
"""The operators, without `aten::`, that allocate a copy.

A deepcopy copies storages without an operator; where operators are intercepted, `set_` is the first with it.
"""

UNDECIDED = code_mask((Reason.NO_RULE, Reason.ALIVE_IN_FORWARD, Reason.KEPT))
"""The reasons of blocks for which being a copy of a parameter is the better explanation."""

OF_AN_OPTIMIZER = "group "
"""The beginning of the labels of parameters that only an optimizer holds: they are trained, not copied."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights in one order, columns of equal length: their FQNs, the rows of their modules, and bytes."""

    names: tuple[str, ...]
    modules: tuple[int, ...]
    bytes: Int64

    @classmethod
    def of(cls, sightings: Iterable[Sighting], categories: Iterable[Category]) -> Weights:
        """Return the weights of the models among the sightings, each once, in the order of the sightings."""
        wanted = set(categories)
        rows = {
            sighting.label: sighting
            for sighting in sightings
            if sighting.category in wanted and sighting.module >= 0
        }
        sizes = np.array([sighting.bytes for sighting in rows.values()], np.int64)
        return cls(tuple(rows), tuple(sighting.module for sighting in rows.values()), sizes)

    def in_order(self, order: Sequence[str]) -> Weights:
        """Return the weights that an order of names contains, in that order."""
        row_of = {name: row for row, name in enumerate(self.names)}
        rows = [row_of[name] for name in dict.fromkeys(order) if name in row_of]
        return Weights(
            tuple(self.names[row] for row in rows),
            tuple(self.modules[row] for row in rows),
            self.bytes[np.array(rows, np.intp)],
        )

    def runs_in(self, sizes: Int64) -> Int64:
        """Return where runs begin in which the sizes are those of all weights, in their order."""
        count = len(self.bytes)
        if not FEWEST <= count <= len(sizes):
            return np.empty(0, np.int64)
        begins = np.arange(len(sizes) - count + 1)
        for offset in range(count):
            begins = begins[sizes[begins + offset] == self.bytes[offset]]
            if not len(begins):
                break
        disjoint: list[int] = []
        for begin in begins.tolist():
            if not disjoint or begin >= disjoint[-1] + count:
                disjoint.append(begin)
        return np.array(disjoint, np.int64)


def fqns(names: ModuleNames) -> list[str]:
    """Return the FQNs of the models' parameters and buffers, as a state dict has them."""
    return [fqn for _, fqn in names.owner_of.values()]


def references(sightings: Sequence[Sighting], order: Sequence[str]) -> list[Weights]:
    """Return the weights of the models in the orders in which programs copy them, the longer first.

    Args:
        sightings: sightings that contain the parameters and buffers of the models.
        order: see `fqns`.
    """
    both = Weights.of(sightings, (Category.PARAMETER, Category.BUFFER)).in_order(order)
    parameters = Weights.of(sightings, (Category.PARAMETER,)).in_order(order)
    return [both, parameters] if len(both.names) > len(parameters.names) else [parameters]


def held_copies(start: Sequence[Sighting], order: Sequence[str]) -> list[Sighting]:
    """Return the sightings of a start state, with copies of the models' weights as such.

    Args:
        start: the sightings; those of the models have a module's row, others have -1 and the name of a
            variable as their label.
        order: see `references`.
    """
    candidates = [
        row
        for row, sighting in enumerate(start)
        if sighting.module < 0
        and sighting.category in (Category.PARAMETER, Category.BUFFER, Category.UNKNOWN)
        and not sighting.label.startswith(OF_AN_OPTIMIZER)
    ]
    sightings = list(start)
    weights = references(start, order)
    for row, copied, module in (
        *_by_name(start, candidates, weights),
        *_by_order(start, candidates, weights),
    ):
        if sightings[row] is start[row]:
            sightings[row] = replace(
                start[row],
                category=Category.PARAMETER_COPY,
                module=module,
                label=f"copy of {copied}{_variable(start[row].label)}",
            )
    return sightings


def _variable(label: str) -> str:
    return "" if label in ("", ALIVE_BEFORE) else f", {label}"


_Copied = tuple[int, str, int]
"""(row of the start state, FQN of the weight, row of its module)"""


def _by_name(
    start: Sequence[Sighting], candidates: Sequence[int], references_: Sequence[Weights]
) -> list[_Copied]:
    """Return the storages whose variables end in the names of weights, with the same sizes.

    The variables of one holder must name all parameters.
    """
    weights, parameters = references_[0], set(references_[-1].names)
    of_name = {name: row for row, name in enumerate(weights.names)}
    by_holder: defaultdict[str, list[_Copied]] = defaultdict(list)
    for row in candidates:
        label = start[row].label.replace("['", ".").replace("']", "")
        at = label.find(".")
        while at >= 0:
            number = of_name.get(label[at + 1 :])
            if number is not None and weights.bytes[number] == start[row].bytes:
                by_holder[label[:at]].append((row, weights.names[number], weights.modules[number]))
            at = label.find(".", at + 1)
    complete = [
        copies
        for copies in by_holder.values()
        if len(parameters) >= FEWEST and parameters <= {name for _, name, _ in copies}
    ]
    return [copy for copies in complete for copy in copies]


def _by_order(
    start: Sequence[Sighting], candidates: Sequence[int], references_: Sequence[Weights]
) -> list[_Copied]:
    copied: list[_Copied] = []
    sizes = np.array([start[row].bytes for row in candidates], np.int64)
    for weights in references_:
        for begin in weights.runs_in(sizes).tolist():
            rows = candidates[begin : begin + len(weights.names)]
            copied += zip(rows, weights.names, weights.modules, strict=True)
    return copied


@dataclass(frozen=True, slots=True)
class MadeCopies:
    """Allocations that are copies of weights: their indices, the weights' FQNs and their modules' rows."""

    block: list[int]
    names: list[str]
    modules: list[int]


def made_copies(
    born: Born, reason: UInt8, phases: Spans, operators: Sequence[str], weights: Sequence[Weights]
) -> MadeCopies:
    """Return the copies that the program made outside modules, by the order of their sizes.

    Args:
        reason: why each has its category so far; only blocks with `UNDECIDED` count.
        weights: see `references`.
    """
    copying = np.array([name.removeprefix("aten::") in COPYING for name in (*operators, "")], bool)
    chosen = copying[born.operator] & UNDECIDED[reason] & (born.phase == Phase.OTHER)
    rows = np.flatnonzero(chosen)
    rows = rows[~_before_a_step(phases, born.time_ns[rows])]
    copies = MadeCopies([], [], [])
    is_copied = np.zeros(len(rows), bool)
    for mine in weights:
        for begin in mine.runs_in(np.where(is_copied, -1, born.bytes[rows])).tolist():
            end = begin + len(mine.names)
            is_copied[begin:end] = True
            copies.block.extend(rows[begin:end].tolist())
            copies.names.extend(mine.names)
            copies.modules.extend(mine.modules)
    return copies


def _before_a_step(phases: Spans, time_ns: Int64) -> Bool:
    """Whether each time, which is in no phase, is between a backward and an optimizer's step."""
    phase = np.concatenate(([Phase.OTHER], phases.phase, [Phase.OTHER]))
    after = np.searchsorted(phases.start_ns, time_ns, side="right")
    mask: Bool = (phase[after] == Phase.BACKWARD) & (phase[after + 1] == Phase.OPTIMIZER)
    return mask
