"""What the blocks of a window were that are alive after it: the next window knows them again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from tb_memplugin.record.storages import memory_of
from tb_memplugin.record.storages_alive import storages_alive, young_storages_alive
from tb_memplugin.record.torch_private.tensors import storage_address, storage_key
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.tables import code_mask

SMALLEST_SHARE = 0.001
"""The share of the live bytes from which on the program's objects are searched for their storages."""


@dataclass(frozen=True, slots=True)
class CarriedBlock:
    """A block's category, the key of its module and its label."""

    category: Category
    module: str
    label: str


@dataclass(frozen=True, slots=True)
class CarriedBlocks:
    """The blocks by their storages, which are held weakly: a later storage at the same address is another.

    `unreached` has the bytes of the CPU's other blocks by (device name, address): Python did not have them.
    """

    _blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], CarriedBlock]] = field(default_factory=dict)
    unreached: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: MemoryTrace, before: CarriedBlocks) -> CarriedBlocks:
        """Return the blocks alive at the end of a trace that was just recorded, where Python has them.

        Models and optimizers tell in each window what they hold, so what they hold is left out. Objects
        that Python created last are searched first, and no more once less than `SMALLEST_SHARE` of the live
        bytes is left to find; then none is `unreached`.

        Args:
            before: what the window before left.
        """
        carried = cls({key: kept for key, kept in before._blocks.items() if kept[0]() is not None})
        blocks = trace.allocations
        alive = blocks.freed >= len(trace.events)
        rows = np.flatnonzero(alive & (blocks.born >= 0) & ~_IS_HELD[blocks.category])
        small = SMALLEST_SHARE * blocks.bytes[alive].sum()
        keys = zip(
            [trace.devices[number].name for number in blocks.device[rows].tolist()],
            blocks.address[rows].tolist(),
            strict=True,
        )
        row_of = dict(zip(keys, rows.tolist(), strict=True))
        for search in (young_storages_alive, partial(storages_alive, of_gradients=False)):
            if blocks.bytes[list(row_of.values())].sum() <= small:
                break
            for storage in search():
                row = row_of.pop((memory_of(storage), storage_address(storage)), None)
                if row is not None:
                    carried._blocks[storage_key(storage)] = weakref.ref(storage), _block(trace, row)
        used = set(trace.events.address.tolist())
        carried.unreached.update((key, size) for key, size in before.unreached.items() if key[1] not in used)
        if blocks.bytes[list(row_of.values())].sum() > small:
            carried.unreached.update(
                (key, int(blocks.bytes[row])) for key, row in row_of.items() if key[0] == "cpu"
            )
        return carried

    def get(self, storage: torch.UntypedStorage) -> CarriedBlock | None:
        """Return what a storage was in the window before, None if it was not alive there."""
        reference, block = self._blocks.get(storage_key(storage), (None, None))
        return block if reference is not None and reference() is storage else None


def _block(trace: MemoryTrace, row: int) -> CarriedBlock:
    blocks = trace.allocations
    label, module = int(blocks.label[row]), int(blocks.module[row])
    return CarriedBlock(
        Category(int(blocks.category[row])),
        trace.modules[module].key if module >= 0 else "",
        trace.labels[label] if label >= 0 else "",
    )


_IS_HELD = code_mask((Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE))
