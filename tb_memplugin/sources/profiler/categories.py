"""Give the events of a profile their categories: by identity, by lifetime, as caches and as copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.sources.caches import grown, outermost
from tb_memplugin.sources.categories import Born, by_lifetime, workspaces
from tb_memplugin.sources.phases import phase_at
from tb_memplugin.sources.profiler.attribution import Attribution
from tb_memplugin.sources.profiler.optimizer_order import temporaries_in_order
from tb_memplugin.sources.profiler.window import Window
from tb_memplugin.sources.storages import Sighting
from tb_memplugin.sources.tables import Names
from tb_memplugin.sources.weight_copies import made_copies, references
from tb_memplugin.trace import Allocations, Category, Events, Phase, Reason
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8

_LESS_THAN_AN_INPUT = (
    Reason.NO_RULE,
    Reason.FREED_BEFORE_PHASE,
    Reason.ALIVE_IN_FORWARD,
    Reason.KEPT,
    Reason.ENTERED,
)
"""The reasons that say less than that a module received the block."""

WITHOUT_FRACTIONS = ("int", "uint", "bool")
"""Beginnings of the dtypes of ids and masks, which grow from call to call like caches, but are inputs."""

INPUT_OF = "input of "
"""The beginning of the label of what enters a module; the module's name follows."""


def categorised(
    bare: Events,
    blocks: Allocations,
    matched: Int64,
    found: Attribution,
    window: Window,
    devices: tuple[str, ...],
    labels: Names,
) -> Events:
    """Fill in categories, their reasons and labels, and owners of optimizer memory.

    `matched` is, for each sighting of the window, the number of the alloc that it saw, negative for none.
    """
    fresh = slice(int(np.count_nonzero(blocks.born < 0)), None)
    forever = np.iinfo(np.int64).max
    rows = blocks.born[fresh]
    born = Born(
        time_ns=bare.time_ns[rows],
        freed_ns=np.append(bare.time_ns, forever)[blocks.freed[fresh]],
        device=blocks.device[fresh],
        bytes=blocks.bytes[fresh],
        phase=bare.phase[rows],
        operator=bare.operator[rows],
        operator_end_ns=found.operator_end_ns,
        recomputing=found.recomputing,
    )
    names = found.operators.as_tuple()
    category, reason = by_lifetime(born, found.phases, names, knows_optimizer=window.knows_optimizers)
    category[found.communicating], reason[found.communicating] = Category.COMMUNICATION, Reason.SHARDING
    by_size = workspaces(born, devices, names, window.stop_ns)
    category[by_size], reason[by_size] = Category.WORKSPACE, Reason.SIZE
    columns = _Columns(
        born, found, category, reason, np.full(len(rows), -1, np.int32), bare.module[rows].copy()
    )
    entered = columns.see(window.sightings, matched, labels)
    columns.find_caches(entered, labels)
    columns.find_copies(window, labels)
    columns.find_owners_in_steps(window)
    full = {name: getattr(bare, name) for name in Events.__slots__}
    for name in ("category", "reason", "label", "module"):
        full[name] = full[name].copy()
        full[name][rows] = getattr(columns, name)
    return Events(**full)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a window's allocations that are filled in, in place."""

    born: Born
    found: Attribution
    category: UInt8
    reason: UInt8
    label: Int32
    module: Int32

    def see(self, sightings: list[Sighting], matched: Int64, labels: Names) -> Bool:
        """Use the sightings. Return a mask of the blocks with fractions that entered an outermost module."""
        loose = ~self.found.owners.is_module(self.module)
        returned = (self.reason == Reason.IN_FORWARD) & (
            phase_at(self.found.phases, self.born.freed_ns) != Phase.BACKWARD
        )
        names, call = self._outermost_modules()
        entered = np.zeros(len(self.reason), bool)
        for row, seen in zip(matched.tolist(), sightings, strict=True):
            if row < 0:
                continue
            if seen.category is not Category.INPUT:
                self._set(row, seen.category, Reason.HELD, labels.add(seen.label))
                if loose[row] and seen.module >= 0:
                    self.module[row] = seen.module
                continue
            entered[row] |= not seen.dtype.startswith(WITHOUT_FRACTIONS)
            if self.reason[row] in _LESS_THAN_AN_INPUT:
                self._set(row, Category.INPUT, Reason.ENTERED, labels.add(seen.label))
            elif returned[row] and seen.label == names[call[row]]:
                self._set(row, Category.CACHE, Reason.PASSED_BACK, labels.add(seen.label))
        return entered

    def _outermost_modules(self) -> tuple[list[str], Int64]:
        """Return the label that the inputs of each outermost call have, and each block's call, -1 for none.

        The last label is "", for no call.
        """
        calls = self.found.calls
        forward = np.flatnonzero(calls.phase == Phase.FORWARD)
        start, end = outermost(calls.start_ns[forward], calls.end_ns[forward])
        row_of = dict(zip(calls.start_ns[forward][::-1].tolist(), forward[::-1].tolist(), strict=True))
        modules = self.found.owners.as_tuple()
        names = [INPUT_OF + modules[int(calls.name[row_of[one]])].name for one in start.tolist()]
        call = np.searchsorted(start, self.born.time_ns, side="right") - 1
        inside = (call >= 0) & (self.born.time_ns < np.append(end, 0)[call])
        return [*names, ""], np.where(inside, call, -1)

    def find_caches(self, entered: Bool, labels: Names) -> None:
        """Find the caches that grow in module calls, and those outside that enter modules."""
        calls = self.found.calls
        forward = calls.phase == Phase.FORWARD
        times = outermost(calls.start_ns[forward], calls.end_ns[forward])
        caches = grown(self.born, self.module, self.reason, *times)
        inside = np.isin(self.reason, (Reason.IN_FORWARD, Reason.PASSED_BACK))
        caches = caches.with_any(inside | entered)
        names = labels.add_all(caches.labels())[caches.chain]
        self._set(caches.block, Category.CACHE, Reason.GROWN, names)

    def find_copies(self, window: Window, labels: Names) -> None:
        """Find copies of the models' weights."""
        order = [fqn for _, fqn in window.names.owner_of.values()]
        weights = references([*window.start, *window.sightings], order)
        operators = self.found.operators.as_tuple()
        copies = made_copies(self.born, self.reason, self.found.phases, operators, weights)
        names = labels.add_all(f"copy of {name}" for name in copies.names)
        self._set(np.array(copies.block, np.int64), Category.PARAMETER_COPY, Reason.COPY, names)
        self.module[copies.block] = copies.modules

    def find_owners_in_steps(self, window: Window) -> None:
        """Give what optimizer steps allocate outside modules to the modules of the parameters."""
        loose = (self.born.phase == Phase.OPTIMIZER) & ~self.found.owners.is_module(self.module)
        for step in window.optimizer_steps:
            begin, end = np.searchsorted(self.born.time_ns, (step.start_ns, step.end_ns))
            mine = begin + np.flatnonzero(loose[begin:end])
            calls = self.born.operator[mine], self.born.operator_end_ns[mine]
            owner = temporaries_in_order(self.born.bytes[mine], *calls, step.parameters)
            self.module[mine[owner >= 0]] = owner[owner >= 0]

    def _set(self, rows: int | Int64, category: Category, reason: Reason, label: int | Int64) -> None:
        self.category[rows], self.reason[rows], self.label[rows] = category, reason, label
