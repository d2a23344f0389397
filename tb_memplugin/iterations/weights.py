"""Bytes of a model's named weights and their gradients: each storage once, however many names it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tb_memplugin.sources.modules import clean_name
from tb_memplugin.sources.storages import storages


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """One weight of a model.

    Attributes:
        name: its FQN, the first where it has several.
        bytes: of its storage; where several weights are views of one storage, of its own stretch.
        gradient_bytes: of its gradient, 0 where it has none.
        shape: its sizes; empty for a scalar, and for one that has no size yet.
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
    """The bytes of a storage that a tensor lies in: from `start` to before `end`. `storage`: its address."""

    storage: int
    bytes: int
    start: int
    end: int


def named_weights(model: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[str, ...]]]:
    """The parameters of a model by their first name, in the model's order, with their other names."""
    first: dict[int, str] = {}
    found: dict[str, tuple[nn.Parameter, tuple[str, ...]]] = {}
    for fqn, weight in model.named_parameters(remove_duplicate=False):
        name = clean_name(fqn)
        known = first.setdefault(id(weight), name)
        if known != name:
            found[known] = weight, (*found[known][1], name)
        else:
            found[name] = weight, ()
    return found


def weights_of(model: nn.Module, gone: Mapping[str, int]) -> tuple[WeightMemory, ...]:
    """Every weight of a model as it is now.

    Args:
        model: any; weights that have no memory (meta, fake, not yet initialised) have 0 bytes.
        gone: bytes of gradients by weight that were there and are given back; used where none is there.
    """
    weights = named_weights(model)
    sizes = divided({name: stretches(weight) for name, (weight, _) in weights.items()})
    there = {name: weight.grad for name, (weight, _) in weights.items() if _is_made(weight)}
    gradients = {name: stretches(grad) for name, grad in there.items() if grad is not None}
    of_gradients = {**gone, **divided(gradients)}
    return tuple(
        WeightMemory(
            name=name,
            bytes=sizes[name],
            gradient_bytes=of_gradients.get(name, 0),
            shape=tuple(weight.shape) if _is_made(weight) else (),
            dtype=str(weight.dtype).removeprefix("torch.") if _is_made(weight) else "",
            device=str(weight.device),
            aliases=aliases,
        )
        for name, (weight, aliases) in weights.items()
    )


def divided(tensors: Mapping[str, Iterable[Stretch]]) -> dict[str, int]:
    """Bytes by name, which sum to the bytes of the distinct storages.

    A storage is divided by the stretches that its names lie in; what lies in several counts with the
    first, and so does what lies in none.
    """
    found = dict.fromkeys(tensors, 0)
    by_storage: dict[int, list[tuple[str, Stretch]]] = {}
    for name, own in tensors.items():
        for stretch in own:
            by_storage.setdefault(stretch.storage, []).append((name, stretch))
    for parts in by_storage.values():
        left = parts[0][1].bytes
        taken: list[tuple[int, int]] = []
        for name, stretch in parts:
            fresh = _uncovered(stretch, taken)
            found[name] += fresh
            left -= fresh
            taken.append((stretch.start, stretch.end))
        found[parts[0][0]] += left
    return found


def _uncovered(stretch: Stretch, taken: list[tuple[int, int]]) -> int:
    """The bytes of a stretch that lie in none of some others."""
    at, count = stretch.start, 0
    for start, end in sorted(taken):
        if end > at and start < stretch.end:
            count += max(0, start - at)
            at = max(at, end)
    return count + max(0, stretch.end - at)


def stretches(tensor: torch.Tensor) -> Iterator[Stretch]:
    """Where a tensor lies. Of sparse and wrapper tensors: the whole of each storage behind it."""
    if not _is_made(tensor):
        return
    found = [storage for storage, _ in storages(tensor)]
    if len(found) == 1 and _is_plain(tensor):
        size, item = found[0].nbytes(), tensor.element_size()
        start = int(tensor.storage_offset()) * item
        reach = int(
            sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        end = start + (reach + 1) * item if tensor.numel() else start
        yield Stretch(found[0].data_ptr(), size, start, min(end, size))
        return
    for storage in found:
        yield Stretch(storage.data_ptr(), storage.nbytes(), 0, storage.nbytes())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _is_made(tensor: torch.Tensor) -> bool:
    """Whether it has its size: parameters of lazy modules get theirs with the first batch."""
    return not is_lazy(tensor)
