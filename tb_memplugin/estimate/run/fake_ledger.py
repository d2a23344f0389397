"""The live storages of a fake run: they have a size and a device, but no memory.

A storage's Python object lives exactly as long as the storage, so a weak reference to it tells when the
storage is freed, as in record/storage_lifetimes.py. In contrast to that file, there is one thread, storages
have no addresses, and some memory is owned by no tensor.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import time_ns
from typing import Any

import torch

from tb_memplugin.record.tensor_metadata import Dense
from tb_memplugin.trace import Category, Phase
from tb_memplugin.trace.allocator import DEFAULT_POOL, SMALLEST_BLOCK, PoolId

FIRST_ADDRESS = 1 << 44
"""The first made-up address. Each is used once, to tell blocks apart; the simulator assigns the real ones."""

FOREVER = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class Block:
    """One allocation.

    `bytes` is the requested size; `module` is a row of `ModuleNames`, -1 for none; `stream` is the pointer of
    the stream on which it was made, 0 for the default one; `pool` is the id of its pool; `tensor` is what an
    operator returned in it, None for memory that no tensor owns; `stack` are its frames; `empties_cache`
    marks an entry that is no allocation: the program emptied the allocator's cache.
    """

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
    stream: int = 0
    pool: PoolId = DEFAULT_POOL
    tensor: Dense | None = None
    stack: tuple[str, ...] = ()
    empties_cache: bool = False


class Life(weakref.ref[torch.UntypedStorage]):
    """A weak reference that tells when the storage of a block is freed."""

    __slots__ = ("block", "key")
    block: Block
    key: int


@dataclass(frozen=True, slots=True)
class Scope:
    """The module and phase in which something happens; `module` is a row of `ModuleNames`, -1 for none."""

    module: int = -1
    phase: Phase = Phase.OTHER
    recomputing: bool = False


@dataclass(slots=True)
class NamedPhase:
    """A phase named by the user: allocated bytes before and after it, and the highest in between.

    `start_ns` and `stop_ns` are epoch nanoseconds.
    """

    name: str
    before_bytes: int = 0
    after_bytes: int = 0
    peak_bytes: int = 0
    start_ns: int = 0
    stop_ns: int = 0


Entry = tuple[int, bool, Block, int, Phase]
"""(epoch nanoseconds, True for an allocation and False for a free, block, row of the module or -1, phase)."""


class FakeLedger:
    """Allocations and frees on one type of device, in order.

    `allocated` and `peaks` are bytes for each device, as `torch.cuda.memory_allocated` counts them: on a GPU
    each block is a multiple of 512 (only the simulator knows the few blocks that are larger). `stream`
    returns the pointer of the current stream, `pool` the id of the pool that is used now, and `stack` the
    frames of the program, innermost first, by default none.

    Args:
        device_type: for example "cuda"; fake tensors on other devices are not recorded.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.entries: list[Entry] = []
        self.devices: list[str] = []
        self.allocated: list[int] = []
        self.peaks: list[int] = []
        self.lives: dict[int, Life] = {}
        self.freed: deque[Life] = deque()
        self.phases: list[NamedPhase] = []
        self.stream: Callable[[], int] = _default_stream
        self.pool: Callable[[], PoolId] = _default_pool
        self.stack: Callable[[], tuple[str, ...]] = tuple
        self._unit = 1 if device_type == "cpu" else SMALLEST_BLOCK
        self._next_address = FIRST_ADDRESS
        self._rows: dict[torch.device, int] = {}
        self._on_free = _queue(self.freed)

    def device_row(self, device: torch.device) -> int:
        """Return the row of a device; a new device gets the next row."""
        row = self._rows.get(device)
        if row is None:
            name = str(device)
            if name not in self.devices:
                self.devices.append(name)
                self.allocated.append(0)
                self.peaks.append(0)
            row = self._rows[device] = self.devices.index(name)
        return row

    def allocate(self, size: int, device: int, made_by: Any, scope: Scope) -> Block:
        """Record an allocation and return its block."""
        now = time_ns()
        rounded = -(-size // self._unit) * self._unit
        block = Block(
            self._next_address, size, device, made_by, scope.module, scope.phase, scope.recomputing, now
        )
        block.stream, block.pool, block.stack = self.stream(), self.pool(), self.stack()
        self._next_address += rounded
        level = self.allocated[device] = self.allocated[device] + rounded
        if level > self.peaks[device]:
            self.peaks[device] = level
        for phase in self.phases:
            if device == 0 and level > phase.peak_bytes:
                phase.peak_bytes = level
        self.entries.append((now, True, block, scope.module, scope.phase))
        return block

    def free(self, block: Block, scope: Scope) -> None:
        """Record that a block is freed."""
        block.freed_ns = now = time_ns()
        self.allocated[block.device] -= -(-block.bytes // self._unit) * self._unit
        self.entries.append((now, False, block, scope.module, scope.phase))

    def empty_cache(self, scope: Scope) -> None:
        """Record that the program empties the allocator's cache, on every device."""
        for device in range(len(self.devices)):
            now = time_ns()
            emptied = Block(0, 0, device, None, -1, scope.phase, False, now, empties_cache=True)
            self.entries.append((now, False, emptied, scope.module, scope.phase))

    def allocate_storage(
        self, storage: torch.UntypedStorage, size: int, device: int, made_by: Any, scope: Scope
    ) -> Block:
        """Record the allocation of a new storage, and follow the storage until it is freed."""
        block = self.allocate(size, device, made_by, scope)
        self._follow(block, storage)
        return block

    def free_storage(self, storage: torch.UntypedStorage, scope: Scope) -> None:
        """Record that a live storage frees its memory (FSDP resizes storages to zero)."""
        life = self.lives.pop(storage._cdata)
        self.free(life.block, scope)

    def settle(self, scope: Scope) -> None:
        """Record the storages freed since the last call, as freed in `scope`."""
        freed = self.freed
        while freed:
            life = freed.popleft()
            if self.lives.get(life.key) is life:
                del self.lives[life.key]
                self.free(life.block, scope)

    def inherit(self, block: Block, heir: torch.UntypedStorage) -> bool:
        """Give a block to another storage, if the block's own storage was freed since the last `settle`.

        A real run would have written the new tensor into that memory. Returns whether it was done.
        """
        for life in self.freed:
            if life.block is block and self.lives.get(life.key) is life:
                self.freed.remove(life)
                del self.lives[life.key]
                self._follow(block, heir)
                return True
        return False

    def forget_freed(self) -> None:
        """Remove all freed blocks from the history: it then begins with the blocks that are live now."""
        self.entries[:] = [entry for entry in self.entries if entry[1] and entry[2].freed_ns == FOREVER]
        self.peaks[:] = self.allocated

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        """Return the block of a storage, None if it is not known."""
        life = self.lives.get(storage._cdata)
        return life.block if life is not None else None

    def _follow(self, block: Block, storage: torch.UntypedStorage) -> None:
        life = Life(storage, self._on_free)
        life.block, life.key = block, storage._cdata
        self.lives[life.key] = life


def _queue(freed: deque[Life]) -> Callable[[Any], None]:
    """Return the callback of the weak references.

    It refers only to the queue, since the ledger may be deleted before the storages.
    """
    return freed.append


def _default_stream() -> int:
    return 0


def _default_pool() -> PoolId:
    return DEFAULT_POOL
