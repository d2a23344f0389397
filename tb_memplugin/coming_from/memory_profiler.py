"""The interface of PyTorch Memory Tracing. Its `MemoryTracer` is our `MemoryEstimator`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from torch import nn

from tb_memplugin import logs
from tb_memplugin.estimate.answer.estimator import MemoryEstimator

__all__ = ["MemoryTracer", "configure_logging", "get_logger"]

LOG_FILE = "memory_profile.log"
LEVEL_VARIABLE = "MEMORY_PROFILER_LOG_LEVEL"
"""That tool's environment variable. It applies to scripts that import this module, unless ours is set."""


class MemoryTracer(MemoryEstimator):
    """A `MemoryEstimator` that learns its modules by `memory_dispatch_mode.register_hooks_to_module`."""

    @property
    def memory_dispatch_mode(self) -> ModuleHooks:
        """The object with which scripts of that tool register their modules."""
        return ModuleHooks(self)


class ModuleHooks:
    """Registers modules to report separately. Their hooks are removed when the estimator's block ends."""

    def __init__(self, estimator: MemoryEstimator) -> None:
        self._estimator = estimator

    def register_hooks_to_module(self, module: nn.Module) -> list[nn.Module]:
        """Report a model's modules separately from now on; see `MemoryEstimator.watch`."""
        self._estimator.watch(module)
        return [module]

    def remove_hooks(self, handles: Sequence[nn.Module]) -> None:
        """Do nothing; scripts of that tool call it."""


def configure_logging(
    level: int | str | None = None,
    log_to_file: bool = False,
    log_file: str = LOG_FILE,
    rich_format: bool = True,
) -> None:
    """Show our messages, and write them to a file if `log_to_file`; see `tb_memplugin.configure_logging`.

    The default level is that of the environment variables, else INFO.
    """
    asked_for = os.environ.get(logs.LEVEL_VARIABLE) or os.environ.get(LEVEL_VARIABLE)
    least = asked_for if level is None else level
    logs.configure_logging(least, log_file if log_to_file else None, rich_format)


def get_logger(name: str = logs.LOGGER) -> logging.Logger:
    """Return a child of our logger, whose messages `configure_logging` shows."""
    inside = name == logs.LOGGER or name.startswith(f"{logs.LOGGER}.")
    return logging.getLogger(name if inside else f"{logs.LOGGER}.{name}")


if not os.environ.get(logs.LEVEL_VARIABLE):  # otherwise importing the package has configured it
    logs.configure_from_environment(LEVEL_VARIABLE)
