"""Private names of tensors and storages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from tb_memplugin.record.torch_private.table import getter, name, part, private

storage_key: Callable[[torch.UntypedStorage], int] = getter(
    "torch.UntypedStorage._cdata",
    "the address of a storage's C++ object, which tells storages apart and from foreign memory",
    "storages are told apart by Python's objects, and memory of NumPy and of files counts as torch's",
    instead=id,
)
KEY_IS_ADDRESS = storage_key is not id
"""Whether `storage_key` returns the address of a `c10::StorageImpl`."""

StorageHead = ctypes.c_size_t * 7
"""The first words of a `c10::StorageImpl`: its address, what frees it and the argument of that are among them
(seen in torch 2.13; in 2.6, whose two counts of references may take two words, by its source)."""

_word_at = ctypes.c_size_t.from_address


def _address_offset() -> int:
    """Return where in a `c10::StorageImpl` its memory's address is, in bytes; -1 if that is not known."""
    probe = torch.UntypedStorage(1)
    if not KEY_IS_ADDRESS:
        return -1
    words = list(StorageHead.from_address(storage_key(probe)))
    address = probe.data_ptr()
    return words.index(address) * ctypes.sizeof(ctypes.c_size_t) if address in words else -1


_ADDRESS_OFFSET = _address_offset()


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's memory, 0 for none.

    `data_ptr()` is not asked: it gives memory of its own to a storage that shares it until one of both is
    written to (`torch._lazy_clone`), and warns or raises an error where a storage has none.
    """
    if _ADDRESS_OFFSET < 0:
        return storage.data_ptr()
    key = storage_key(storage)
    return _word_at(key + _ADDRESS_OFFSET).value if key else 0


def storage_addresses(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Return `storage_address` of each storage, without a Python call for each (`held_storages.py`)."""
    if _ADDRESS_OFFSET < 0:
        return list(map(torch.UntypedStorage.data_ptr, storages))
    pointers = map(_ADDRESS_OFFSET.__add__, map(storage_key, storages))
    return list(map(attrgetter("value"), map(_word_at, pointers)))


TensorBase: Any = private(
    "torch._C.TensorBase",
    "getters of torch's own attributes, where a subclass has others of their names",
    "attributes that a program has put in the place of torch's are read",
    instead=torch.Tensor,
)
dtype_of, device_of, layout_of, shape_of, bytes_of, is_nested, grad_of, needs_grad, grad_fn_of = (
    getattr(TensorBase, attribute).__get__
    for attribute in (
        *("dtype", "device", "layout", "shape", "nbytes", "is_nested", "grad", "requires_grad", "grad_fn"),
    )
)
strides_of, untyped_storage = TensorBase.stride, TensorBase.untyped_storage
"""Torch's own attributes of a tensor. A subclass may have others of these names, whose code must not run."""

_version: Any = private(
    "torch._C.TensorBase._version",
    "how often a tensor was written to",
    "inputs that a call writes to are not told",
    instead=None,
)
version_of: Callable[[torch.Tensor], int] = (lambda _: -1) if _version is None else _version.__get__
is_zero_tensor: Callable[[torch.Tensor], bool] = private(
    "torch.Tensor._is_zerotensor",
    "whether a tensor of zeros has no memory, in estimates",
    "estimates count memory for such zeros",
    instead=lambda _: False,
)
is_view: Callable[[torch.Tensor], bool] = private(
    "torch.Tensor._is_view",
    "whether a tensor shares the memory of another, in estimates",
    "estimates count no sum of gradients in place",
    instead=lambda _: True,
)
_NESTED_SHAPES = "the shapes of a nested tensor"
_NO_PARTS = "the shapes of nested tensors, or the parts of sparse ones, have no category"
NESTED_SHAPES = tuple(
    name(f"torch.Tensor.{part}", _NESTED_SHAPES, _NO_PARTS)
    for part in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")
)
"""The methods that return the shapes of a nested tensor."""
COO_PARTS = tuple(
    name(f"torch.Tensor.{part}", "the parts of a sparse tensor", _NO_PARTS)
    for part in ("_indices", "_values")
)
"""The methods that return the parts of a sparse tensor in COO layout."""
_LOCAL = name(
    "torch.distributed.tensor.DTensor._local_tensor",
    "the part of a DTensor that is on this device",
    "the bytes of sharded parameters are those of all devices together",
)
FileReader: Any = private(
    "torch._C.PyTorchFileReader",
    "sees what `torch.load` reads",
    "memory that `torch.load` reads is not seen",
    instead=None,
)
printing: Any = private(
    "torch._tensor_str",
    "sees what printing a tensor allocates",
    "memory used by printing is not seen",
    instead=None,
)
PRINT = name(
    "torch._tensor_str._str", "the function that prints a tensor", "memory used by printing is not seen"
)
SHARE = tuple(
    name(
        f"torch.UntypedStorage.{method}",
        "moves a storage to memory that processes share",
        "memory that is shared in a trace counts as it was before",
    )
    for method in ("_share_fd_cpu_", "_share_filename_cpu_")
)
FAKE = part("torch._subclasses", "the classes of tensors without memory", "fake tensors are looked into")
"""The package whose classes are tensors without memory."""


def local_part(tensor: Any) -> Any:
    """Return the part of a DTensor on this device, and another tensor itself."""
    return getattr(tensor, _LOCAL, tensor)
