"""Compile small libraries with the system's compiler, once per user and source."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tb_memplugin.errors import MemPluginError
from tb_memplugin.temporary import new_folder

CACHE_VARIABLE = "TB_MEMPLUGIN_CACHE"
"""Environment variable that names the folder for compiled libraries, instead of the user's cache."""


def cache_folder() -> Path:
    """Return the folder of the libraries: `TB_MEMPLUGIN_CACHE`, or tb_memplugin in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tb_memplugin"


def installed_compiler(variable: str, names: Sequence[str]) -> str | None:
    """Return the path of the compiler that an environment variable names, or else of the first installed."""
    chosen = os.environ.get(variable)
    return next((path for name in ([chosen] if chosen else names) if (path := shutil.which(name))), None)


def compile_library(path: Path, command: Sequence[str], *, purpose: str, fix: str) -> None:
    """Compile a library. It appears whole or not at all, also if other processes compile the same.

    Args:
        command: the compiler and its arguments without the output.
        purpose: what the library does, for messages: "counts the calls of the CPU's allocator".

    Raises:
        MemPluginError: the compiler failed, or the library cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(path.parent) as folder:
            library = Path(folder) / path.name
            ran = subprocess.run(
                [*command, "-o", os.fspath(library)], capture_output=True, text=True, check=False
            )
            if ran.returncode:
                raise MemPluginError(
                    f"The compiler failed:\n{ran.stderr[:2000].strip()}", where=command[0], fix=fix
                )
            library.replace(path)
    except OSError as error:
        raise MemPluginError(
            f"The library that {purpose} cannot be written: {error}.",
            where=os.fspath(path.parent),
            fix=f"Set the environment variable {CACHE_VARIABLE} to a folder that can be written.",
        ) from error
