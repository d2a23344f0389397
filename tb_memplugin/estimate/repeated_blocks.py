"""Activation checkpointing around the blocks that a model repeats, as people put it there by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint every block of which a list (`nn.ModuleList`, `nn.Sequential`) holds at least two alike.

    Blocks inside a block are left to it. Names of modules stay as they are.

    Returns:
        The number of blocks.
    """
    found = _blocks(model)
    for block in found:
        block.forward = _checkpointed(block.forward)
    return len(found)


def _blocks(module: nn.Module) -> list[nn.Module]:
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds = Counter(map(type, children))
        repeated = [child for child in children if kinds[type(child)] > 1 and any(child.children())]
        if repeated:
            return repeated
    return [block for child in children for block in _blocks(child)]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    return recomputed
