"""`tensor.untyped_storage().resize_(0)`: free memory while its tensor stays alive, as FSDP2 does.

A storage is resized without an operator, so the call itself must be recorded.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Block
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

MADE_BY = "aten::resize_storage"
"""The operator name that is shown for memory that a resized storage gets."""


class StorageResizing(Correction):
    """Records the frees and allocations of resized storages."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.UntypedStorage.resize_`."""
        original: Any = torch.UntypedStorage.resize_
        emptied: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if not mode.is_here:
                return original(storage, size)
            ledger, scope = mode.ledger, mode.layers.scope()
            mode.settle(scope)
            before = ledger.block_of(storage)
            result = original(storage, size)
            if before is not None and not size:
                ledger.free_storage(storage, scope)
                emptied[storage._cdata] = (weakref.ref(storage), before)
                return result
            owner, last = emptied.pop(storage._cdata, (None, None))
            old = before or (last if owner is not None and owner() is storage else None)
            if old is not None and (before is None or before.bytes != size):
                fresh = ledger.allocate_storage(storage, size, old.device, MADE_BY, scope)
                fresh.label, fresh.module, fresh.tensor = old.label, old.module, old.tensor
                if before is not None:
                    ledger.free(before, scope)
            return result

        patches.set(torch.UntypedStorage, "resize_", resize_)
        patches.on_undo(emptied.clear)
