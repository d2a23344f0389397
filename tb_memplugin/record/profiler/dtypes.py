"""Bytes of parameters and optimizer state by dtype, as properties `dtype_bytes.CATEGORY.DEVICE.DTYPE`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from tb_memplugin.record.storages import model_storages, optimizer_storages, sight
from tb_memplugin.trace import Category

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tb_memplugin.record.modules import ModuleNames
    from tb_memplugin.record.storages import Sighting

_CATEGORIES = (Category.PARAMETER, Category.OPTIMIZER_STATE)


def dtype_properties(sightings: Iterable[Sighting]) -> dict[str, str]:
    """Return the bytes of parameters and of optimizer state by device and dtype, as properties.

    Args:
        sightings: sightings in time order; an address counts as what was seen there last, and a label as
            the tensors that had it when it was seen last.
    """
    last: dict[object, Sighting] = {}
    for sighting in sightings:
        if sighting.category in _CATEGORIES and sighting.dtype:
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
