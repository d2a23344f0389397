"""Saving tensors to files: fake tensors have no values, so nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

SAVES = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model"),
}
"""Functions that write tensors, by module."""


class SavedFiles(Correction):
    """Makes functions that write checkpoints return at once, with a note."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace the functions of libraries that are imported, and tell storages apart by an address."""
        address: Any = torch.UntypedStorage.data_ptr

        def data_ptr(storage: torch.UntypedStorage) -> int:  # transformers looks for weights that are shared
            return int(storage._cdata if storage.device.type == "meta" and mode.is_here else address(storage))

        patches.set(torch.UntypedStorage, "data_ptr", data_ptr)
        for module_name, names in SAVES.items():
            module = sys.modules.get(module_name)
            for name in names if module is not None else ():
                original: Any = vars(module).get(name)
                if original is not None:
                    patches.set(module, name, self._unwritten(mode, f"{module_name}.{name}", original))

    def _unwritten(self, mode: CountingFakeMode, name: str, original: Callable[..., Any]) -> Any:
        def save(*arguments: Any, **keywords: Any) -> Any:
            if not mode.is_here:
                return original(*arguments, **keywords)
            self.target.note(f"{name} wrote nothing: tensors have no values in an estimate.")
            return None

        return save
