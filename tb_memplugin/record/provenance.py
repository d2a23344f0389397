"""What the blocks of a recording are beyond their lifetime: inputs, caches and copies of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tb_memplugin.read.categories import Born
from tb_memplugin.read.phases import phase_at
from tb_memplugin.read.tables import Names, Owners
from tb_memplugin.record.caches import grown, outermost, written_in_calls
from tb_memplugin.record.weight_copies import Weights, made_copies
from tb_memplugin.trace import Category, Events, Phase, Reason, Spans, StartState
from tb_memplugin.trace.labels import ALIVE_BEFORE, INPUT_OF
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8, code_mask

if TYPE_CHECKING:
    from tb_memplugin.record.storages import Sighting

WITHOUT_FRACTIONS = ("int", "uint", "bool")
"""Beginnings of the dtypes of ids and masks, which grow from call to call like caches, but are inputs."""

_LESS_THAN_AN_INPUT = code_mask(
    (Reason.NO_RULE, Reason.FREED_BEFORE_PHASE, Reason.ALIVE_IN_FORWARD, Reason.KEPT, Reason.ENTERED)
)
"""The reasons that say less than that a module received the block."""

_INSIDE = code_mask((Reason.IN_FORWARD, Reason.PASSED_BACK))
_BY_SIZE = code_mask((Category.UNKNOWN, Category.WORKSPACE, Category.COMMUNICATION))


@dataclass(frozen=True, slots=True)
class Provenance:
    """What is known of a recording's allocations, in the order of allocation; the last columns are filled in.

    Attributes:
        born: the allocations.
        phases: the time ranges of the phases.
        calls: the module calls; their names are rows of `owners`.
        owners, operators, labels: the tables that the columns point into.
        category, reason, label, module: one value per allocation.
    """

    born: Born
    phases: Spans
    calls: Spans
    owners: Owners
    operators: tuple[str, ...]
    labels: Names
    category: UInt8
    reason: UInt8
    label: Int32
    module: Int32

    def find(self, sightings: Sequence[Sighting], matched: Int64, weights: Sequence[Weights]) -> None:
        """Fill in what sightings, growth from call to call and the sizes of weights tell.

        Args:
            matched: for each, the allocation that it saw; negative for none.
            weights: the weights of the models, in the orders in which programs copy them.
        """
        entered = self._see(sightings, matched)
        self._find_caches(sightings, matched, entered)
        self._find_copies(weights)

    def _see(self, sightings: Sequence[Sighting], matched: Int64) -> Bool:
        """Use sightings. Return a mask of the blocks with fractions that entered an outermost module."""
        returned = (self.reason == Reason.IN_FORWARD) & (
            phase_at(self.phases, self.born.freed_ns) != Phase.BACKWARD
        )
        names, call = self._outermost_modules()
        entered = np.zeros(len(self.reason), bool)
        for row, sighting in zip(matched.tolist(), sightings, strict=True):
            if row < 0:
                continue
            if sighting.category is not Category.INPUT:
                self._set(row, sighting.category, Reason.HELD, self.labels.add(sighting.label))
                if sighting.module >= 0:  # a gradient is its parameter's, wherever it was computed
                    self.module[row] = sighting.module
                continue
            entered[row] |= not sighting.dtype.startswith(WITHOUT_FRACTIONS)
            if _LESS_THAN_AN_INPUT[self.reason[row]]:
                self._set(row, Category.INPUT, Reason.ENTERED, self.labels.add(sighting.label))
            elif returned[row] and not sighting.ends_call and sighting.label == names[call[row]]:
                self._set(row, Category.CACHE, Reason.PASSED_BACK, self.labels.add(sighting.label))
        return entered

    def _outermost_modules(self) -> tuple[list[str], Int64]:
        """Return the label that the inputs of each outermost call have, and each block's call, -1 for none.

        The last label is "", for no call.
        """
        forward = np.flatnonzero(self.calls.phase == Phase.FORWARD)
        start, end = outermost(self.calls.start_ns[forward], self.calls.end_ns[forward])
        row_of = dict(zip(self.calls.start_ns[forward][::-1].tolist(), forward[::-1].tolist(), strict=True))
        modules = self.owners.as_tuple()
        names = [INPUT_OF + modules[int(self.calls.name[row_of[begin]])].name for begin in start.tolist()]
        call = np.searchsorted(start, self.born.time_ns, side="right") - 1
        inside = (call >= 0) & (self.born.time_ns < np.append(end, 0)[call])
        return [*names, ""], np.where(inside, call, -1)

    def _find_caches(self, sightings: Sequence[Sighting], matched: Int64, entered: Bool) -> None:
        """Find the caches that grow, in modules or outside and entering them, and those of one size."""
        forward = self.calls.phase == Phase.FORWARD
        times = outermost(self.calls.start_ns[forward], self.calls.end_ns[forward])
        caches = grown(self.born, self.module, self.reason, *times)
        caches = caches.with_any(_INSIDE[self.reason] | entered)
        names = self.labels.add_all(caches.labels())[caches.chain]
        self._set(caches.block, Category.CACHE, Reason.GROWN, names)
        written = written_in_calls(sightings, matched)
        reason = self.reason[written]
        written = written[_LESS_THAN_AN_INPUT[reason] | (reason == Reason.IN_FORWARD)]
        self._set(written, Category.CACHE, Reason.WRITTEN_IN_CALLS, self.label[written])

    def _find_copies(self, weights: Sequence[Weights]) -> None:
        copies = made_copies(self.born, self.reason, self.phases, self.operators, weights)
        names = self.labels.add_all(f"copy of {name}" for name in copies.names)
        self._set(np.array(copies.block, np.int64), Category.PARAMETER_COPY, Reason.COPY, names)
        self.module[copies.block] = copies.modules

    def filled_in(self, bare: Events, rows: Int64) -> Events:
        """Return events with the columns of the allocations, which are these rows."""
        full = {name: getattr(bare, name) for name in Events.__slots__}
        for name in ("category", "reason", "label", "module"):
            full[name] = full[name].copy()
            full[name][rows] = getattr(self, name)
        return Events(**full)

    def _set(self, rows: int | Int64, category: Category, reason: Reason, label: int | Int32 | Int64) -> None:
        self.category[rows], self.reason[rows], self.label[rows] = category, reason, label


def with_later_names(
    start: StartState, matched: Int64, sightings: Sequence[Sighting], owners: Owners, labels: Names
) -> StartState:
    """Return the start state with what was seen of its blocks only later in the window.

    That is what enters modules, and what an optimizer holds that was not given: it is met at its first step.

    Args:
        matched: for each sighting, the block that it saw: a row of the start state, or any other number.
    """
    before = np.append(start.category, Category.PARAMETER)[np.minimum(matched, len(start))]
    is_state = np.array([sighting.category is Category.OPTIMIZER_STATE for sighting in sightings], bool)
    looks_copied = (
        before == Category.PARAMETER_COPY
    )  # as SGD's momentum does: it has the sizes of the weights
    indices = np.flatnonzero((matched >= 0) & (_BY_SIZE[before] | looks_copied & is_state))
    written = written_in_calls(sightings, matched)
    written = written[written < len(start)]
    if not len(indices) and not len(written):
        return start
    category, module, label = start.category.copy(), start.module.copy(), start.label.copy()
    reason = start.reason.copy()
    for row, sighting in ((int(matched[index]), sightings[index]) for index in indices.tolist()):
        category[row] = sighting.category
        if sighting.category is not Category.INPUT or label[row] in (-1, labels.add(ALIVE_BEFORE)):
            label[row] = labels.add(sighting.label)
        module[row] = sighting.module if sighting.module >= 0 else owners.not_named
        reason[row] = Reason.ENTERED if sighting.category is Category.INPUT else Reason.HELD
    written = written[category[written] == Category.INPUT]
    category[written], reason[written] = Category.CACHE, Reason.WRITTEN_IN_CALLS
    return replace(start, category=category, module=module, label=label, reason=reason)
