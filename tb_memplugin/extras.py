"""Libraries that one feature needs: each is an extra of the distribution (setup.cfg)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tb_memplugin.errors import MemPluginError


def library(module: str, extra: str) -> Any:
    """Import and return a module of a library of others.

    Raises:
        MemPluginError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != name:  # one of its own requirements
            raise
        raise MemPluginError(
            f"{name} is not installed.", where=module, fix=f"Run: pip install 'tb-memplugin[{extra}]'"
        ) from error
