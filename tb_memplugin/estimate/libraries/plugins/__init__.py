"""Plugins for libraries that need help to run on fake tensors; all are on by default."""

from tb_memplugin.estimate.libraries.plugins.distributed import (
    DeviceMeshes,
    Distributed,
    FullySharded,
    Pipelining,
)
from tb_memplugin.estimate.libraries.plugins.megatron import Megatron
from tb_memplugin.estimate.libraries.plugins.plugin import Plugin, replaced
from tb_memplugin.estimate.libraries.plugins.transformer_engine import TransformerEngine

PLUGINS: list[Plugin] = [
    Distributed(),
    DeviceMeshes(),
    FullySharded(),
    Pipelining(),
    Megatron(),
    TransformerEngine(),
]
"""The plugins that every estimate uses. Append your own, or remove one, before the estimate begins."""

__all__ = ["PLUGINS", "Plugin", "replaced"]
