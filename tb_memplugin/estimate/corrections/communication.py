"""Collectives: which memory is theirs, and that waiting for one takes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_ledger import Place
from tb_memplugin.estimate.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.trace import Category


class Communication(Correction):
    """Functional collectives and the buffers of FSDP2."""

    def rules(self) -> dict[Any, Rule]:
        """Waiting gives the tensor back that it waited for; its fake rule makes a new one."""
        if not dist.is_available():
            return {}
        return {torch.ops._c10d_functional.wait_tensor.default: _the_same}

    def after(self) -> dict[Any, After]:
        """What FSDP2 gathers, and what it reduces from, is communication."""
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        import torch.distributed.fsdp  # defines its operators

        return {
            torch.ops.fsdp.all_gather_copy_in.default: _gathered,
            torch.ops.c10d._reduce_scatter_base_.default: _reduced_from,
        }


def _the_same(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
    return tensor


def _gathered(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    _name(mode, out[1])


def _reduced_from(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    _name(mode, args[1])


def _name(mode: CountingFakeMode, tensor: torch.Tensor) -> None:
    block = mode.ledger.block_of(tensor.untyped_storage())
    if block is not None and block.category is Category.UNKNOWN:
        block.category = Category.COMMUNICATION
