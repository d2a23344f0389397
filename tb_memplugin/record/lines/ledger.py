"""A ledger that keeps the blocks alive at the peak, even if the entries of that time are dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tb_memplugin.record.lines.stacks import NOT_KEPT
from tb_memplugin.record.storage_lifetimes import BEFORE, Block, Buffer, EntryKind, Ledger
from tb_memplugin.trace import Category, Phase


class LineLedger(Ledger):
    """A ledger that knows the blocks at each device's true peak, however few entries it keeps.

    A dropped entry is first applied to the state before the oldest entry. If that state is the peak of all
    entries so far, including those still kept, its blocks are saved. This happens at most once each time
    that all entries have been replaced.

    Attributes:
        allocated: the sum of the bytes of all allocations, by device row.
        peaks: the highest live bytes, by device row.
        stack_of_now: functions that return the row of a thread's current stack, by thread ident.
    """

    def __init__(self, max_entries: int, device_type: str) -> None:
        super().__init__(max_entries, device_type)
        self.allocated: dict[int, int] = {}
        self.peaks: dict[int, int] = {}
        self.stack_of_now: dict[int, Callable[[], int]] = {}
        self._is_late = False
        self._before: dict[int, Block | Buffer] = {}
        self._level_before: dict[int, int] = {}
        self._set_aside: dict[int, tuple[int, list[Block | Buffer]]] = {}

    def begin(self) -> None:
        """Set the blocks alive now as the state before the first entry."""
        for block in self.blocks.values():
            self._before[id(block)] = block
            self._level_before[block.device] = self._level_before.get(block.device, 0) + block.bytes

    def blocks_at_dropped_peak(self, device: int) -> list[Block | Buffer] | None:
        """Return the blocks at a device's peak if its entry was dropped; None if it may still be kept."""
        level, blocks = self._set_aside.get(device, (-1, []))
        return blocks if level == self.peaks.get(device, 0) else None

    def blocks_of(
        self, storages: Iterable[torch.UntypedStorage], *, late: bool = False
    ) -> list[Block | Buffer]:
        """See `Ledger`. Blocks that are found late get no stack: the current one did not allocate them."""
        self._is_late = late
        try:
            return super().blocks_of(storages, late=late)
        finally:
            self._is_late = False

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
        """Add an entry. An entry that is dropped for it is applied to the state before the oldest one."""
        entries = self.entries
        if len(entries) == entries.maxlen:
            _, oldest_kind, oldest_block, *_ = entries[0]
            if oldest_block is not None:
                self._apply(oldest_kind, oldest_block)
        if kind is EntryKind.ALLOC and block is not None:
            self.allocated[block.device] = self.allocated.get(block.device, 0) + block.bytes
        return super().write(kind, block, row, phase, began=began, now=now)

    def pass_through(
        self, reports: Iterable[tuple[int, int]], made_by: Any, row: int, phase: Phase, *, recomputing: bool
    ) -> int:
        """See `Ledger`."""
        buffers: list[Buffer] = []
        top = self.level
        for now, size in reports:
            if size > 0:
                buffer = self.allocate_buffer(size, made_by, row, phase, recomputing=recomputing, now=now)
                buffer.category = Category.TEMPORARY
                buffers.append(buffer)
                top = max(top, self.level)
            else:
                self.free(buffers.pop(), row, phase, now)
        return top

    def _apply(self, kind: EntryKind, block: Block | Buffer) -> None:
        device = block.device
        level = self._level_before.get(device, 0)
        if level == self.peaks.get(device, 0) and self._set_aside.get(device, (-1,))[0] < level:
            alive = [before for before in self._before.values() if before.device == device]
            self._set_aside[device] = (level, alive)
        if kind is EntryKind.ALLOC:
            self._before[id(block)] = block
            self._level_before[device] = level + block.bytes
        elif self._before.pop(id(block), None) is not None:
            self._level_before[device] = level - block.bytes

    def _grow(self, block: Block | Buffer) -> None:
        super()._grow(block)
        if block.serial > BEFORE:
            stack_of_now = None if self._is_late else self.stack_of_now.get(threading.get_ident())
            block.stack = NOT_KEPT if stack_of_now is None else stack_of_now()
        level = self.levels[block.device]
        if level > self.peaks.get(block.device, 0):
            self.peaks[block.device] = level
