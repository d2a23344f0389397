"""Choose the corrections for a target, and the table of kernels of its device.

A second row of the table for one operator and device is an error at import.
"""

from __future__ import annotations

from typing import Any

from tb_memplugin.estimate.kernels import (
    attention,
    copies,
    indexing,
    linear_algebra,
    losses,
    normalizations,
    recurrent,
    reductions,
    results,
    sorting,
)
from tb_memplugin.estimate.kernels.attention import Attention, AttentionMasks
from tb_memplugin.estimate.kernels.convolutions import Convolutions
from tb_memplugin.estimate.kernels.derivatives import (
    BiasInPlace,
    LossDerivatives,
    MasksInPlace,
    ProductDerivatives,
)
from tb_memplugin.estimate.kernels.losses import CtcLoss
from tb_memplugin.estimate.kernels.recurrent import Recurrent
from tb_memplugin.estimate.kernels.results import FusedKernels, OneHot
from tb_memplugin.estimate.kernels.sparse import SparseTensors
from tb_memplugin.estimate.kernels.table import Kernel, Table
from tb_memplugin.estimate.kernels.uncounted import CpuKernels, Unknown
from tb_memplugin.estimate.kernels.workspaces import Workspaces
from tb_memplugin.estimate.program.assumed_counts import AssumedCounts
from tb_memplugin.estimate.program.communication import Communication
from tb_memplugin.estimate.program.compiled import Compiled, Scripted
from tb_memplugin.estimate.program.constants import Constants
from tb_memplugin.estimate.program.data_loading import DataLoading
from tb_memplugin.estimate.program.data_parallel import DataParallel
from tb_memplugin.estimate.program.module_moves import LazyModules, ModuleMoves
from tb_memplugin.estimate.program.optimizers import ForeachByDefault, FusedOptimizers, LossScaling
from tb_memplugin.estimate.program.packed_sequences import PackedSequences
from tb_memplugin.estimate.program.printing import Printing
from tb_memplugin.estimate.program.random_numbers import Initialisers, RandomStates
from tb_memplugin.estimate.program.refusals import Refusals, SameDtypes
from tb_memplugin.estimate.program.saved_files import LoadedFiles, SavedFiles
from tb_memplugin.estimate.program.sizes import Sizes
from tb_memplugin.estimate.program.storage_resizing import StorageResizing
from tb_memplugin.estimate.program.values import Asking, Selections, Values
from tb_memplugin.estimate.run.correction import Correction, Corrections, Libraries, Target
from tb_memplugin.estimate.run.cuda_shim import Devices

_FILES = (
    *(attention, copies, indexing, linear_algebra, losses),
    *(normalizations, recurrent, reductions, results, sorting),
)

ROWS: tuple[Kernel, ...] = tuple(row for file in _FILES for row in file.KERNELS)

TABLES = {device_type: Table(ROWS, device_type) for device_type in ("cuda", "cpu")}


ASKING: tuple[type[Asking], ...] = (Values, Sizes, Printing)
"""Corrections that use the user's hints."""

ON_CUDA: tuple[type[Correction], ...] = (Attention, Convolutions, Recurrent, Unknown, Workspaces)
"""Corrections on a GPU, besides the table of kernels."""

ON_CPU: tuple[type[Correction], ...] = (CpuKernels,)
"""Corrections on the CPU, besides the table of kernels."""

EVERYWHERE: tuple[type[Correction], ...] = (
    Constants,
    RandomStates,
    AssumedCounts,
    Selections,
    PackedSequences,
    Initialisers,
    ModuleMoves,
    LazyModules,
    AttentionMasks,
    LossScaling,
    ForeachByDefault,
    FusedOptimizers,
    Compiled,
    Scripted,
    DataLoading,
    LoadedFiles,
    SavedFiles,
    FusedKernels,
    SameDtypes,
    ProductDerivatives,
    LossDerivatives,
    MasksInPlace,
    OneHot,
    CtcLoss,
    BiasInPlace,
    SparseTensors,
    StorageResizing,
    Communication,
    DataParallel,
    Libraries,
)


def chosen(target: Target, hints: Any, *, none: bool = False) -> Corrections:
    """Return every correction that a target needs; with `none` only the one that makes its device known."""
    if none:
        return Corrections([Devices(target)], engine_adds_in_place=False)
    kinds = (*EVERYWHERE, *(ON_CUDA if target.device_type == "cuda" else ON_CPU))
    asking = [kind(target, hints) for kind in ASKING]
    parts = [Devices(target), *asking, *(kind(target) for kind in kinds), Refusals(target)]
    return Corrections(parts, TABLES[target.device_type], gpu=target.gpu, engine_adds_in_place=True)
