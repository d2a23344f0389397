"""Count tensors that `torch.load` and safetensors read from files: no operator returns them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import _utils

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches

_SET = torch.ops.aten.set_
_LOADED = _SET.source_Storage_storage_offset

IN_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Makes transformers read weights on the program's thread: on others, tensors are not fake."""


class LoadedFiles(Correction):
    """Records loaded tensors where they are put; safetensors gives fake tensors of the file's shapes."""

    def rules(self) -> dict[Any, Rule]:
        """Return rules for operators that take a storage."""
        return {_LOADED: _set_storage, _SET.source_Storage: _set_storage}

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Wrap the function with which `torch.load` gives a fake tensor its device, and `safe_open`."""
        restore: Any = getattr(_utils, "_restore_device_fake_mode", None)

        def restored(tensor: torch.Tensor) -> Any:
            loaded = restore(tensor)
            if mode.is_on():
                mode.settle(mode.layers.scope())
                mode.see([loaded], _LOADED)
            return loaded

        if restore is not None:  # PyTorch 2.7 and newer
            patches.set(_utils, "_restore_device_fake_mode", restored)
        if IN_ONE_THREAD not in os.environ:
            os.environ[IN_ONE_THREAD] = "1"
            patches.on_undo(lambda: os.environ.pop(IN_ONE_THREAD, None))
        library = sys.modules.get("safetensors.torch")
        if library is not None:
            original: Any = vars(library)["safe_open"]

            def opened(filename: Any, framework: str = "pt", device: Any = "cpu", **more: Any) -> Any:
                if not mode.is_on():
                    return original(filename, framework=framework, device=device, **more)
                return _FakeFile(original(filename, framework="np"), vars(library)["_TYPES"], device)

            for module in (library, sys.modules["safetensors"]):
                patches.set(module, "safe_open", opened)


def _set_storage(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run without FakeTensorMode's cache, whose keys would keep the storage alive.

    A real storage, which libraries that read checkpoints on their own put into tensors (Lightning's Fabric),
    has a fake one in its place: fake tensors take no other.
    """
    tensor, storage, *layout = args
    if storage.device.type != "meta":
        args = (tensor, torch.UntypedStorage(storage.nbytes(), device="meta"), *layout)
    enabled, mode.cache_enabled = mode.cache_enabled, False
    try:
        return mode.quietly(func, *args, **kwargs)
    finally:
        mode.cache_enabled = enabled


class _FakeFile:
    """An open safetensors file whose tensors are fake. The library reads into real memory of the device."""

    def __init__(self, file: Any, types: dict[str, torch.dtype], device: Any) -> None:
        self._file, self._types, self._device = file, types, device
        self.offset_keys: Callable[[], list[str]] = file.keys
        self.keys: Callable[[], list[str]] = file.keys
        self.metadata: Callable[[], dict[str, str] | None] = file.metadata

    def __enter__(self) -> _FakeFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> FileSlice:
        """Return a tensor of the file that is read later."""
        real = self._file.get_slice(name)
        return FileSlice(real.get_shape(), real.get_dtype(), partial(self.get_tensor, name))

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file."""
        real = self._file.get_slice(name)
        return torch.empty(real.get_shape(), dtype=self._types[real.get_dtype()], device=self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the file."""
        return {name: self.get_tensor(name) for name in self.keys()}


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A tensor of an open file that is not read yet, with the name of its type in safetensors."""

    shape: list[int]
    dtype: str
    read: Callable[[], torch.Tensor]

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return self.shape

    def get_dtype(self) -> str:
        """Return the name of the tensor's type."""
        return self.dtype

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.read()[part]
