"""Track live storages: each is allocated when an operator returns it, and freed when torch releases it.

A storage's Python object lives exactly as long as the storage, even while only C++ holds it (tensors that
autograd saved), so a weak reference to it fires at the real free. Memory that a kernel allocates and frees
within one operator never becomes a tensor: these are buffers, known from the allocator's reports.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from operator import itemgetter
from time import time_ns
from typing import Any, Protocol

import torch

from tb_memplugin.record.storages import Freed, StorageReference
from tb_memplugin.record.tensor_metadata import Dense
from tb_memplugin.record.torch_private.tensors import storage_address, storage_key
from tb_memplugin.trace import Category, Phase
from tb_memplugin.trace.kinds import ColumnEnum


class EntryKind(ColumnEnum):
    """The kind of a ledger entry."""

    ALLOC = 0
    FREE = 1
    ENTER = 2
    """A layer (module call) begins."""
    EXIT = 3
    SNAPSHOT = 4
    """Only the levels at this moment: the trace begins or ends."""


_ALLOC, _FREE = EntryKind.ALLOC, EntryKind.FREE
_UNKNOWN, _TEMPORARY = Category.UNKNOWN, Category.TEMPORARY


class Watched(Protocol):
    """An object whose `peak_bytes` the ledger raises to the highest live bytes from now on."""

    peak_bytes: int


class _Memory:
    """The attributes of one piece of memory.

    `serial` counts allocations from 0 and is negative for memory that was alive before; `made_by` is the
    operator; `stack` is the row of the Python stack that allocated it, -1 if stacks are not recorded;
    `tensor` is what the operator returned in it, None if that is not known.
    """

    __slots__ = ()
    address: int
    bytes: int
    category: Category
    device: int
    key: int
    label: str
    made_by: Any
    module: int
    phase: Phase
    recomputing: bool
    serial: int
    stack: int
    tensor: Dense | None


class Block(StorageReference, _Memory):
    """One lifetime of a storage at one size: a weak reference to the storage that fires when it is freed."""

    __slots__ = (
        "address",
        "bytes",
        "category",
        "device",
        "key",
        "label",
        "made_by",
        "module",
        "phase",
        "recomputing",
        "serial",
        "stack",
        "tensor",
    )


class Holder(StorageReference):
    """The storage that holds the memory of a buffer."""

    __slots__ = ("buffer",)
    buffer: Buffer


class Buffer(_Memory):
    """Memory that no operator returned in a tensor. It has the attributes of a `Block`, but no storage.

    If a tensor that holds the memory is found later, `holder` is a weak reference to its storage, which
    fires at the free. `address` is a made-up number from 1, unique among live buffers: the allocator's
    reports contain no addresses, and no storage has an address that low.
    """

    __slots__ = (*Block.__slots__, "holder")
    holder: Holder | None


Entry = tuple[int, EntryKind, Block | Buffer | None, int, Phase, int, int]
"""(epoch ns, kind, block, module's row or -1, phase, live bytes after it, start of a layer that ends)."""

BEFORE = -1
"""The serial number of blocks that were alive when the ledger was created."""


class Ledger:
    """Live bytes, their peak and the latest entries, for the storages of one device type.

    `level` is the live bytes on all devices of the type, `peak` its highest value, `levels` the live bytes
    by device. `late` lists the bytes of storages that were found some time after they were allocated.

    Weak references may fire at any moment on any thread, inside any line of Python: they only note the time
    in `freed`, which `settle` or `take_freed` processes. The methods do not take `lock`: callers hold it
    wherever several threads use the ledger.

    Args:
        max_entries: how many entries to keep. Older ones are dropped; levels, peaks and counts stay correct.
    """

    def __init__(self, max_entries: int, device_type: str) -> None:
        self.device_type = device_type
        self.entries: deque[Entry] = deque(maxlen=max_entries)
        self.written = 0
        self.next_serial = 0
        self.devices: list[str] = []
        self.levels: list[int] = []
        self.level = 0
        self.peak = 0
        self.blocks: dict[int, Block | Buffer] = {}
        self.freed: Freed[Block | Holder] = defaultdict(time_ns)
        self.lock = threading.RLock()
        self.watched: list[Watched] = []
        self.late: list[int] = []
        self._expected: dict[int, list[Buffer]] = {}
        self._last_ns = 0
        self._device_rows: dict[str, int] = {}
        self._addresses: list[int] = []
        self._unheld = 0
        self._on_free: Any = self.freed.__getitem__

    @property
    def dropped(self) -> int:
        """How many entries were dropped to make room for newer ones."""
        return self.written - len(self.entries)

    def begin(self) -> int:
        """Begin with the blocks that are alive now, without those freed since they were looked at.

        Return the time in epoch nanoseconds.
        """
        self.settle(-1, Phase.OTHER)
        self.entries.clear()
        self.written, self.peak = 0, self.level
        return self.write(EntryKind.SNAPSHOT, None, -1, Phase.OTHER)

    def write(
        self,
        kind: EntryKind,
        block: Block | Buffer | None,
        row: int,
        phase: Phase,
        *,
        began: int = 0,
        now: int = 0,
    ) -> int:
        """Add an entry whose time is not before the last one's. Return its time in epoch nanoseconds."""
        now = now or time_ns()
        if now < self._last_ns:
            now = self._last_ns
        self._last_ns = now
        self.entries.append((now, kind, block, row, phase, self.level, began))
        self.written += 1
        return now

    def take_freed(self) -> list[tuple[int, Block | Buffer]]:
        """Return the blocks freed since the last call, with the times. Callers must pass each to `free`."""
        freed: list[tuple[int, Block | Buffer]] = []
        while self.freed:
            try:
                reference, freed_ns = self.freed.popitem()
            except KeyError:
                break
            block = reference.buffer if isinstance(reference, Holder) else reference
            if self.blocks.get(block.key) is block:
                del self.blocks[block.key]
                freed.append((freed_ns, block))
        freed.reverse()
        freed.sort(key=itemgetter(0))
        return freed

    def settle(self, row: int, phase: Phase) -> int:
        """Record the frees since the last call, in a module and phase. Return how many there were."""
        freed = self.take_freed()
        for freed_ns, block in freed:
            self.free(block, row, phase, freed_ns)
        return len(freed)

    def allocate(
        self,
        storage: torch.UntypedStorage,
        size: int,
        made_by: Any,
        row: int,
        phase: Phase,
        *,
        recomputing: bool = False,
        now: int = 0,
    ) -> Block:
        """Record the allocation of a storage that was not known before."""
        block = self._block(storage, size, row)
        self._begin(block, made_by, row, phase, recomputing, now)
        self.blocks[block.key] = block  # last, so that a failure before leaves no half of one
        return block

    def allocate_buffer(
        self, size: int, made_by: Any, row: int, phase: Phase, *, recomputing: bool = False, now: int = 0
    ) -> Buffer:
        """Record the allocation of memory that no known tensor holds."""
        buffer = self._buffer(size, row, self._device_named(self.device_type))
        self._begin(buffer, made_by, row, phase, recomputing, now)
        return buffer

    def pass_through(
        self, reports: Iterable[tuple[int, int]], made_by: Any, row: int, phase: Phase, *, recomputing: bool
    ) -> int:
        """Record buffers that are freed in reverse order of allocation. Return the highest level.

        This does the same as `allocate_buffer` and `free` for each buffer, in one call: most operators of an
        optimizer use buffers in this way.

        Args:
            reports: (epoch nanoseconds, bytes) per alloc or free; bytes are negative for a free.
        """
        device = self._device_named(self.device_type)
        level = top = self.level
        buffers: list[Buffer] = []
        for now, size in reports:
            self._last_ns = now = max(now, self._last_ns)
            level += size
            if size > 0:
                top = max(top, level)
                buffer = self._buffer(size, row, device)
                buffer.category, buffer.made_by, buffer.phase = _TEMPORARY, made_by, phase
                buffer.recomputing, buffer.serial = recomputing, self.next_serial
                self.next_serial += 1
                buffers.append(buffer)
                self.entries.append((now, _ALLOC, buffer, row, phase, level, 0))
            else:
                buffer = buffers.pop()
                self._addresses.append(buffer.address)
                self.entries.append((now, _FREE, buffer, row, phase, level, 0))
            self.written += 1
        self._reached(top)
        return top

    def held_by(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        """Note that a tensor's storage holds a buffer, which is then freed together with the storage."""
        buffer.key, buffer.category = storage_key(storage), Category.UNKNOWN
        buffer.holder = Holder(storage, self._on_free)
        buffer.holder.buffer = buffer
        self.blocks[buffer.key] = buffer

    def expect(self, size: int, category: Category, label: str, row: int) -> None:
        """Add memory whose storage is not known to the start state."""
        buffer = self._buffer(size, row, self._device_named(self.device_type))
        buffer.key = -1 - buffer.address  # no storage's
        buffer.category, buffer.label = category, label
        self._count_as_before(buffer)
        self.blocks[buffer.key] = buffer
        self._expected.setdefault(size, []).append(buffer)

    def expected(self, storage: torch.UntypedStorage) -> Buffer | None:
        """Return the expected memory that this storage has, by its size; None if there is none."""
        buffers = self._expected.get(storage.nbytes())
        if not buffers:
            return None
        buffer = buffers.pop()
        category = buffer.category
        del self.blocks[buffer.key]
        self.held_by(buffer, storage)
        buffer.category = category
        return buffer

    def blocks_of(
        self, storages: Iterable[torch.UntypedStorage], *, late: bool = False
    ) -> list[Block | Buffer]:
        """Return the blocks of live storages, recording those that are not known yet.

        Unknown storages become part of the start state. If `late`, they were allocated unobserved during
        the recording, and count as allocated now.
        """
        blocks = []
        for storage in storages:
            block = self.blocks.get(storage_key(storage))
            if block is None and late:
                block = self.expected(storage)
            if block is None and late:
                block = self.allocate(storage, storage.nbytes(), None, -1, Phase.OTHER)
                self.late.append(block.bytes)
            elif block is None:
                block = self._block(storage, storage.nbytes(), -1)
                self._count_as_before(block)
                self.blocks[block.key] = block
            blocks.append(block)
        return blocks

    def _count_as_before(self, block: Block | Buffer) -> None:
        block.made_by, block.phase, block.recomputing = None, Phase.BEFORE, False
        block.serial = BEFORE
        self._grow(block)

    def _buffer(self, size: int, row: int, device: int) -> Buffer:
        buffer = Buffer()
        if self._addresses:
            buffer.address = self._addresses.pop()
        else:
            buffer.address = self._unheld = self._unheld + 1
        buffer.key, buffer.bytes, buffer.holder = -1, size, None
        buffer.category, buffer.label, buffer.module = _UNKNOWN, "", row
        buffer.device, buffer.stack, buffer.tensor = device, -1, None
        return buffer

    def _block(self, storage: torch.UntypedStorage, size: int, row: int) -> Block:
        block = Block(storage, self._on_free)
        block.key, block.address, block.bytes = storage_key(storage), storage_address(storage), size
        block.category, block.label, block.module = _UNKNOWN, "", row
        block.device, block.stack, block.tensor = self.device_row(storage), -1, None
        return block

    def _grow(self, block: Block | Buffer) -> None:
        self.levels[block.device] += block.bytes
        self.level += block.bytes
        self._reached(self.level)

    def _reached(self, level: int) -> None:
        if level > self.peak:
            self.peak = level
        for phase in self.watched:
            if level > phase.peak_bytes:
                phase.peak_bytes = level

    def free(self, block: Block | Buffer, row: int, phase: Phase, freed_ns: int = 0) -> None:
        """Record the free of a block or buffer."""
        self.levels[block.device] -= block.bytes
        self.level -= block.bytes
        self.write(_FREE, block, row, phase, now=freed_ns)
        if isinstance(block, Buffer):
            self._addresses.append(block.address)

    def _begin(
        self, block: Block | Buffer, made_by: Any, row: int, phase: Phase, recomputing: bool, now: int
    ) -> None:
        block.made_by, block.phase, block.recomputing = made_by, phase, recomputing
        block.serial = self.next_serial
        self.next_serial += 1
        self._grow(block)
        self.write(_ALLOC, block, row, phase, now=now)

    def device_row(self, storage: torch.UntypedStorage) -> int:
        """Return the row of a storage's device: memory that processes share has its own."""
        if self.device_type != "cpu":
            return self._device_named(str(storage.device))
        return self._device_named("shared" if storage.is_shared() else "cpu")

    def _device_named(self, name: str) -> int:
        row = self._device_rows.get(name)
        if row is None:
            row = self._device_rows[name] = len(self.devices)
            self.devices.append(name)
            self.levels.append(0)
        return row
