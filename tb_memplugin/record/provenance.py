"""What the blocks of a recording are beyond their lifetime: inputs, caches and copies of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tb_memplugin.read.categories import Born
from tb_memplugin.read.phases import phase_at
from tb_memplugin.read.tables import Names, Owners
from tb_memplugin.record.weight_copies import Weights, made_copies
from tb_memplugin.trace import Category, Events, MemoryTrace, Phase, Reason, Spans, StartState
from tb_memplugin.trace.labels import ALIVE_BEFORE, INPUT_OF
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8, code_mask

if TYPE_CHECKING:
    from tb_memplugin.record.optimizer_hooks import OptimizerStep
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
        """Find the caches that grow, in modules or outside and entering them, and those of one size.

        In training, what grows outside modules and enters them is a batch.
        """
        forward = self.calls.phase == Phase.FORWARD
        times = outermost(self.calls.start_ns[forward], self.calls.end_ns[forward])
        caches = grown(self.born, self.module, self.reason, *times)
        trains = bool((self.phases.phase == Phase.BACKWARD).any())
        caches = caches.with_any(_INSIDE[self.reason] | (entered & (not trains)))
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


GROWS_FROM = code_mask(
    (
        Reason.IN_FORWARD,
        Reason.ALIVE_IN_FORWARD,
        Reason.KEPT,
        Reason.NO_RULE,
        Reason.ENTERED,
        Reason.PASSED_BACK,
    )
)
"""The reasons of blocks that may be part of a cache: nothing shows that they are something else."""


FEWEST_CALLS = 3
"""In how many calls one after another a module must have written to a cache of one size."""


@dataclass(frozen=True, slots=True)
class Chains:
    """Blocks of caches: their indices, and for each the chain that it is part of.

    `bytes_per_call` and `calls` have one entry per chain: how much it grows, and in how many calls.
    """

    block: Int64
    chain: Int64
    bytes_per_call: Int64
    calls: Int64

    def labels(self) -> list[str]:
        """Return the name of each chain: "grows by 16,384 bytes a call, in 12 calls"."""
        pairs = zip(self.bytes_per_call.tolist(), self.calls.tolist(), strict=True)
        return [f"grows by {size:,} bytes a call, in {calls:,} calls" for size, calls in pairs]

    def with_any(self, marked: Bool) -> Chains:
        """Return the chains with at least one marked block. `marked` has one value per allocation."""
        has = np.zeros(len(self.calls), bool)
        has[self.chain[marked[self.block]]] = True
        stays = has[self.chain]
        number = np.cumsum(has) - 1
        return Chains(self.block[stays], number[self.chain[stays]], self.bytes_per_call[has], self.calls[has])


def grown(born: Born, module: Int32, reason: UInt8, call_starts: Int64, call_ends: Int64) -> Chains:
    """Return the chains of blocks that grow from call to call, each at least three blocks long.

    Args:
        module: the owner of each, a row.
        reason: why each has its category so far; only blocks with `GROWS_FROM` count.
        call_starts, call_ends: the outermost module calls of all modules, epoch nanoseconds, in time order.
    """
    call = np.searchsorted(call_starts, born.time_ns, side="right")
    open_to = GROWS_FROM[reason]
    survives = open_to & (np.searchsorted(call_starts, born.freed_ns, side="right") > call)
    if np.count_nonzero(survives) < 2 or len(call_starts) < 3:
        return _none()
    key = (born.device.astype(np.int64) << 56) | (module.astype(np.int64) + 1 << 28) | (born.operator + 1)
    ends = np.append(0, call_ends)[call]
    outlives = open_to & ((born.freed_ns > ends) | (born.time_ns >= ends))
    rows = np.flatnonzero(outlives & np.isin(key, np.unique(key[survives])))
    group = _numbered(key[rows], call[rows])
    order = np.lexsort((call[rows], group))
    rows, group = rows[order], group[order]
    before, after = rows[:-1], rows[1:]
    growth = born.bytes[after] - born.bytes[before]
    freed_in = np.searchsorted(call_starts, born.freed_ns[before], side="right")
    linked = (
        (group[1:] == group[:-1])
        & (call[after] == call[before] + 1)
        & (growth > 0)
        & (born.freed_ns[before] >= born.time_ns[after])
        & (freed_in <= call[after])
    )
    return _runs(rows, linked, growth)


@dataclass(slots=True)
class _Call:
    """An outermost call: how often each block that entered it had been written to, before and after it."""

    before: dict[object, int] = field(default_factory=dict)
    after: dict[object, int] = field(default_factory=dict)

    def written(self) -> Iterator[object]:
        """Yield the blocks that the call wrote to."""
        return (block for block, version in self.after.items() if version > self.before.get(block, version))

    def is_unchanged(self, block: object, previous: _Call) -> bool:
        """Whether nothing wrote to a block since the end of the previous call, which had it, too."""
        old = previous.after.get(block, previous.before.get(block))
        return old is not None and old == self.before.get(block)


def written_in_calls(sightings: Sequence[Sighting], matched: Int64) -> Int64:
    """Return the blocks that calls of a module write to, and that stay as they are between these calls.

    At least `FEWEST_CALLS` outermost calls of the module, one after another, write to them, and each receives
    something else that is new. Without that, a batch that is used again and again would be one, if the
    module changes its input in place.

    Args:
        sightings: sightings in time order; only those of inputs count.
        matched: for each, the number of the block that it saw, negative for none.
    """
    by_module: defaultdict[str, list[tuple[Sighting, object]]] = defaultdict(list)
    for sighting, row in zip(sightings, matched.tolist(), strict=True):
        if sighting.category is Category.INPUT:
            block = row if row >= 0 else (sighting.device, sighting.address)
            by_module[sighting.label].append((sighting, block))
    blocks: set[int] = set()
    for inputs in by_module.values():
        length: dict[object, int] = {}
        previous = _Call()
        for call in _calls(inputs):
            goes_on = any(not call.is_unchanged(block, previous) for block in call.before)
            length = {
                block: length.get(block, 0) + 1 if goes_on and call.is_unchanged(block, previous) else 1
                for block in call.written()
            }
            blocks |= {
                block for block, calls in length.items() if calls >= FEWEST_CALLS and type(block) is int
            }
            previous = call
    return np.array(sorted(blocks), np.int64)


def _calls(sightings: Iterable[tuple[Sighting, object]]) -> Iterator[_Call]:
    """Yield the calls of one module: all that enters a call is seen at one time."""
    call, began_ns = _Call(), -1
    for sighting, block in sightings:
        if sighting.ends_call:
            call.after[block] = sighting.version
            continue
        if sighting.time_ns != began_ns:
            if call.before:
                yield call
            call, began_ns = _Call(), sighting.time_ns
        call.before[block] = sighting.version
    if call.before:
        yield call


def with_caches(trace: MemoryTrace) -> MemoryTrace:
    """Return a trace with the category of caches that grow within module calls."""
    blocks, calls = trace.allocations, trace.calls
    forward = calls.phase == Phase.FORWARD
    fresh = slice(len(trace.start), None)
    events = blocks.born[fresh]
    forever = np.iinfo(np.int64).max
    born = Born(
        time_ns=trace.events.time_ns[events],
        freed_ns=np.append(trace.events.time_ns, forever)[blocks.freed[fresh]],
        device=blocks.device[fresh],
        bytes=blocks.bytes[fresh],
        phase=blocks.phase[fresh],
        operator=blocks.operator[fresh],
        operator_end_ns=np.zeros(len(events), np.int64),
        recomputing=np.zeros(len(events), bool),
    )
    reason = blocks.reason[fresh]
    caches = grown(
        born, blocks.module[fresh], reason, *outermost(calls.start_ns[forward], calls.end_ns[forward])
    )
    caches = caches.with_any(reason == Reason.IN_FORWARD)
    if not len(caches.block):
        return trace
    rows = events[caches.block]
    category, why, label = (getattr(trace.events, name).copy() for name in ("category", "reason", "label"))
    category[rows], why[rows] = Category.CACHE, Reason.GROWN
    names = dict.fromkeys((*trace.labels, *caches.labels()))
    row_of = {name: row for row, name in enumerate(names)}
    label[rows] = np.array([row_of[name] for name in caches.labels()], np.int32)[caches.chain]
    changed = replace(trace.events, category=category, reason=why, label=label)
    return replace(trace, events=changed, labels=tuple(names))


def outermost(start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """Return the starts and ends of the calls that no other call encloses, in time order."""
    order = np.lexsort((-end_ns, start_ns))
    start, end = start_ns[order], end_ns[order]
    outer = np.ones(len(start), bool)
    outer[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    return start[outer], end[outer]


def _numbered(key: Int64, call: Int64) -> Int64:
    """Return the series of each block: the first of its key in each call, the second, and so on.

    Blocks are in the order of allocation.
    """
    order = np.lexsort((call, key))
    new = np.ones(len(order), bool)
    new[1:] = (key[order[1:]] != key[order[:-1]]) | (call[order[1:]] != call[order[:-1]])
    first = np.flatnonzero(new)
    index = np.empty(len(order), np.int64)
    index[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    series: Int64 = np.unique(key, return_inverse=True)[1] * (index.max() + 1) + index
    return series


def _runs(rows: Int64, linked: Bool, growth: Int64) -> Chains:
    """Return the runs of at least two equal steps between consecutive rows."""
    same = linked[1:] & linked[:-1] & (growth[1:] == growth[:-1])
    steady = np.zeros(len(linked), bool)
    steady[1:] |= same
    steady[:-1] |= same
    steps = np.flatnonzero(steady)
    if not len(steps):
        return _none()
    begins = np.ones(len(steps), bool)
    begins[1:] = (np.diff(steps) > 1) | (growth[steps[1:]] != growth[steps[:-1]])
    chain = np.cumsum(begins) - 1
    first = steps[begins]
    member = np.concatenate((first, steps + 1))
    return Chains(
        block=rows[member],
        chain=np.concatenate((np.arange(len(first)), chain)),
        bytes_per_call=growth[first],
        calls=np.bincount(chain),
    )


def _none() -> Chains:
    empty = np.empty(0, np.int64)
    return Chains(empty, empty, empty, empty)


def find_owners_in_steps(provenance: Provenance, steps: Iterable[OptimizerStep]) -> None:
    """Give what optimizer steps allocate outside modules to the modules of the parameters."""
    born = provenance.born
    loose = (born.phase == Phase.OPTIMIZER) & ~provenance.owners.is_module(provenance.module)
    for step in steps:
        begin, end = np.searchsorted(born.time_ns, (step.start_ns, step.end_ns))
        mine = begin + np.flatnonzero(loose[begin:end])
        calls = born.operator[mine], born.operator_end_ns[mine]
        owner = temporaries_in_order(born.bytes[mine], *calls, step.parameters)
        provenance.module[mine[owner >= 0]] = owner[owner >= 0]


SCALAR_BYTES = 8
"""Allocations up to this size are taken for scalars: hyperparameters that became tensors."""


def temporaries_in_order(
    size: Int64, operator: Int32, operator_end_ns: Int64, parameters: Sequence[tuple[int, int]]
) -> Int64:
    """Return the module's row of each allocation in one optimizer step: int64, -1 where it is not certain.

    An optimizer that goes from one parameter to the next calls the same operators for each: its step is one
    sequence of operators, repeated. A foreach optimizer makes the temporaries of all parameters within one
    operator. Either rule is applied only if sizes confirm it. If all parameters have the same owner, it owns
    all.

    Args:
        size: the bytes of each allocation, shape (n,), in time order.
        operator: the operator of each allocation, shape (n,).
        operator_end_ns: when that call of the operator ended, shape (n,).
        parameters: (module row, bytes) of the parameters that the step changes, in its order.
    """
    owner, wanted = np.array(parameters, np.int64).reshape(-1, 2).T
    if not len(wanted) or not len(size):
        return np.full(len(size), -1, np.int64)
    if np.all(owner == owner[0]):
        return np.full(len(size), owner[0], np.int64)
    repeated = _repeated(size, operator, operator_end_ns, wanted)
    if repeated is not None:
        owners: Int64 = owner[repeated]
        return owners
    large = wanted > SCALAR_BYTES
    return _by_operator(size, operator, owner[large], wanted[large])


def _repeated(size: Int64, operator: Int32, operator_end_ns: Int64, wanted: Int64) -> Int64 | None:
    """Return the parameter of each allocation if the calls of operators repeat for each parameter.

    They do if they are the same operators in the same order for each, one of which allocates as many bytes
    as the parameter has, and nothing else.
    """
    first = np.flatnonzero(
        np.append(True, (operator[1:] != operator[:-1]) | (operator_end_ns[1:] != operator_end_ns[:-1]))
    )
    length, rest = divmod(len(first), len(wanted))
    if rest:
        return None
    count = np.diff(np.append(first, len(size)))
    called, allocated = operator[first].reshape(-1, length), size[first].reshape(-1, length)
    alone = (count == 1).reshape(-1, length)
    if np.any(called != called[0]) or not np.any(np.all(alone & (allocated == wanted[:, None]), axis=0)):
        return None
    return np.repeat(np.repeat(np.arange(len(wanted)), length), count)


def _by_operator(size: Int64, operator: Int32, owner: Int64, wanted: Int64) -> Int64:
    """Return the owner of each allocation of the operators whose sizes are the parameters', in order."""
    module = np.full(len(size), -1, np.int64)
    if not len(wanted):
        return module
    for name in np.unique(operator):
        mine = np.flatnonzero((operator == name) & (size > SCALAR_BYTES))
        times, rest = divmod(len(mine), len(wanted))
        if rest or not times:
            continue
        for order in (np.tile(np.arange(len(wanted)), times), np.repeat(np.arange(len(wanted)), times)):
            if np.array_equal(size[mine], wanted[order]):
                module[mine] = owner[order]
                break
    return module
