"""PyTorch Memory Tracing's names: its `MemoryTracer` is our `MemoryEstimator`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from torch import nn

from tb_memplugin import logs
from tb_memplugin.estimate.estimator import MemoryEstimator

__all__ = ["MemoryTracer", "configure_logging", "get_logger"]

LOG_FILE = "memory_profile.log"
LEVEL_VARIABLE = "MEMORY_PROFILER_LOG_LEVEL"
"""That tool's environment variable, which goes for scripts that import this; ours goes before it."""


class MemoryTracer(MemoryEstimator):
    """A `MemoryEstimator` whose modules are told with `memory_dispatch_mode.register_hooks_to_module`."""

    @property
    def memory_dispatch_mode(self) -> ModuleHooks:
        """Where that tool's scripts name their modules."""
        return ModuleHooks(self)


class ModuleHooks:
    """Modules to tell apart. They are let go of when the estimator's block ends, whether asked to or not."""

    def __init__(self, estimator: MemoryEstimator) -> None:
        self._estimator = estimator

    def register_hooks_to_module(self, module: nn.Module) -> list[nn.Module]:
        """Tell a model's modules apart from here on; see `MemoryEstimator.watch`."""
        self._estimator.watch(module)
        return [module]

    def remove_hooks(self, handles: Sequence[nn.Module]) -> None:
        """Does nothing, and may stand where scripts have it."""


def configure_logging(
    level: int | str | None = None,
    log_to_file: bool = False,
    log_file: str = LOG_FILE,
    rich_format: bool = True,
) -> None:
    """Show our messages, and with `log_to_file` keep them; see `tb_memplugin.configure_logging`.

    Without a level it is the environment's, else INFO.
    """
    least = _level_asked_for() if level is None else level
    logs.configure_logging(least, log_file if log_to_file else None, rich_format)


def get_logger(name: str = logs.LOGGER) -> logging.Logger:
    """A logger below ours, which `configure_logging` shows."""
    inside = name == logs.LOGGER or name.startswith(f"{logs.LOGGER}.")
    return logging.getLogger(name if inside else f"{logs.LOGGER}.{name}")


def _level_asked_for() -> str | None:
    return os.environ.get(logs.LEVEL_VARIABLE) or os.environ.get(LEVEL_VARIABLE)


if not os.environ.get(logs.LEVEL_VARIABLE):  # else importing the package has done it
    logs.configure_from_environment(LEVEL_VARIABLE)
