"""tb_memplugin: a TensorBoard tab that shows what the memory of each training step was used for.

Names are imported on first use, so that the TensorBoard plugin does not need torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tb_memplugin.errors import MemPluginError as MemPluginError
    from tb_memplugin.estimate.answer.estimator import MemoryEstimator as MemoryEstimator
    from tb_memplugin.estimate.gpu_spec import GpuSpec as GpuSpec
    from tb_memplugin.estimate.ranks import estimate_ranks as estimate_ranks
    from tb_memplugin.loading import load as load
    from tb_memplugin.logs import configure_logging as configure_logging
    from tb_memplugin.record.handler import combine_handlers as combine_handlers
    from tb_memplugin.record.handler import memory_trace_handler as memory_trace_handler
    from tb_memplugin.record.iterations import IterationReport as IterationReport
    from tb_memplugin.record.line_tracer import LineTracer as LineTracer
    from tb_memplugin.record.memory_tracer import MemoryTracer as MemoryTracer
    from tb_memplugin.record.monitor import MemoryMonitor as MemoryMonitor
    from tb_memplugin.record.oom import record_on_oom as record_on_oom

__version__ = "0.1.0"

_HOMES = {
    "GpuSpec": "tb_memplugin.estimate.gpu_spec",
    "IterationReport": "tb_memplugin.record.iterations",
    "LineTracer": "tb_memplugin.record.line_tracer",
    "MemPluginError": "tb_memplugin.errors",
    "MemoryEstimator": "tb_memplugin.estimate.answer.estimator",
    "MemoryMonitor": "tb_memplugin.record.monitor",
    "MemoryTracer": "tb_memplugin.record.memory_tracer",
    "combine_handlers": "tb_memplugin.record.handler",
    "configure_logging": "tb_memplugin.logs",
    "estimate_ranks": "tb_memplugin.estimate.ranks",
    "load": "tb_memplugin.loading",
    "memory_trace_handler": "tb_memplugin.record.handler",
    "record_on_oom": "tb_memplugin.record.oom",
}

__all__ = list(_HOMES)


def __dir__() -> list[str]:
    return [*_HOMES, *filter(lambda name: name.startswith("__"), globals())]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if _HOMES[name].startswith("tb_memplugin.record."):
            import_module("torch")  # then `tb-memplugin run` begins, and no module may be half imported
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        install = 'pip install "tb-memplugin[torch]"'
        raise ModuleNotFoundError(f"{name} needs PyTorch. Run: {install}", name="torch") from error


def load_ipython_extension(shell: Any) -> None:
    """Begin `%load_ext tb_memplugin`."""
    import_module("tb_memplugin.notebook").load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End it: `%unload_ext tb_memplugin`."""
    import_module("tb_memplugin.notebook").unload_ipython_extension(shell)


if os.environ.get("TB_MEMPLUGIN_LOG_LEVEL"):
    import_module("tb_memplugin.logs").configure_from_environment()
if os.environ.get("TB_MEMPLUGIN_EXACT_CPU", "0") not in ("", "0"):
    import_module("tb_memplugin.record.exact_cpu").count_if_possible()
