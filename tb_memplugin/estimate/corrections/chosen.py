"""Choose the corrections for a target."""

from __future__ import annotations

from typing import Any

from tb_memplugin.estimate.corrections.attention import Attention
from tb_memplugin.estimate.corrections.attention_masks import AttentionMasks
from tb_memplugin.estimate.corrections.communication import Communication
from tb_memplugin.estimate.corrections.compiled import Compiled
from tb_memplugin.estimate.corrections.composed_kernels import ComposedKernels
from tb_memplugin.estimate.corrections.constants import Constants
from tb_memplugin.estimate.corrections.convolutions import Convolutions
from tb_memplugin.estimate.corrections.correction import Correction, Corrections, Target
from tb_memplugin.estimate.corrections.data_loading import DataLoading
from tb_memplugin.estimate.corrections.data_parallel import DataParallel
from tb_memplugin.estimate.corrections.devices import Devices
from tb_memplugin.estimate.corrections.fused_kernels import FusedKernels
from tb_memplugin.estimate.corrections.grouped_products import GroupedProducts
from tb_memplugin.estimate.corrections.image_copies import ImageCopies
from tb_memplugin.estimate.corrections.initialisers import Initialisers
from tb_memplugin.estimate.corrections.kernel_buffers import (
    ContiguousCopies,
    KernelBuffers,
    OtherTypes,
    SafeSoftmax,
)
from tb_memplugin.estimate.corrections.libraries import Libraries
from tb_memplugin.estimate.corrections.linear import BiasInPlace
from tb_memplugin.estimate.corrections.loaded_files import LoadedFiles
from tb_memplugin.estimate.corrections.loss_derivatives import LossDerivatives
from tb_memplugin.estimate.corrections.loss_scaling import LossScaling
from tb_memplugin.estimate.corrections.masks_in_place import MasksInPlace
from tb_memplugin.estimate.corrections.matrix_copies import MatrixCopies
from tb_memplugin.estimate.corrections.module_moves import ModuleMoves
from tb_memplugin.estimate.corrections.normalizations import Normalizations
from tb_memplugin.estimate.corrections.one_hot import OneHot
from tb_memplugin.estimate.corrections.optimizers import ForeachByDefault, FusedOptimizers
from tb_memplugin.estimate.corrections.packed_sequences import PackedSequences
from tb_memplugin.estimate.corrections.printing import Printing
from tb_memplugin.estimate.corrections.product_derivatives import ProductDerivatives
from tb_memplugin.estimate.corrections.promotions import Promotions
from tb_memplugin.estimate.corrections.random_states import RandomStates
from tb_memplugin.estimate.corrections.recurrent import Recurrent
from tb_memplugin.estimate.corrections.reductions import Reductions
from tb_memplugin.estimate.corrections.refusals import Refusals
from tb_memplugin.estimate.corrections.resized_results import ResizedResults
from tb_memplugin.estimate.corrections.result_strides import ResultStrides
from tb_memplugin.estimate.corrections.same_dtypes import SameDtypes
from tb_memplugin.estimate.corrections.scripted import Scripted
from tb_memplugin.estimate.corrections.sizes import Sizes
from tb_memplugin.estimate.corrections.sorting import Sorting
from tb_memplugin.estimate.corrections.storage_resizing import StorageResizing
from tb_memplugin.estimate.corrections.unknown import CpuKernels, Unknown
from tb_memplugin.estimate.corrections.values import Asking, Values
from tb_memplugin.estimate.corrections.workspaces import Workspaces

ASKING: tuple[type[Asking], ...] = (Values, Sizes, Printing)
"""Corrections that use the user's hints."""

ON_CUDA: tuple[type[Correction], ...] = (
    Attention,
    Convolutions,
    ImageCopies,
    KernelBuffers,
    Normalizations,
    Recurrent,
    Reductions,
    ResultStrides,
    Sorting,
    Unknown,
    Workspaces,
)
"""Corrections for CUDA kernels."""

ON_CPU: tuple[type[Correction], ...] = (CpuKernels, MatrixCopies, Promotions, RandomStates)
"""Corrections for CPU kernels."""

EVERYWHERE: tuple[type[Correction], ...] = (
    Constants,
    PackedSequences,
    Initialisers,
    ModuleMoves,
    AttentionMasks,
    LossScaling,
    ForeachByDefault,
    FusedOptimizers,
    Compiled,
    Scripted,
    DataLoading,
    LoadedFiles,
    SafeSoftmax,
    FusedKernels,
    GroupedProducts,
    ContiguousCopies,
    ComposedKernels,
    ResizedResults,
    SameDtypes,
    ProductDerivatives,
    LossDerivatives,
    MasksInPlace,
    OneHot,
    OtherTypes,
    BiasInPlace,
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
    return Corrections(parts, engine_adds_in_place=True)
