"""Bytes of a model's weights and their gradients by name; a storage with several names counts once.

A gradient may be gone when the iteration ends, so it must be seen while it is there, without a hook on any
weight. While an iteration is watched, a dispatch mode sees every operator, with the autograd node that runs
it. That of a weight is `AccumulateGrad` (torch: csrc/autograd/functions/accumulate_grad.cpp): its operators
make the gradient, or add to it, and the node keeps it in `weight.grad` before the thread runs another
operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tb_memplugin.record.guard import UNOWNED, Guard
from tb_memplugin.record.modules import clean_name
from tb_memplugin.record.storage_lifetimes import Block, Buffer
from tb_memplugin.record.storages import Sighting, storages
from tb_memplugin.record.storages_alive import is_leaf
from tb_memplugin.record.tensors_inside import isinstance_of
from tb_memplugin.record.torch_private.modules import items_of, modules_in, parameters_of
from tb_memplugin.record.torch_private.tensors import (
    device_of,
    dtype_of,
    grad_of,
    layout_of,
    needs_grad,
    shape_of,
    storage_address,
)
from tb_memplugin.record.tracer.recording import StorageRecording
from tb_memplugin.trace import Category, Phase


class IterationRecording(StorageRecording):
    """A `StorageRecording` that is told of gradients as soon as backward creates them, and of inputs."""

    names_others = False  # the figures are of one model

    def _add_unseen(self) -> None:
        """Do not search: the start state of the next reported iteration counts it."""

    def name_gradient(self, weight: torch.Tensor, name: str) -> None:
        """Name the storage of a weight's gradient."""
        if self.layers.on and grad_of(weight) is not None:
            row = self.layers.names.owner_of.get(id(weight), (-1, ""))[0]
            self._name([(grad_of(weight), Category.GRADIENT, row, _label(name))])

    def blocks_of(self, tensor: torch.Tensor) -> list[Block | Buffer]:
        """Return the blocks of a tensor's storages."""
        ledger = self.recorded.ledger
        with ledger.lock:
            return list(ledger.blocks_of(self._mine([tensor]), late=True))

    def name_freed_gradient(self, weight_id: int, name: str, blocks: Sequence[Block | Buffer]) -> None:
        """Name the blocks that were the gradient of a weight with this `id`, which may have been freed."""
        row = self.layers.names.owner_of.get(weight_id, (-1, ""))[0]
        for block in blocks:
            if block.category is Category.UNKNOWN:
                block.category, block.label = Category.GRADIENT, _label(name)
                block.module = row if row >= 0 else block.module

    def _saw_inputs(self, sightings: list[Sighting], storages_seen: list[torch.UntypedStorage]) -> None:
        """See `StorageRecording`. What no operator of a watched thread made, counts from here on."""
        with self.recorded.ledger.lock:
            for block in self.recorded.ledger.blocks_of(filter(self._is_mine, storages_seen), late=True):
                if block.category is Category.UNKNOWN and block.phase in (Phase.BEFORE, Phase.OTHER):
                    block.category = Category.INPUT
        super()._saw_inputs(sightings, storages_seen)


def _label(name: str) -> str:
    return f"{name} (gradient)"


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """One weight of a model.

    Attributes:
        name: its FQN; the first one if it has several.
        bytes: bytes of its storage; if several weights are views of one storage, those of its own part.
        gradient_bytes: bytes of its gradient, 0 without one.
        shape: its shape; empty for a scalar, and for a lazy parameter that has no shape yet.
        dtype: as torch spells it, without `torch.`.
        device: as torch spells it.
        aliases: its other names (tied weights).
    """

    name: str
    bytes: int
    gradient_bytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a storage in which a tensor lies, from byte `start` to before `end`.

    `storage` is the storage's address, `bytes` its size.
    """

    storage: int
    bytes: int
    start: int
    end: int


def named_weights(model: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[str, ...]]]:
    """Return the parameters of a model by their first name, in the model's order, with their other names."""
    first: dict[int, str] = {}
    weights: dict[str, tuple[nn.Parameter, tuple[str, ...]]] = {}
    named = (
        (f"{fqn}.{key}" if fqn else key, weight)
        for fqn, module in modules_in(model, every_name=True)
        for key, weight in items_of(parameters_of(module))
        if weight is not None
    )
    for fqn, weight in named:
        name = clean_name(fqn)
        first_name = first.setdefault(id(weight), name)
        if first_name != name:
            weights[first_name] = weight, (*weights[first_name][1], name)
        else:
            weights[name] = weight, ()
    return weights


def weights_of(model: nn.Module, freed: Mapping[str, int]) -> tuple[WeightMemory, ...]:
    """Return every weight of a model in its current state.

    Args:
        model: any; weights without memory (meta, fake, not yet initialised) have 0 bytes.
        freed: bytes of gradients that existed but were freed, by weight; used for weights without a gradient.
    """
    weights = named_weights(model)
    sizes = divided({name: stretches(weight) for name, (weight, _) in weights.items()})
    there = {name: grad_of(weight) for name, (weight, _) in weights.items() if _is_materialized(weight)}
    gradients = {name: stretches(grad) for name, grad in there.items() if grad is not None}
    of_gradients = {**freed, **divided(gradients)}
    return tuple(
        WeightMemory(
            name=name,
            bytes=sizes[name],
            gradient_bytes=of_gradients.get(name, 0),
            shape=tuple(shape_of(weight)) if _is_materialized(weight) else (),
            dtype=str(dtype_of(weight)).removeprefix("torch.") if _is_materialized(weight) else "",
            device=str(device_of(weight)),
            aliases=aliases,
        )
        for name, (weight, aliases) in weights.items()
    )


def divided(tensors: Mapping[str, Iterable[Stretch]]) -> dict[str, int]:
    """Return bytes by name, which sum to the bytes of the distinct storages.

    Each name gets the bytes of its stretch. Bytes that lie in several stretches, or in none, count to the
    first name.
    """
    sizes = dict.fromkeys(tensors, 0)
    by_storage: dict[int, list[tuple[str, Stretch]]] = {}
    for name, own in tensors.items():
        for stretch in own:
            by_storage.setdefault(stretch.storage, []).append((name, stretch))
    for parts in by_storage.values():
        left = parts[0][1].bytes
        covered: list[tuple[int, int]] = []
        for name, stretch in parts:
            fresh = _uncovered(stretch, covered)
            sizes[name] += fresh
            left -= fresh
            covered.append((stretch.start, stretch.end))
        sizes[parts[0][0]] += left
    return sizes


def _uncovered(stretch: Stretch, covered: list[tuple[int, int]]) -> int:
    """Return how many bytes of a stretch lie in none of the covered ones."""
    at, count = stretch.start, 0
    for start, end in sorted(covered):
        if end > at and start < stretch.end:
            count += max(0, start - at)
            at = max(at, end)
    return count + max(0, stretch.end - at)


def stretches(tensor: torch.Tensor) -> Iterator[Stretch]:
    """Yield the stretch of a tensor; for sparse and wrapper tensors, the whole of each storage."""
    if not _is_materialized(tensor):
        return
    backing = [storage for storage, _ in storages(tensor)]
    if len(backing) == 1 and _is_plain(tensor):
        size, item = backing[0].nbytes(), tensor.element_size()
        start = int(tensor.storage_offset()) * item
        reach = int(
            sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        end = start + (reach + 1) * item if tensor.numel() else start
        yield Stretch(storage_address(backing[0]), size, start, min(end, size))
        return
    for storage in backing:
        yield Stretch(storage_address(storage), storage.nbytes(), 0, storage.nbytes())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and layout_of(tensor) is torch.strided


def _is_materialized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape; parameters of lazy modules get theirs with the first batch."""
    return not is_lazy(tensor)


@dataclass(slots=True)
class _Pending:
    """A weight whose node ran the last operator of a thread. No tensor is held: that would delay its free.

    `result` is the last result that may have become its gradient: (bytes, its blocks).
    """

    weight_id: int
    name: str
    result: tuple[int, list[Block | Buffer]] | None = None
    is_named: bool = False


def _gone() -> None:
    """Stand for the weak reference of a module that is gone."""


class NewGradients:
    """Names the gradients of weights in a recording, as soon as they are there, and keeps their sizes.

    Modules are held weakly, not weights: `torch.utils.swap_tensors` refuses tensors with weak references.

    Args:
        model: the module that has the weights; those that are no leaves, or need no gradient, are left out.

    Attributes:
        bytes: the bytes of the last gradient of each weight that backward made, by name.
    """

    def __init__(self, model: nn.Module, recording: IterationRecording, guard: Guard = UNOWNED) -> None:
        self.bytes: dict[str, int] = {}
        self._recording, self._guard = recording, guard
        names = {id(weight): name for name, (weight, _) in named_weights(model).items()}
        self._names = {
            id(weight): (weakref.ref(module), key, names[id(weight)])
            for _, module in modules_in(model)
            for key, weight in items_of(parameters_of(module))
            if weight is not None and needs_grad(weight) and is_leaf(weight)
        }
        self._pending: dict[int, _Pending] = {}

    def ran(self, node: Any, out: Any) -> None:
        """Hear of an operator that this thread ran in an autograd node, None outside of backward."""
        self._safely(lambda: self._look(node, out))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients of an optimizer's weights: another thread may have made them, unseen."""
        self._safely(lambda: self._look_at(optimizer))

    def settle(self) -> None:
        """Name the gradients after which no operator ran."""
        for thread in list(self._pending):
            self._settle(thread)

    def forget(self) -> None:
        """Drop all that was found, and hear of no more operators."""
        self._recording.layers.results = None
        self._pending.clear()
        self._names.clear()

    def _safely(self, look: Callable[[], None]) -> None:
        try:
            look()
        except BaseException as error:
            self._guard.end("a gradient", error)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        for weight in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            name = self._name_of(weight)
            if name is not None and name not in self.bytes and grad_of(weight) is not None:
                self._name_gradient(name, weight, grad_of(weight))

    def _weight(self, weight_id: int) -> nn.Parameter | None:
        """Return a weight that had this `id` at first, None if its module no longer has it."""
        module, key, _ = self._names.get(weight_id, (_gone, "", ""))
        owner = module()
        weight = None if owner is None else dict(items_of(parameters_of(owner))).get(key)
        return weight if isinstance(weight, nn.Parameter) and id(weight) == weight_id else None

    def _name_of(self, weight: object) -> str | None:
        return self._names[id(weight)][2] if self._weight(id(weight)) is weight else None

    def _look(self, node: Any, out: Any) -> None:
        thread = get_ident()
        weight: Any = getattr(node, "variable", None)
        pending = self._pending.get(thread)
        if pending is not None and (weight is None or self._weight(pending.weight_id) is not weight):
            self._settle(thread)
            pending = None
        name = None if weight is None else self._name_of(weight)
        if name is None:
            return
        if pending is None:
            pending = self._pending[thread] = _Pending(id(weight), name)
        # With create_graph the node adds out of place: what it makes is not the gradient that is there.
        out_of_place = torch.is_grad_enabled()
        is_there = grad_of(weight) is not None
        if out_of_place or not (is_there or pending.is_named):
            is_result = isinstance_of(out, torch.Tensor) and shape_of(out) == shape_of(weight)
            pending.result = (size_of(out), self._recording.blocks_of(out)) if is_result else pending.result
        elif is_there:
            pending.result = None
        if is_there:
            pending.is_named = True
            self._name_gradient(name, weight, grad_of(weight))

    def _settle(self, thread: int) -> None:
        pending = self._pending.pop(thread)
        weight = self._weight(pending.weight_id)
        if weight is not None and grad_of(weight) is not None:
            self._name_gradient(pending.name, weight, grad_of(weight))
        elif pending.result is not None:
            self.bytes[pending.name], blocks = pending.result
            self._recording.name_freed_gradient(pending.weight_id, pending.name, blocks)

    def _name_gradient(self, name: str, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        self.bytes[name] = size_of(gradient)
        self._recording.name_gradient(weight, name)


def size_of(gradient: torch.Tensor) -> int:
    """Return the bytes of a gradient: of its storages, or of its own stretch if it lies in a larger one."""
    own = list(stretches(gradient))
    if len(own) == 1 and own[0].end - own[0].start < own[0].bytes:
        return own[0].end - own[0].start  # in a bucket, for example
    return divided({"": own})[""]
