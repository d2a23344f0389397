"""Identify the storages of parameters, buffers, gradients and optimizer state by pointer.

A sighting notes that at some time the storage at some address was, for example, the gradient of a parameter.
Matched with the allocations of the trace, it identifies them exactly, even after they are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.sources.modules import ModuleNames
from tb_memplugin.trace import Category

Purpose = tuple[torch.Tensor, Category, int, str]
"""(tensor, category, owning module's row, label)"""

OF_NO_PARAMETER = (-1, "optimizer")
"""(module's row, label) of state that an optimizer does not keep for one of its parameters."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A storage with a known purpose. `module` is a row of the module names, -1 if no module owns it.

    `dtype` is the dtype of the tensor that uses the storage, spelled as in torch without "torch.".
    """

    time_ns: int
    device: str
    address: int
    bytes: int
    category: Category
    module: int
    label: str
    dtype: str = ""


def storages(tensor: torch.Tensor) -> Iterator[tuple[torch.UntypedStorage, str]]:
    """Yield the storages of a tensor with their device names: several for sparse and wrapper tensors."""
    for plain in _plain(tensor):
        try:
            storage = plain.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError, ValueError):
            continue  # meta, fake, functorch, lazy parameters: no memory that an allocator knows
        if address:
            yield storage, _memory_of(plain, storage)


def _memory_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> str:
    if tensor.device.type == "cpu":
        return "shared" if storage.is_shared() else "cpu"
    return str(tensor.device)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter or kind is nn.Buffer:
        if tensor.layout is torch.strided:
            yield tensor
            if tensor.is_nested:  # its shapes are tensors, too
                yield tensor._nested_tensor_size()
                yield tensor._nested_tensor_strides()
                yield tensor._nested_tensor_storage_offsets()
        elif tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh as well
                yield from _plain(inner)
    elif tensor.layout is torch.strided:
        yield tensor


def model_storages(models: Mapping[str, nn.Module], names: ModuleNames) -> Iterator[Purpose]:
    """Yield parameters, buffers and gradients as (tensor, category, owning module's row, label)."""
    for model in models.values():
        for tensors, category in (
            (model.parameters(), Category.PARAMETER),
            (model.buffers(), Category.BUFFER),
        ):
            for tensor in tensors:
                module, label = names.owner_of.get(id(tensor), (-1, ""))
                yield tensor, category, module, label
                if category is Category.PARAMETER and tensor.grad is not None:
                    yield tensor.grad, Category.GRADIENT, module, f"{label} (gradient)"


def gradients(optimizer: torch.optim.Optimizer, names: ModuleNames) -> Iterator[Purpose]:
    """Yield the gradients of an optimizer's parameters."""
    for parameter, module, label in optimizer_parameters(optimizer, names):
        if parameter.grad is not None:
            yield parameter.grad, Category.GRADIENT, module, f"{label} (gradient)"


def optimizer_storages(optimizer: torch.optim.Optimizer, names: ModuleNames) -> Iterator[Purpose]:
    """Yield every tensor of an optimizer's state, including nested ones, with the parameter's owner.

    State need not be a dict, and its key need not be a parameter.
    """
    owners = {id(one): (row, label) for one, row, label in optimizer_parameters(optimizer, names)}
    for key, state in optimizer.state.items():
        module, label = owners.get(id(key), OF_NO_PARAMETER)
        for name, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
            for tensor in tensors_in(value):
                if tensor is not key:
                    yield tensor, Category.OPTIMIZER_STATE, module, f"{label} ({name})"


def held_parameters(optimizer: torch.optim.Optimizer, names: ModuleNames) -> Iterator[Purpose]:
    """Yield the parameters of an optimizer, also those that belong to none of the given models."""
    for parameter, module, label in optimizer_parameters(optimizer, names):
        yield parameter, Category.PARAMETER, module, label


def optimizer_parameters(
    optimizer: torch.optim.Optimizer, names: ModuleNames
) -> Iterator[tuple[torch.Tensor, int, str]]:
    """Yield an optimizer's parameters in its own order, with the owning module's row and the FQN."""
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield parameter, *names.owner_of.get(id(parameter), (-1, f"group {index} parameter {place}"))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def sight(
    tensors: Iterable[Purpose],
    *,
    keep: list[torch.UntypedStorage] | None = None,
) -> list[Sighting]:
    """Return a sighting of each storage of the tensors; a storage with two purposes keeps the first.

    Args:
        tensors: (tensor, category, owning module's row, label).
        keep: a list to which the storage objects are appended, in the order of the result.
    """
    now, seen, found = time_ns(), set(), []
    for tensor, category, module, label in tensors:
        for storage, device in storages(tensor):
            address = storage.data_ptr()
            if address in seen:
                continue
            seen.add(address)
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append(Sighting(now, device, address, storage.nbytes(), category, module, label, dtype))
            if keep is not None:
                keep.append(storage)
    return found
