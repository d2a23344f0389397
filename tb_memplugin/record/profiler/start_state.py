"""The blocks alive when a window began: known by storage pointer, or from the allocator's list of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from tb_memplugin.read.categories import of_known
from tb_memplugin.read.cublas import LT_WORKSPACE, MOST_WORKSPACES, LtWorkspace, lt_needs_cublas, lt_workspace
from tb_memplugin.read.shared_memory import SHARED
from tb_memplugin.read.tables import Names, Owners
from tb_memplugin.record.profiler.memory_events import MemoryEvents
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.record.storages import Sighting
from tb_memplugin.trace import Category, Note, Reason, StartState
from tb_memplugin.trace import start_state as as_start_state
from tb_memplugin.trace.allocator import SMALL_REQUEST, SMALLEST_BLOCK
from tb_memplugin.trace.labels import BUCKET
from tb_memplugin.trace.replay import match_frees
from tb_memplugin.trace.tables import Bool

BY_SIZE = "cuBLAS workspace, by its size"
"""The label of a block of the workspace size that no known storage uses and that is not freed."""

BUCKET_BY_SIZE = f"{BUCKET}, by its size"
"""The label of a block of the size of one of DistributedDataParallel's buckets that no known storage uses."""


@dataclass(slots=True)
class _Row:
    device: int
    address: int
    bytes: int
    category: Category = Category.UNKNOWN
    module: int = -1
    label: int = -1


def start_state(
    window: Window, memory: MemoryEvents, devices: Sequence[str], owners: Owners, labels: Names
) -> tuple[StartState, list[Note]]:
    """Return the start state of every device, and notes on what in it is not exact.

    On the CPU, it consists of the storages of parameters, buffers, gradients and optimizer state: the CPU's
    counter counts only while a profiler is on, so nothing else can be known, unless the calls of its
    allocator are counted. For shared memory, blocks that
    are freed in the window are added. On other devices, the rows sum to the allocator's counter (a note
    says where they exceed it): they are the allocator's blocks where it lists them, else the storages and
    the blocks that are freed in the window; one row contains the rest.
    """
    rows: list[_Row] = []
    notes: list[Note] = []
    for device, name in enumerate(devices):
        sightings = [sighting for sighting in window.start if sighting.device == name]
        if name == "cpu" and window.counted is not None:
            mine = _by_calls(device, sightings, window, memory, owners, labels)
        elif name in ("cpu", SHARED):
            mine = [_named(device, sighting, owners, labels) for sighting in sightings]
            if name == "cpu" and not window.blocks:  # those of GPUs are blocks that their allocator lists
                mine += [
                    _Row(device, 0, size, Category.COMMUNICATION, module, labels.add(BUCKET))
                    for module, size in window.buckets
                ]
            if name == SHARED:
                mine += _proven(device, memory, sightings, owners)
        else:
            mine = _counted(device, name, sightings, window, memory, owners, labels, notes)
        rows += mine
    searched = [(devices[row.device], row.address) in window.searched for row in rows]
    return _columns(rows, np.array(searched, bool)), notes


def _named(device: int, sighting: Sighting, owners: Owners, labels: Names, size: int | None = None) -> _Row:
    module = sighting.module if sighting.module >= 0 else owners.not_named
    return _Row(
        device,
        sighting.address,
        size or sighting.bytes,
        sighting.category,
        module,
        labels.add(sighting.label),
    )


def _counted(
    device: int,
    name: str,
    sightings: Sequence[Sighting],
    window: Window,
    memory: MemoryEvents,
    owners: Owners,
    labels: Names,
    notes: list[Note],
) -> list[_Row]:
    """Return the start state of a device whose allocator has a counter, so that it sums to the counter."""
    here = np.flatnonzero(memory.device == device) if name in memory.devices else np.empty(0, np.intp)
    blocks = [(address, size) for where, address, size in window.blocks if where == name]
    owner = {sighting.address: sighting for sighting in sightings}
    freed = dict(_freed_later(memory, here, set()))
    if not blocks:  # a free tells the size of its block, rounded; a storage its own
        sizes = {address: sighting.bytes for address, sighting in owner.items()}
        blocks = list((sizes | freed).items())
    base = (
        int(memory.total[here[0]] - memory.bytes[here[0]]) if len(here) else sum(size for _, size in blocks)
    )
    rows = [
        _named(device, owner[address], owners, labels, size)
        if address in owner
        else _Row(device, address, size, module=owners.not_named)
        for address, size in blocks
    ]
    if name.startswith("cuda"):
        _name_workspaces(
            [row for row in rows if row.address not in owner and row.address not in freed], labels
        )
    _name_buckets([row for row in rows if row.address not in owner], window.buckets, labels)
    rest = base - sum(row.bytes for row in rows)
    if rest > 0:
        rows.append(_Row(device, 0, rest, module=owners.not_named))
    elif rest < 0:
        notes.append(
            Note(
                f"{name}: the blocks alive at the window's start sum to {-rest:,} bytes more than the "
                "allocator's counter at the first event: memory was freed in between.",
                "more_than_counter",
                -rest,
                device=name,
            )
        )
    return rows


def _by_calls(
    device: int,
    sightings: Sequence[Sighting],
    window: Window,
    memory: MemoryEvents,
    owners: Owners,
    labels: Names,
) -> list[_Row]:
    """Return the start state of the CPU from its counted blocks.

    Added are storages that its allocator did not allocate (a file's, numpy's), and blocks that are freed in
    the window, but were allocated before counting began and are known to nobody.
    """
    sizes = {address: size for name, address, size in window.blocks if name == "cpu"}
    # Those without bytes were freed before counting began.
    sightings = [sighting for sighting in sightings if sighting.bytes]
    owner = {sighting.address: sighting for sighting in sightings}
    foreign = [
        _named(device, sighting, owners, labels) for sighting in sightings if sighting.address not in sizes
    ]
    sizes.update(_freed_later(memory, np.flatnonzero(memory.device == device), sizes.keys() | owner.keys()))
    rows = [
        _named(device, owner[address], owners, labels, size)
        if address in owner
        else _Row(device, address, size, module=owners.not_named)
        for address, size in sizes.items()
    ]
    _name_buckets([row for row in rows if row.address not in owner], window.buckets, labels)
    return foreign + rows


def _name_workspaces(rows: Sequence[_Row], labels: Names) -> None:
    """Mark blocks of the workspace size as workspaces, in place, unless there are too many of them.

    Where cuBLASLt keeps its own, there are at most as many of these as of cuBLAS, or twice as many where a
    thread can have one of cuBLASLt alone.
    """
    of_cublas = sum(_name_by_size(rows, size, most, labels) for size, most in MOST_WORKSPACES.items())
    if lt_workspace() is LtWorkspace.KEPT:
        _name_by_size(rows, LT_WORKSPACE, of_cublas if lt_needs_cublas() else 2 * of_cublas, labels)


def _name_by_size(rows: Sequence[_Row], size: int, most: int, labels: Names) -> int:
    """Mark the blocks of a size if there are at most `most`; return how many were marked."""
    matching = [row for row in rows if row.bytes == size]
    if len(matching) > most:
        return 0
    for row in matching:
        row.category, row.label = Category.WORKSPACE, labels.add(BY_SIZE)
    return len(matching)


def _name_buckets(rows: Sequence[_Row], buckets: Sequence[tuple[int, int]], labels: Names) -> None:
    """Mark blocks of the sizes of buckets as communication, in place, unless there are too many of a size."""
    for size, most in Counter(size for _, size in buckets).items():
        rounded = size + -size % SMALLEST_BLOCK
        spare = SMALL_REQUEST if size > SMALL_REQUEST else 0
        matching = [
            row
            for row in rows
            if row.category is Category.UNKNOWN and rounded <= row.bytes <= rounded + spare
        ]
        if len(matching) <= most:
            module = next(module for module, bytes_ in buckets if bytes_ == size)
            for row in matching:
                row.category, row.label = Category.COMMUNICATION, labels.add(BUCKET_BY_SIZE)
                row.module = module if module >= 0 else row.module


def _proven(device: int, memory: MemoryEvents, sightings: Sequence[Sighting], owners: Owners) -> list[_Row]:
    """Return blocks of shared memory that are freed in the window, whose sizes are reported exactly.

    No model or optimizer holds them: they are batches that a DataLoader's worker processes made.
    """
    if SHARED not in memory.devices:
        return []
    here = np.flatnonzero(memory.device == device)
    freed = _freed_later(memory, here, {sighting.address for sighting in sightings})
    return [_Row(device, address, size, Category.INPUT, owners.not_named) for address, size in freed]


def _freed_later(memory: MemoryEvents, here: np.ndarray, excluded: Set[int]) -> list[tuple[int, int]]:
    """Return blocks that are freed but not allocated in the window: they were alive at its start."""
    address, size = memory.address[here], memory.bytes[here]
    unmatched = match_frees(address, memory.device[here], size > 0)[2]
    freed = zip(address[unmatched].tolist(), (-size[unmatched]).tolist(), strict=True)
    return [(where, count) for where, count in freed if where not in excluded]


def _columns(rows: Sequence[_Row], searched: Bool) -> StartState:
    category = np.array([row.category for row in rows], np.uint8)
    named = np.array([row.label >= 0 for row in rows], bool)
    reason = np.where(named | (category == Category.UNKNOWN), of_known(category), Reason.SHARED_BATCH)
    by_size = named & ((category == Category.WORKSPACE) | (category == Category.COMMUNICATION))
    reason[searched & (category != Category.PARAMETER_COPY)] = Reason.REACHABLE
    return as_start_state(
        [row.bytes for row in rows],
        device=[row.device for row in rows],
        address=[row.address for row in rows],
        category=category,
        reason=np.where(by_size, Reason.SIZE, reason),
        module=[row.module for row in rows],
        label=[row.label for row in rows],
    )
