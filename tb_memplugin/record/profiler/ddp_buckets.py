"""The buckets in which `DistributedDataParallel` reduces gradients. torch tells their sizes only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.storages import storages
from tb_memplugin.record.torch_private.modules import bucket_figures, modules_in, parameters_in
from tb_memplugin.record.torch_private.tensors import grad_of, storage_address


def buckets_alive(models: Mapping[str, nn.Module], names: ModuleNames) -> list[tuple[int, int]]:
    """Return (module row, bytes) of every bucket of the models that is alive and out of Python's reach.

    Where gradients are views of their bucket, Python reaches it by them, unless there are none now.
    """
    buckets = bucket_sizes(models, names, rebuilt_only=True)
    gradients = (
        gradient
        for model in models.values()
        for parameter in parameters_in(model)
        if (gradient := grad_of(parameter)) is not None
    )
    reached = Counter(
        {
            storage_address(storage): storage.nbytes()
            for gradient in gradients
            for storage, _ in storages(gradient)
        }.values()
    )
    alive = []
    for row, size in buckets:
        if reached[size]:
            reached[size] -= 1
        else:
            alive.append((row, size))
    return alive


def bucket_sizes(
    models: Mapping[str, nn.Module], names: ModuleNames, *, rebuilt_only: bool = False
) -> list[tuple[int, int]]:
    """Return (module row, bytes) of every bucket of the models.

    In its second iteration, `DistributedDataParallel` makes its buckets again in another order. Both are
    returned, since NCCL holds the first ones for some time after that; with `rebuilt_only`, the new ones
    where there are any.
    """
    buckets = []
    for model in models.values():
        for _, module in modules_in(model):
            if isinstance(module, DistributedDataParallel):
                logging_data = bucket_figures(module)
                texts = [str(logging_data.get(key, "")) for key in ("bucket_sizes", "rebuilt_bucket_sizes")]
                if rebuilt_only:
                    texts = [text for text in texts if text.strip()][-1:]
                row = names.row_of.get(id(module), -1)
                buckets += [(row, int(size)) for text in texts for size in text.split(",") if size.strip()]
    return buckets
