"""Find the repeated blocks of a model, and wrap them in activation checkpointing as users do by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint every repeated block. The names of modules do not change.

    Returns:
        The number of blocks.
    """
    blocks = repeated_blocks(model)
    for block in blocks:
        block.forward = _checkpointed(block.forward)
    return len(blocks)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return every block that shares an `nn.ModuleList` or `nn.Sequential` with another of its class.

    Blocks have submodules. Blocks nested inside a returned block are not returned themselves.
    """
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds = Counter(map(type, children))
        repeated = [child for child in children if kinds[type(child)] > 1 and any(child.children())]
        if repeated:
            return repeated
    return [block for child in children for block in repeated_blocks(child)]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    return recomputed
