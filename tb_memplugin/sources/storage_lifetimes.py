"""What is alive, by storage: born when an operator hands it out, dead when torch lets go of it.

A storage's Python object lives exactly as long as the storage, also while only C++ holds it (tensors that
autograd saved): a weak reference to it fires at the real free. What a kernel takes and gives back within
one operator never becomes a tensor, and is not seen.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from time import time_ns
from typing import Any, Protocol

import torch

from tb_memplugin.trace import Category, Phase


class Happened(IntEnum):
    """What an entry of the ledger tells."""

    ALLOC = 0
    FREE = 1
    ENTER = 2
    """A layer begins."""
    EXIT = 3
    SNAPSHOT = 4
    """The levels at a moment, nothing else: the trace begins or ends."""


class Watched(Protocol):
    """Who wants to know the highest live bytes from here on."""

    peak_bytes: int


class Block(weakref.ref[torch.UntypedStorage]):
    """One life of one storage at one size: the weak reference that tells its end.

    `serial` counts births from 0, negative for what was alive before; `made_by` is the operator.
    """

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
    )
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


Entry = tuple[int, Happened, Block | None, int, Phase, int, int]
"""(epoch ns, what, block, module's row or -1, phase, live bytes after it, start of a layer that ends)."""

BEFORE = -1
"""The serial number of blocks that were alive when the ledger was opened."""


class Ledger:
    """Live bytes, their peak and the last entries, for the storages of one type of device. Thread-safe.

    `late` are the bytes of storages that were noticed some time after they were made.
    `level` is live bytes on all devices of the type, `peak` its highest, `levels` are by device.

    Weak references may fire at any moment on any thread, inside any line of Python: they only put the
    block on a queue, which the next entry settles.

    Args:
        max_entries: entries to keep; older ones go, while levels, peaks and counts stay right.
        device_type: "cpu", say; storages of other types are nobody's here.
    """

    def __init__(self, max_entries: int, device_type: str) -> None:
        self.device_type = device_type
        self.entries: deque[Entry] = deque(maxlen=max_entries)
        self.written = 0
        self.births = 0
        self.devices: list[str] = []
        self.levels: list[int] = []
        self.level = 0
        self.peak = 0
        self.blocks: dict[int, Block] = {}
        self.deaths: deque[tuple[int, Block]] = deque()
        self.lock = threading.RLock()
        self.watched: list[Watched] = []
        self.late: list[int] = []
        self._last_ns = 0
        self._device_rows: dict[str, int] = {}
        self._died = _queue(self.deaths)

    @property
    def dropped(self) -> int:
        """Entries that went because newer ones came."""
        return self.written - len(self.entries)

    def write(
        self, what: Happened, block: Block | None, row: int, phase: Phase, *, began: int = 0, now: int = 0
    ) -> int:
        """Add an entry, not before the last one. Returns its time, epoch nanoseconds."""
        now = self._last_ns = max(now or time_ns(), self._last_ns)
        self.entries.append((now, what, block, row, phase, self.level, began))
        self.written += 1
        return now

    def settle(self, row: int, phase: Phase) -> int:
        """Write down the deaths since the last call, as seen from a place. Returns how many there were."""
        deaths, count = self.deaths, 0
        while deaths:
            try:
                died_ns, block = deaths.popleft()
            except IndexError:
                break
            if self.blocks.get(block.key) is block:
                del self.blocks[block.key]
                self._end(block, row, phase, died_ns)
                count += 1
        return count

    def born(
        self,
        storage: torch.UntypedStorage,
        size: int,
        made_by: Any,
        row: int,
        phase: Phase,
        *,
        recomputing: bool = False,
    ) -> Block:
        """Write down a storage that nobody had seen."""
        block = self._block(storage, size, row)
        block.made_by, block.phase, block.recomputing = made_by, phase, recomputing
        block.serial = self.births
        self.births += 1
        self._grow(block)
        self.write(Happened.ALLOC, block, row, phase)
        return block

    def resized(self, block: Block, storage: torch.UntypedStorage, size: int, made_by: Any, row: int) -> None:
        """A known storage has another size: the new memory comes first, then the old is given back."""
        phase = block.phase
        if size:
            fresh = self.born(storage, size, made_by, row, phase, recomputing=block.recomputing)
            fresh.category, fresh.label, fresh.module = block.category, block.label, block.module
        else:
            self.blocks.pop(block.key, None)
        self._end(block, row, phase, 0)

    def take_in(self, storages: Iterable[torch.UntypedStorage], *, late: bool = False) -> list[Block]:
        """Blocks of storages that are alive already.

        The unknown ones are the start state, or, where it is `late`, were born where nobody looked: they
        count from now on.
        """
        found = []
        for storage in storages:
            block = self.blocks.get(storage._cdata)
            if block is None and late:
                block = self.born(storage, storage.nbytes(), None, -1, Phase.OTHER)
                self.late.append(block.bytes)
            elif block is None:
                block = self._block(storage, storage.nbytes(), -1)
                block.made_by, block.phase, block.recomputing = None, Phase.BEFORE, False
                block.serial = BEFORE
                self._grow(block)
            found.append(block)
        return found

    def _block(self, storage: torch.UntypedStorage, size: int, row: int) -> Block:
        block = Block(storage, self._died)
        block.key, block.address, block.bytes = storage._cdata, storage.data_ptr(), size
        block.category, block.label, block.module = Category.UNKNOWN, "", row
        block.device = self._device_row(storage)
        self.blocks[block.key] = block
        return block

    def _grow(self, block: Block) -> None:
        self.levels[block.device] += block.bytes
        level = self.level = self.level + block.bytes
        if level > self.peak:
            self.peak = level
        for one in self.watched:
            if level > one.peak_bytes:
                one.peak_bytes = level

    def _end(self, block: Block, row: int, phase: Phase, died_ns: int) -> None:
        self.levels[block.device] -= block.bytes
        self.level -= block.bytes
        self.write(Happened.FREE, block, row, phase, now=died_ns)

    def _device_row(self, storage: torch.UntypedStorage) -> int:
        name = self.device_type
        if name != "cpu":
            name = str(storage.device)
        elif storage.is_shared():
            name = "shared"
        row = self._device_rows.get(name)
        if row is None:
            row = self._device_rows[name] = len(self.devices)
            self.devices.append(name)
            self.levels.append(0)
        return row


def _queue(deaths: deque[tuple[int, Block]]) -> Any:
    """The callback of weak references. It holds the queue alone: a ledger may go before its storages."""

    def died(block: Block) -> None:
        deaths.append((time_ns(), block))

    return died
