"""Find the storages that models and optimizers hold at each optimizer step, in a few calls into C.

Gradients have new addresses in every step, and parameters may have been replaced. If a profile records
stacks, each Python call here is an event in the user's own profile: a call per tensor would add thousands of
events to every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import itemgetter
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.storages import (
    OF_NO_PARAMETER,
    WITHOUT_TENSORS,
    Sighting,
    model_storages,
    optimizer_parameters,
    optimizer_storages,
    sight,
    state_beside,
)
from tb_memplugin.record.tensor_metadata import metadata_of
from tb_memplugin.record.tensors_inside import tensors_in
from tb_memplugin.record.torch_private.modules import buffers_of, children_of, modules_in, parameters_of
from tb_memplugin.record.torch_private.tensors import bytes_of, grad_of, local_part, storage_addresses
from tb_memplugin.trace import Category

Owner = tuple[int, str]
"""(owning module's row, label)"""

_ONE_STORAGE = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))
_NOBODY: Owner = (-1, "")
_alive = weakref.ref.__call__


@dataclass(frozen=True, slots=True)
class Look:
    """Tensors of one category at one moment, each with one storage, as columns."""

    time_ns: int
    category: Category
    owners: list[Owner]
    devices: list[torch.device]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    addresses: list[int]
    sizes: list[int]
    shared: list[bool]

    @classmethod
    def at(
        cls,
        tensors: list[torch.Tensor],
        behind: list[torch.UntypedStorage],
        addresses: list[int],
        owners: list[Owner],
        category: Category,
    ) -> Look:
        """Read the tensors, and the storages `behind` them, now."""
        return cls(
            time_ns(),
            category,
            owners,
            [tensor.device for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            list(map(torch.Tensor.size, tensors)),
            list(map(torch.Tensor.stride, tensors)),
            addresses,
            list(map(torch.UntypedStorage.nbytes, behind)),
            list(map(torch.UntypedStorage.is_shared, behind)),
        )

    def __iter__(self) -> Iterator[Sighting]:
        """Yield a sighting for each tensor whose storage has memory."""
        tensors = zip(self.dtypes, self.shapes, self.strides, strict=True)
        columns = (self.owners, self.devices, tensors, self.addresses, self.sizes, self.shared)
        for (module, label), device, tensor, address, size, shared in zip(*columns, strict=True):
            if not address:
                continue
            name = str(device) if device.type != "cpu" else "shared" if shared else "cpu"
            metadata = metadata_of(tensor)
            ownership = (self.category, module, label, metadata.dtype)
            yield Sighting(self.time_ns, name, address, size, *ownership, tensor=metadata)


Sightings = Look | list[Sighting]


@dataclass(slots=True)
class Group:
    """Tensors of one category that are looked at repeatedly; unchanged ones are not reported again.

    Their storages are held weakly, not they: `torch.utils.swap_tensors` refuses tensors with weak references.
    """

    category: Category
    _ids: list[int] = field(default_factory=list)
    _refs: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    _addresses: list[int] | None = None

    def look(self, tensors: Sequence[torch.Tensor | None], owners: Sequence[Owner]) -> list[Sightings]:
        """Return sightings of the tensors if any changed since the last look. None is an absent tensor.

        To save events in the user's profile, the code makes no Python call per tensor (see the module).
        """
        pairs = [(tensor, owner) for tensor, owner in zip(tensors, owners, strict=True) if tensor is not None]
        plain = [
            (tensor, owner)
            for tensor, owner in pairs
            if type(tensor) in _ONE_STORAGE and tensor.layout is torch.strided and not tensor.is_nested
        ]
        strided = [tensor for tensor, _ in plain]
        try:
            behind = list(map(torch.Tensor.untyped_storage, strided))
            addresses = storage_addresses(behind)
        except (RuntimeError, NotImplementedError):  # one has no memory of its own (functorch, meta)
            return [self._one_by_one(pairs)]
        sightings: list[Sightings] = []
        if self._changed(strided, behind, addresses):
            owned_by = [owner for _, owner in plain]
            sightings.append(Look.at(strided, behind, addresses, owned_by, self.category))
        if len(plain) < len(pairs):
            plain_ids = set(map(id, strided))
            sightings.append(self._one_by_one([pair for pair in pairs if id(pair[0]) not in plain_ids]))
        return sightings

    def _changed(
        self, tensors: list[torch.Tensor], behind: list[torch.UntypedStorage], addresses: list[int]
    ) -> bool:
        """Whether any tensor is another object, or has another storage or address, than at the last look.

        Weak references of storages are compared, not ids: an object always has the same weak reference, and a
        later object at the same address has another one.
        """
        ids, refs = list(map(id, tensors)), list(map(weakref.ref, behind))
        same = self._addresses == addresses and self._ids == ids
        same = same and list(map(id, self._refs)) == list(map(id, refs))
        self._ids, self._refs, self._addresses = ids, refs, addresses
        return not same

    def _one_by_one(self, pairs: Iterable[tuple[torch.Tensor, Owner]]) -> list[Sighting]:
        """Return sightings of tensors that may have several storages, or none."""
        return sight((tensor, self.category, *owner) for tensor, owner in pairs)


class HeldByModels:
    """Parameters, buffers and gradients of models, including modules that are added or removed meanwhile.

    Args:
        models: name -> module; held weakly, as are their modules and tensors.
    """

    def __init__(self, models: Mapping[str, nn.Module], names: ModuleNames) -> None:
        self._models = [weakref.ref(model) for model in models.values()]
        self._names = names
        self._modules: list[weakref.ref[nn.Module]] = []
        self._below: list[int] = []
        self._named: tuple[list[int], list[str], list[int]] = [], [], []
        self._groups = [
            Group(category) for category in (Category.PARAMETER, Category.BUFFER, Category.GRADIENT)
        ]

    def look(self) -> list[Sightings]:
        """Return sightings of the groups that changed since the last look, and name what is new."""
        try:
            return self._new()
        except (AttributeError, TypeError):  # a scripted module keeps its parameters elsewhere
            alive = {
                str(row): model for row, model in enumerate(map(_alive, self._models)) if model is not None
            }
            return [sight(model_storages(alive, self._names))]

    def _new(self) -> list[Sightings]:
        modules = self._now()
        parameters = _values(map(parameters_of, modules))
        tensors = (parameters, _values(map(buffers_of, modules)), _gradients(parameters))
        self._name(modules, [tensor for tensor in chain(*tensors[:2]) if tensor is not None])
        owners = [self._owners(parameters), self._owners(tensors[1])]
        sightings = map(Group.look, self._groups, tensors, (*owners, _of_gradients(owners[0])))
        return list(chain.from_iterable(sightings))

    def _now(self) -> list[nn.Module]:
        """Return the modules of the models; search them again only if one was added, removed or replaced."""
        modules = list(map(_alive, self._modules))
        alive = [module for module in modules if module is not None]
        below = list(map(id, _values(map(children_of, alive))))
        if alive and len(alive) == len(modules) and below == self._below:
            return alive
        models = [model for model in map(_alive, self._models) if model is not None]
        by_id = {id(module): module for model in models for _, module in modules_in(model)}
        current = list(by_id.values())
        self._modules = list(map(weakref.ref, current))
        self._below = list(map(id, _values(map(children_of, current))))
        return current

    def _name(self, modules: list[nn.Module], tensors: list[torch.Tensor]) -> None:
        """Name the tensors if any is another object than before. `Module.to_empty` replaces them unheard.

        One that has the module, the key and the `id` of one that has died has its name, too.
        """
        keys = [
            *chain.from_iterable(map(parameters_of, modules)),
            *chain.from_iterable(map(buffers_of, modules)),
        ]
        named = list(map(id, modules)), keys, list(map(id, tensors))
        if self._named != named:
            self._named = named
            self._names.rename(modules)

    def _owners(self, tensors: list[torch.Tensor | None]) -> list[Owner]:
        owners = map(self._names.owner_of.get, map(id, tensors))
        return [owner or _NOBODY for owner in owners]


class HeldByOptimizer:
    """The gradients and the state of one optimizer."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._parameters: list[int] = []
        self._version = -1
        self._rows: list[int] = []
        self._owner_of: dict[int, Owner] = {}
        self._gradient_owners: list[Owner] = []
        self._gradients, self._state = Group(Category.GRADIENT), Group(Category.OPTIMIZER_STATE)
        self._wrappers: list[weakref.ref[torch.Tensor]] = []

    def look(self, optimizer: torch.optim.Optimizer) -> list[Sightings]:
        """Return sightings of the gradients if they changed since the last look."""
        return self._gradients.look(_gradients(self._know(optimizer)), self._gradient_owners)

    def stepped(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
        """Return (module row, bytes) of the parameters that have a gradient, in the optimizer's order."""
        parameters = self._know(optimizer)
        # Read anew: lazy parameters get their size late. Of a DTensor, only its local part is here.
        local = [
            parameter if type(parameter) in _ONE_STORAGE else local_part(parameter)
            for parameter in parameters
        ]
        sizes = zip(self._rows, map(bytes_of, local), strict=True)
        return list(compress(sizes, [gradient is not None for gradient in _gradients(parameters)]))

    def look_at_state(self, optimizer: torch.optim.Optimizer) -> list[Sightings]:
        """Return sightings of the optimizer's state if it changed since the last look.

        Tensors of subclasses (DTensor) are looked into only if one of them is another object than before.
        """
        self._know(optimizer)
        try:
            values = self._state_of(optimizer)
        except (AttributeError, TypeError):  # state that is kept in another way
            return [sight(optimizer_storages(optimizer, self._names))]
        kinds = set(map(type, [value for value, _ in values])) - _ONE_STORAGE
        wrapping = {kind for kind in kinds if issubclass(kind, torch.Tensor)}
        nested = kinds - wrapping - WITHOUT_TENSORS
        plain = [(value, owner) for value, owner in values if type(value) in _ONE_STORAGE]
        if nested:
            plain += [
                (each, owner)
                for value, owner in values
                if type(value) in nested
                for each in tensors_in(value)
                if id(each) not in self._owner_of and type(each) is not nn.Parameter
            ]
        beside = state_beside(optimizer, self._owner_of)
        plain += [(tensor, owner) for tensor, owner in beside if type(tensor) in _ONE_STORAGE]
        sightings = self._state.look([tensor for tensor, _ in plain], [owner for _, owner in plain])
        return sightings + self._new_wrappers([pair for pair in values if type(pair[0]) in wrapping])

    def _new_wrappers(self, pairs: list[tuple[Any, Owner]]) -> list[Sightings]:
        refs = list(map(weakref.ref, [tensor for tensor, _ in pairs]))
        same = list(map(id, self._wrappers)) == list(map(id, refs))
        self._wrappers = refs
        return [] if same else [sight((tensor, Category.OPTIMIZER_STATE, *owner) for tensor, owner in pairs)]

    def _know(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the optimizer's parameters, and update their owners if they changed."""
        parameters = list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))
        identities = list(map(id, parameters))
        if identities != self._parameters or self._version != self._names.version:
            owners = [(row, label) for _, row, label in optimizer_parameters(optimizer, self._names)]
            self._parameters, self._version = identities, self._names.version
            self._rows, self._gradient_owners = [row for row, _ in owners], _of_gradients(owners)
            self._owner_of = dict(zip(identities, owners, strict=True))
        return parameters

    def _state_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[Any, Owner]]:
        """Return the values in the optimizer's state, tensors or not, with their owners."""
        owners = map(self._owner_of.get, map(id, optimizer.state), repeat(OF_NO_PARAMETER))
        states = map(dict.items, optimizer.state.values())
        return [
            (value, (owner[0], f"{owner[1]} ({name})"))
            for parameter, owner, state in zip(optimizer.state, owners, states, strict=True)
            for name, value in state
            if value is not parameter
        ]


def _values(dicts: Iterable[dict[str, Any]]) -> list[torch.Tensor | None]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _gradients(parameters: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if parameter is None else grad_of(parameter) for parameter in parameters]


def _of_gradients(owners: Iterable[Owner]) -> list[Owner]:
    return [(module, f"{label} (gradient)") for module, label in owners]


def unique_sightings(sightings: Iterable[Sightings]) -> Iterator[Sighting]:
    """Yield the sightings of one moment, each storage once, under the first category it was seen with."""
    keys: set[tuple[str, int]] = set()
    for sighting in chain.from_iterable(sightings):
        key = (sighting.device, sighting.address)
        if key not in keys:
            keys.add(key)
            yield sighting
