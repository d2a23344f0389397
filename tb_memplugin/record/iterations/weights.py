"""Bytes of a model's weights and their gradients by name; a storage with several names counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tb_memplugin.record.modules import clean_name
from tb_memplugin.record.storages import storages
from tb_memplugin.record.torch_private.tensors import storage_address


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
    for fqn, weight in model.named_parameters(remove_duplicate=False):
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
    there = {name: weight.grad for name, (weight, _) in weights.items() if _is_materialized(weight)}
    gradients = {name: stretches(grad) for name, grad in there.items() if grad is not None}
    of_gradients = {**freed, **divided(gradients)}
    return tuple(
        WeightMemory(
            name=name,
            bytes=sizes[name],
            gradient_bytes=of_gradients.get(name, 0),
            shape=tuple(weight.shape) if _is_materialized(weight) else (),
            dtype=str(weight.dtype).removeprefix("torch.") if _is_materialized(weight) else "",
            device=str(weight.device),
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
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _is_materialized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape; parameters of lazy modules get theirs with the first batch."""
    return not is_lazy(tensor)
