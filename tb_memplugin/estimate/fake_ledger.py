"""What is alive in a fake run: storages that have a size and a device, but no memory.

A storage's Python object lives exactly as long as the storage, so a weak reference to it tells its end, as
in sources/storage_lifetimes.py. Here is one flow of control, no address, and memory that no tensor owns.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import time_ns
from typing import Any

import torch

from tb_memplugin.estimate.simulator.allocator_settings import SMALLEST_BLOCK
from tb_memplugin.trace import Category, Phase

FIRST_ADDRESS = 1 << 44
"""Addresses are made up, each used once: they tell blocks apart. The simulator gives them places."""

FOREVER = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class Block:
    """One allocation. `bytes` were requested; `module` is a row of the names, -1 for none."""

    address: int
    bytes: int
    device: int
    made_by: Any
    module: int
    phase: Phase
    recomputing: bool
    born_ns: int
    freed_ns: int = FOREVER
    category: Category = Category.UNKNOWN
    label: str = ""


class Life(weakref.ref[torch.UntypedStorage]):
    """The weak reference that tells the end of a block's storage."""

    __slots__ = ("block", "key")
    block: Block
    key: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the program something happens; `module` is a row of the names, -1 for none."""

    module: int = -1
    phase: Phase = Phase.OTHER
    recomputing: bool = False


@dataclass(slots=True)
class NamedPhase:
    """A phase that the user named: allocated bytes before and after it, and the highest in between.

    `start_ns`, `stop_ns` are epoch nanoseconds.
    """

    name: str
    before_bytes: int = 0
    after_bytes: int = 0
    peak_bytes: int = 0
    start_ns: int = 0
    stop_ns: int = 0


Entry = tuple[int, bool, Block, int, Phase]
"""(epoch ns, whether it is an allocation, block, module's row or -1, phase)."""


class FakeLedger:
    """Allocations and frees of one type of device, in order.

    `allocated`, `peaks` are by device, bytes, as `torch.cuda.memory_allocated` counts them: multiples of 512
    for each block (the few blocks that get more than they asked for are the simulator's matter);
    `recent_peaks` are those since the program last called `reset_peak_memory_stats`.

    Args:
        device_type: "cuda", say; fake tensors elsewhere are nobody's here.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.entries: list[Entry] = []
        self.devices: list[str] = []
        self.allocated: list[int] = []
        self.peaks: list[int] = []
        self.recent_peaks: list[int] = []
        self.lives: dict[int, Life] = {}
        self.deaths: deque[Life] = deque()
        self.phases: list[NamedPhase] = []
        self._unit = 1 if device_type == "cpu" else SMALLEST_BLOCK
        self._next_address = FIRST_ADDRESS
        self._rows: dict[torch.device, int] = {}
        self._died = _queue(self.deaths)

    def device_row(self, device: torch.device) -> int:
        """The row of a device, new or known."""
        row = self._rows.get(device)
        if row is None:
            name = str(device)
            if name not in self.devices:
                self.devices.append(name)
                self.allocated.append(0)
                self.peaks.append(0)
                self.recent_peaks.append(0)
            row = self._rows[device] = self.devices.index(name)
        return row

    def take(self, size: int, device: int, made_by: Any, place: Place) -> Block:
        """Memory is allocated."""
        now = time_ns()
        rounded = -(-size // self._unit) * self._unit
        block = Block(
            self._next_address, size, device, made_by, place.module, place.phase, place.recomputing, now
        )
        self._next_address += rounded
        level = self.allocated[device] = self.allocated[device] + rounded
        if level > self.recent_peaks[device]:
            self.recent_peaks[device] = level
            self.peaks[device] = max(level, self.peaks[device])
        for phase in self.phases:
            if device == 0 and level > phase.peak_bytes:
                phase.peak_bytes = level
        self.entries.append((now, True, block, place.module, place.phase))
        return block

    def give_back(self, block: Block, place: Place) -> None:
        """It goes back."""
        block.freed_ns = now = time_ns()
        self.allocated[block.device] -= -(-block.bytes // self._unit) * self._unit
        self.entries.append((now, False, block, place.module, place.phase))

    def born(
        self, storage: torch.UntypedStorage, size: int, device: int, made_by: Any, place: Place
    ) -> Block:
        """A storage that nobody had seen."""
        block = self.take(size, device, made_by, place)
        self._follow(block, storage)
        return block

    def lost(self, storage: torch.UntypedStorage, place: Place) -> None:
        """A storage that lives on gives its memory back (FSDP resizes storages to nothing)."""
        life = self.lives.pop(storage._cdata)
        self.give_back(life.block, place)

    def settle(self, place: Place) -> None:
        """Write down the deaths since the last call, as seen from a place."""
        deaths = self.deaths
        while deaths:
            life = deaths.popleft()
            if self.lives.get(life.key) is life:
                del self.lives[life.key]
                self.give_back(life.block, place)

    def inherit(self, block: Block, heir: torch.UntypedStorage) -> bool:
        """Let a storage live on in the memory of one that died since the last `settle`, if it did.

        A real run would have written into that memory.
        """
        for life in self.deaths:
            if life.block is block and self.lives.get(life.key) is life:
                self.deaths.remove(life)
                del self.lives[life.key]
                self._follow(block, heir)
                return True
        return False

    def forget_the_dead(self) -> None:
        """What is gone was never there: the history begins with what is alive."""
        self.entries[:] = [entry for entry in self.entries if entry[1] and entry[2].freed_ns == FOREVER]
        self.peaks[:] = self.recent_peaks[:] = self.allocated

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        """The block behind a storage, None if it is not known."""
        life = self.lives.get(storage._cdata)
        return life.block if life is not None else None

    def _follow(self, block: Block, storage: torch.UntypedStorage) -> None:
        life = Life(storage, self._died)
        life.block, life.key = block, storage._cdata
        self.lives[life.key] = life


def _queue(deaths: deque[Life]) -> Callable[[Any], None]:
    """The callback of the weak references. It holds the queue alone: a ledger may go before its storages."""
    return deaths.append
