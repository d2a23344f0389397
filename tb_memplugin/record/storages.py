"""Identify the storages of parameters, buffers, gradients and optimizer state by pointer.

A sighting notes that at some time the storage at some address was, for example, the gradient of a parameter.
Matched with the allocations of the trace, it identifies them exactly, even after they are freed.

See what enters the outermost module calls from outside, and what these calls write to.

No operator runs for that: a tensor counts how often it was written to, because autograd needs that. The count
is that of the tensor and all its views, but not of `tensor.data`. Tensors made in inference mode have none.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from time import time_ns
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.tensor_metadata import dense, metadata_of
from tb_memplugin.record.tensors_inside import held_by, isinstance_of, tensors_in
from tb_memplugin.record.torch_private.dispatch import tracing_state, without_torch_functions
from tb_memplugin.record.torch_private.modules import buffers_in, parameters_in
from tb_memplugin.record.torch_private.profiler import record_operators
from tb_memplugin.record.torch_private.tensors import (
    COO_PARTS,
    FAKE,
    KEY_IS_ADDRESS,
    NESTED_SHAPES,
    StorageHead,
    dtype_of,
    grad_of,
    is_nested,
    layout_of,
    storage_address,
    storage_key,
    untyped_storage,
    version_of,
)
from tb_memplugin.trace import Allocations, Category, Note, TensorMetadata
from tb_memplugin.trace.labels import INPUT_OF
from tb_memplugin.trace.replay import blocks_at
from tb_memplugin.trace.tables import Int64

Purpose = tuple[torch.Tensor, Category, int, str]
"""(tensor, category, owning module's row, label)"""

OF_NO_PARAMETER = (-1, "optimizer")
"""(module's row, label) of state that an optimizer does not keep for one of its parameters."""

MOST_INSIDE = 100
"""How many attributes of a tensor that wraps others are looked at."""
_KNOWN_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})
WITHOUT_TENSORS = frozenset((int, float, bool, str, type(None)))
"""Classes whose objects hold none."""


class StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that can be a key of `Freed` after the storage was freed."""

    __slots__ = ()
    __hash__ = object.__hash__


Reference = TypeVar("Reference", bound=StorageReference)

Freed = defaultdict[Reference, int]
"""When storages were freed, epoch nanoseconds, by the weak references whose callback is its `__getitem__`.

That calls `time_ns`, and no Python: what a signal raises while an object is freed would be lost.
"""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A storage with a known purpose. `module` is a row of the module names, -1 if no module owns it.

    `dtype` is the dtype of the tensor that uses the storage, spelled as in torch without "torch.";
    `tensor` is the plain tensor in it, None if it was not looked at. `version` is how often an input had been
    written to (see `versions_of`), -1 if that is not known; `ends_call` is True if it was seen at the end of
    the call that it entered, because that call wrote to it.
    """

    time_ns: int
    device: str
    address: int
    bytes: int
    category: Category
    module: int
    label: str
    dtype: str = ""
    version: int = -1
    ends_call: bool = False
    tensor: TensorMetadata | None = None


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each tensor, or a view of the same tensor, was written to.

    -1 where that is not counted: in inference mode.
    """
    try:
        return list(map(version_of, tensors))
    except RuntimeError:
        return [-1 if torch.Tensor.is_inference(tensor) else version_of(tensor) for tensor in tensors]


def allocated_by_torch(storage: torch.UntypedStorage) -> bool:
    """Whether torch allocated the memory: not that of numpy arrays, of files or of functorch's wrappers.

    Memory of others cannot be resized, but nor can torch's own after `Tensor.numpy()` and `torch.load`. These
    differ in what frees them: torch's allocators get the address itself, others an object of their own.
    """
    address = storage_address(storage)
    if not address or not KEY_IS_ADDRESS or storage.resizable() or storage.is_shared():
        return bool(address)
    return list(StorageHead.from_address(storage_key(storage))).count(address) == 2


def foreign_note(storages: Iterable[torch.UntypedStorage]) -> list[Note]:
    """Return a note on the CPU's bytes that torch did not allocate, if these storages have any."""
    sizes = {
        storage_address(storage): storage.nbytes()
        for storage in storages
        if storage.device.type == "cpu" and not allocated_by_torch(storage)
    }
    if not (size := sum(sizes.values())):
        return []
    note = Note(
        f"{size:,} bytes of parameters and buffers are in memory that torch did not allocate: a file's "
        "(safetensors, torch.load(mmap=True)) or numpy's. They are in the curve, but not among the bytes of "
        "torch's allocator.",
        "foreign",
        size,
    )
    return [note]


def storages(tensor: torch.Tensor) -> Iterator[tuple[torch.UntypedStorage, str]]:
    """Yield the storages of a tensor with their device names: several for sparse and wrapper tensors."""
    for storage, device, _ in storages_and_tensors(tensor):
        yield storage, device


def storages_and_tensors(tensor: torch.Tensor) -> Iterator[tuple[torch.UntypedStorage, str, torch.Tensor]]:
    """Yield the storages of a tensor with their device names, and the plain tensor that lies in each."""
    for plain in _plain(tensor):
        try:
            storage = untyped_storage(plain)
            address = storage_address(storage)
        except (RuntimeError, NotImplementedError, ValueError):
            continue  # meta, fake, functorch, lazy parameters: no memory that an allocator knows
        if address:
            yield storage, memory_of(storage), plain


def memory_of(storage: torch.UntypedStorage) -> str:
    """Return the name of the memory of a storage: its device, or "shared"."""
    device = storage.device
    if device.type == "cpu":
        return "shared" if storage.is_shared() else "cpu"
    return str(device)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter or kind is nn.Buffer:
        is_strided = layout_of(tensor) is torch.strided
        if is_strided:
            yield tensor
        if not is_strided or is_nested(tensor):
            yield from _parts(tensor)
        return
    if kind.__module__.startswith(FAKE):
        return  # a fake tensor has no memory, and warns of looking for it
    if _has_memory(tensor):
        yield tensor
        return
    for _, inner, _ in held_by(tensor, MOST_INSIDE):  # not `__tensor_flatten__`, which is the program's code
        if isinstance_of(inner, torch.Tensor):
            yield from _plain(inner)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a subclass has memory of its own: not if it wraps others."""
    try:
        return layout_of(tensor) is torch.strided and storage_address(untyped_storage(tensor)) != 0
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a sparse tensor consists of, or the shapes of a nested one.

    Operators return them, which must not be in the user's profile.
    """
    names: tuple[str, ...] = ()
    if tensor.is_nested:
        names = NESTED_SHAPES
    elif tensor.layout is torch.sparse_coo:
        names = COO_PARTS
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("ccol_indices", "row_indices", "values")
    if record_operators is not None:
        record_operators(False)
    try:
        return tuple(getattr(tensor, name)() for name in names if hasattr(tensor, name))
    finally:
        if record_operators is not None:
            record_operators(True)


def model_storages(models: Mapping[str, nn.Module], names: ModuleNames) -> Iterator[Purpose]:
    """Yield parameters, buffers and gradients as (tensor, category, owning module's row, label)."""
    for model in models.values():
        for tensors, category in (
            (parameters_in(model), Category.PARAMETER),
            (buffers_in(model), Category.BUFFER),
        ):
            for tensor in tensors:
                module, label = names.owner_of.get(id(tensor), (-1, ""))
                yield tensor, category, module, label
                if category is Category.PARAMETER and (gradient := grad_of(tensor)) is not None:
                    yield gradient, Category.GRADIENT, module, f"{label} (gradient)"


def gradients(optimizer: torch.optim.Optimizer, names: ModuleNames) -> Iterator[Purpose]:
    """Yield the gradients of an optimizer's parameters."""
    for parameter, module, label in optimizer_parameters(optimizer, names):
        if (gradient := grad_of(parameter)) is not None:
            yield gradient, Category.GRADIENT, module, f"{label} (gradient)"


def optimizer_storages(optimizer: torch.optim.Optimizer, names: ModuleNames) -> Iterator[Purpose]:
    """Yield every tensor of an optimizer's state, including those in objects, with the parameter's owner.

    State need not be a dict, and its key need not be a parameter.
    """
    owners = {id(parameter): (row, label) for parameter, row, label in optimizer_parameters(optimizer, names)}
    for key, state in optimizer.state.items():
        module, label = owners.get(id(key), OF_NO_PARAMETER)
        for name, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
            for tensor in tensors_in(value):
                if tensor is not key and not isinstance_of(tensor, nn.Parameter):
                    yield tensor, Category.OPTIMIZER_STATE, module, f"{label} ({name})"
    for tensor, (module, label) in state_beside(optimizer, owners):
        yield tensor, Category.OPTIMIZER_STATE, module, label


def state_beside(
    optimizer: torch.optim.Optimizer, owners: Mapping[int, tuple[int, str]]
) -> list[tuple[torch.Tensor, tuple[int, str]]]:
    """Return the tensors that an optimizer keeps outside `state`: in attributes of its own and in its groups.

    Args:
        owners: (module's row, label) of each of its parameters, by id.
    """
    holders: list[tuple[Any, str, object]] = []
    own = object.__getattribute__(optimizer, "__dict__")
    for name, value in tuple(own.items()):
        if name in _KNOWN_ATTRIBUTES or type(value) in WITHOUT_TENSORS:
            continue
        pairs = tuple(value.items()) if type(value) is dict else ((None, value),)
        holders += [(key, name, inner) for key, inner in pairs]
    for group in optimizer.param_groups:
        holders += [(None, str(name), value) for name, value in group.items() if name != "params"]
    owned = []
    for key, name, value in holders:
        if type(value) not in WITHOUT_TENSORS:
            module, label = owners.get(id(key), OF_NO_PARAMETER)
            owned += [
                (tensor, (module, f"{label} ({name})"))
                for tensor in tensors_in(value)
                if id(tensor) not in owners and not isinstance_of(tensor, nn.Parameter)
            ]
    return owned


def held_parameters(optimizer: torch.optim.Optimizer, names: ModuleNames) -> Iterator[Purpose]:
    """Yield the parameters of an optimizer, also those that belong to none of the given models."""
    for parameter, module, label in optimizer_parameters(optimizer, names):
        yield parameter, Category.PARAMETER, module, label


def optimizer_parameters(
    optimizer: torch.optim.Optimizer, names: ModuleNames
) -> Iterator[tuple[torch.Tensor, int, str]]:
    """Yield an optimizer's parameters in its own order, with the owning module's row and the FQN."""
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield parameter, *names.owner_of.get(id(parameter), (-1, f"group {index} parameter {position}"))


def sight(
    tensors: Iterable[Purpose],
    *,
    keep: list[torch.UntypedStorage] | None = None,
    versions: Iterable[int] | None = None,
    ends_call: bool = False,
) -> list[Sighting]:
    """Return a sighting of each storage of the tensors; a storage with two purposes keeps the first.

    Args:
        tensors: (tensor, category, owning module's row, label).
        keep: a list to which the storage objects are appended, in the order of the result.
        versions: see `versions_of`: one number per tensor.
        ends_call: see `Sighting`.
    """
    now, addresses, sightings = time_ns(), set(), []
    numbers = repeat(-1) if versions is None else versions
    for (tensor, category, module, label), version in zip(tensors, numbers, strict=False):
        for storage, device, plain in storages_and_tensors(tensor):
            address = storage_address(storage)
            if address in addresses:
                continue
            addresses.add(address)
            dtype = str(dtype_of(tensor)).removeprefix("torch.")
            fields = (address, storage.nbytes(), category, module, label, dtype, version, ends_call)
            shape = dense(plain)
            sightings.append(Sighting(now, device, *fields, shape and metadata_of(shape)))
            if keep is not None:
                keep.append(storage)
    return sightings


def match_sightings(
    sightings: Sequence[Sighting], devices: Sequence[str], blocks: Allocations, time_ns: Int64
) -> Int64:
    """Return the row of the block that was alive at each sighting's time and address, -1 for none.

    Args:
        sightings: sightings at any time within the window.
        devices: device names; values of `blocks.device` are rows of them.
    """
    if not sightings:
        return np.empty(0, np.int64)
    wanted = np.array([sighting.address for sighting in sightings], np.uint64)
    seen_ns = np.array([sighting.time_ns for sighting in sightings], np.int64)
    row_of = {name: row for row, name in enumerate(devices)}
    device = np.array([row_of.get(sighting.device, -1) for sighting in sightings])
    seen_at = np.searchsorted(time_ns, seen_ns, side="right") - 1
    row = blocks_at(wanted, seen_at, blocks)
    return np.where(np.append(blocks.device, 0)[row] == device, row, -1).astype(np.int64)


def dtype_properties(sightings: Iterable[Sighting]) -> dict[str, str]:
    """Return the bytes of parameters and of optimizer state, as `dtype_bytes.CATEGORY.DEVICE.DTYPE`.

    Args:
        sightings: sightings in time order; an address counts as what was seen there last, and a label as
            the tensors that had it when it was seen last.
    """
    last: dict[object, Sighting] = {}
    for sighting in sightings:
        if sighting.category in (Category.PARAMETER, Category.OPTIMIZER_STATE) and sighting.dtype:
            identity = (sighting.device, sighting.category, sighting.address)
            last.pop(identity, None)
            last[identity] = sighting
    labelled: dict[object, list[Sighting]] = {}
    for sighting in last.values():
        same = labelled.setdefault(
            (sighting.device, sighting.category, sighting.label or sighting.address), []
        )
        if same and same[-1].time_ns != sighting.time_ns:
            same.clear()
        same.append(sighting)
    total: dict[str, int] = {}
    for sighting in chain.from_iterable(labelled.values()):
        key = f"dtype_bytes.{sighting.category.key}.{sighting.device}.{sighting.dtype}"
        total[key] = total.get(key, 0) + sighting.bytes
    return {key: str(size) for key, size in total.items()}


def dtypes_of(
    models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer], names: ModuleNames
) -> dict[str, str]:
    """Return the same properties for the current tensors of models and optimizers."""
    states = (optimizer_storages(optimizer, names) for optimizer in optimizers)
    return dtype_properties(sight(chain(model_storages(models, names), *states)))


See = Callable[[list[Sighting], list[torch.UntypedStorage]], object]
"""Called with sightings of category `INPUT`, and the storage of each, which must not be kept."""


_referent = weakref.ref.__call__


class OuterCalls:
    """Tells which tensors enter outermost module calls, and when the call ends, which of them it wrote to.

    Tensors are held weakly. May be used on several threads. If a profile records stacks, each Python call
    here is an event in the user's own profile, so the counts of all tensors are read in one.

    Args:
        see: is called with the tensors' storages, on the thread of the call.
    """

    def __init__(self, names: ModuleNames, see: See) -> None:
        self._names, self._see = names, see
        self._here = _CallInputs()

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the tensors among the arguments of a call that is within no other."""
        here = self._here
        here.references = []
        if tracing_state() is not None:
            return
        row = self._names.row_of.get(id(module), -1)
        here.label = INPUT_OF + (self._names.modules[row].name if row >= 0 else type(module).__name__)
        tensors = list(tensors_in((args, kwargs)))
        with without_torch_functions():
            here.versions = versions_of(tensors)
            here.references = list(map(weakref.ref, tensors))
            self._report(tensors, here.versions, ends_call=False)

    def left(self) -> None:
        """Note the tensors that the call which ends has written to."""
        here = self._here
        references, here.references = here.references, []
        alive = [
            (tensor, version)
            for tensor, version in zip(map(_referent, references), here.versions, strict=False)
            if tensor is not None
        ]
        with without_torch_functions():
            now = versions_of([tensor for tensor, _ in alive])
            written = [
                (tensor, after)
                for (tensor, before), after in zip(alive, now, strict=True)
                if after > before >= 0
            ]
            if written:
                tensors, versions = zip(*written, strict=True)
                self._report(tensors, versions, ends_call=True)

    def _report(self, tensors: Sequence[torch.Tensor], versions: Sequence[int], *, ends_call: bool) -> None:
        kept: list[torch.UntypedStorage] = []
        label = self._here.label
        purposes = ((tensor, Category.INPUT, -1, label) for tensor in tensors)
        self._see(sight(purposes, keep=kept, versions=versions, ends_call=ends_call), kept)


class _CallInputs(threading.local):
    """What entered the outermost call of this thread: tensors, and how often each had been written to."""

    def __init__(self) -> None:
        self.label = ""
        self.references: list[weakref.ref[torch.Tensor]] = []
        self.versions: list[int] = []
