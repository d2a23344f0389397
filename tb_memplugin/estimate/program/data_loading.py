"""Let data loaders and other processes give real data: shuffling and datasets need values."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing import reductions
from torch.utils import data
from torch.utils.data import DataLoader, dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_REBUILDING = ("rebuild_tensor", "rebuild_storage_fd", "rebuild_storage_filename", "rebuild_typed_storage")
"""Functions that make a tensor of what another process sent."""


class DataLoading(Correction):
    """Makes batches real CPU tensors. They become fake in the first operator that takes them."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Leave fake mode while a loader starts or fetches, and while data are split or received."""
        for module in (data, dataset):
            patches.set(module, "random_split", _real(dataset.random_split))
        for name in _REBUILDING:
            patches.set(reductions, name, _real(getattr(reductions, name)))
        patches.set(DataLoader, "_get_iterator", _real(DataLoader._get_iterator))
        patches.set(_BaseDataLoaderIter, "__next__", _real(_BaseDataLoaderIter.__next__))


def _real(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)  # functions that rebuild tensors are pickled by their names
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args, **kwargs)

    return run
