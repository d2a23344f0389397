"""tb_memplugin: where each training step's memory went, in a TensorBoard tab of its own.

Names are imported on first use, so that TensorBoard's side needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tb_memplugin.errors import MemPluginError
    from tb_memplugin.handler import combine_handlers, memory_trace_handler
    from tb_memplugin.loading import load
    from tb_memplugin.oom import record_on_oom

__all__ = ["MemPluginError", "combine_handlers", "load", "memory_trace_handler", "record_on_oom"]

__version__ = "0.1.0"

_HOMES = {
    "MemPluginError": "tb_memplugin.errors",
    "combine_handlers": "tb_memplugin.handler",
    "load": "tb_memplugin.loading",
    "memory_trace_handler": "tb_memplugin.handler",
    "record_on_oom": "tb_memplugin.oom",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
