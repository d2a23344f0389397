"""Give the events of a profile their categories: by identity, by lifetime, as caches and as copies."""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.categories import Born, by_lifetime, workspaces
from tb_memplugin.read.tables import Names
from tb_memplugin.record.profiler.attribution import Attribution
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.record.provenance import Provenance, find_owners_in_steps
from tb_memplugin.record.weight_copies import fqns, references
from tb_memplugin.trace import Allocations, Category, Events, Reason
from tb_memplugin.trace.tables import Int64


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
