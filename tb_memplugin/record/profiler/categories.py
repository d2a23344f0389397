"""Give the events of a profile their categories: by identity, by lifetime, as caches and as copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tb_memplugin.read.categories import Born, by_lifetime, workspaces
from tb_memplugin.read.tables import Names
from tb_memplugin.record.optimizer_hooks import OptimizerStep
from tb_memplugin.record.profiler.attribution import Attribution
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.record.provenance import Provenance
from tb_memplugin.record.weight_copies import fqns, references
from tb_memplugin.trace import Allocations, Category, Events, Phase, Reason
from tb_memplugin.trace.tables import Int32, Int64


def categorised(
    bare: Events,
    blocks: Allocations,
    matched: Int64,
    attribution: Attribution,
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
        operator_end_ns=attribution.operator_end_ns,
        recomputing=attribution.recomputing,
    )
    names = attribution.operators.as_tuple()
    category, reason = by_lifetime(born, attribution.phases, names, knows_optimizer=window.knows_optimizers)
    category[attribution.communicating], reason[attribution.communicating] = (
        Category.COMMUNICATION,
        Reason.SHARDING,
    )
    by_size = workspaces(born, devices, names, window.stop_ns)
    category[by_size], reason[by_size] = Category.WORKSPACE, Reason.SIZE
    provenance = Provenance(
        born=born,
        phases=attribution.phases,
        calls=attribution.calls,
        owners=attribution.owners,
        operators=names,
        labels=labels,
        category=category,
        reason=reason,
        label=np.full(len(rows), -1, np.int32),
        module=bare.module[rows].copy(),
    )
    weights = references([*window.start, *window.sightings], fqns(window.names))
    provenance.find(window.sightings, matched, weights)
    find_owners_in_steps(provenance, window.optimizer_steps)
    return provenance.filled_in(bare, rows)


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
