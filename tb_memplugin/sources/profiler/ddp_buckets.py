"""The buckets in which `DistributedDataParallel` reduces gradients. torch tells their sizes only."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tb_memplugin.sources.modules import ModuleNames


def bucket_sizes(models: Mapping[str, nn.Module], names: ModuleNames) -> list[tuple[int, int]]:
    """Return (module row, bytes) of every bucket of the models.

    In its second iteration, `DistributedDataParallel` makes its buckets again in another order. Both are
    returned, since NCCL holds the first ones for some time after that.
    """
    found = []
    for model in models.values():
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                told = module._get_ddp_logging_data()
                texts = [str(told.get(key, "")) for key in ("bucket_sizes", "rebuilt_bucket_sizes")]
                row = names.row_of.get(id(module), -1)
                found += [(row, int(size)) for text in texts for size in text.split(",") if size.strip()]
    return found
