"""`device='cuda'` for fake tensors where no GPU is: a small C++ library, compiled once and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from tb_memplugin.errors import MemPluginError

SOURCE = Path(__file__).with_name("cuda_shim.cpp")
CACHE_VARIABLE = "TB_MEMPLUGIN_CACHE"
"""Environment variable: the folder that keeps the compiled library, instead of the user's cache."""

_COMPILERS = ("c++", "g++", "clang++")
_FIX = (
    "Install a C++20 compiler (g++ 10 or clang 12 or newer), or name one in the environment variable CXX; or "
    "estimate where there is a GPU; or with device='cpu'."
)


def switch(on: bool) -> None:
    """Make a CUDA device known to PyTorch, or unknown again: as often off as on.

    The first time the library is compiled. A PyTorch built with CUDA needs it too: without a driver its
    autograd asks in vain whose device a tensor is on.

    Raises:
        MemPluginError: there is no compiler, or it failed.
    """
    library = _library()
    if on:
        _users.append(None)
    else:
        _users.pop()
    library.tb_memplugin_activate(int(bool(_users)))


_users: list[None] = []
"""One for each that switched it on and not yet off."""


@cache
def _library() -> ctypes.CDLL:
    path = _cached()
    try:
        return ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise MemPluginError(
            f"The library that makes 'cuda' known cannot be loaded: {error}.",
            where=os.fspath(path),
            fix="Delete that file: it is compiled anew then.",
        ) from error


def _cached() -> Path:
    """The compiled library, from the cache if it is there."""
    text = SOURCE.read_bytes()
    key = hashlib.sha256(
        b"\0".join([text, torch.__version__.encode(), sys.platform.encode(), str(_abi()).encode()])
    ).hexdigest()[:16]
    path = cache_folder() / f"cuda_shim-{key}.so"
    if not path.is_file():
        _compile(path)
    return path


def cache_folder() -> Path:
    """Where the compiled library is kept: `TB_MEMPLUGIN_CACHE`, or tb_memplugin in the user's cache."""
    told = os.environ.get(CACHE_VARIABLE)
    if told:
        return Path(told)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tb_memplugin"


def _abi() -> int:
    return int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))


def compiler() -> str:
    """The C++ compiler: `CXX`, or the first that is installed.

    Raises:
        MemPluginError: there is none.
    """
    told = os.environ.get("CXX")
    found = next((path for name in ([told] if told else _COMPILERS) if (path := shutil.which(name))), None)
    if found is None:
        raise MemPluginError(
            "An estimate for a GPU needs a C++ compiler where there is no GPU, once; "
            + (f"{told!r} is none." if told else "there is none."),
            where=f"torch {torch.__version__}",
            fix=_FIX,
        )
    return found


def _compile(path: Path) -> None:
    root = Path(torch.__file__).parent
    cxx = compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [
                *(cxx, "-O0", "-shared", "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"),
                f"-I{root / 'include'}",
                *(os.fspath(SOURCE), "-o", os.fspath(made)),
                *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise MemPluginError(
                    f"The C++ compiler failed:\n{done.stderr[:2000].strip()}", where=cxx, fix=_FIX
                )
            made.replace(path)
    except OSError as error:
        raise MemPluginError(
            f"The library that makes 'cuda' known cannot be written: {error}.",
            where=os.fspath(path.parent),
            fix=f"Name a folder that can be written in the environment variable {CACHE_VARIABLE}.",
        ) from error
