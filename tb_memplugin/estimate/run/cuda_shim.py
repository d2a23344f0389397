"""Make `device='cuda'` work without a GPU: a C++ library, compiled once, lets PyTorch know a device."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from functools import cache
from pathlib import Path

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.kernels.table import ANY_GPU
from tb_memplugin.estimate.run import cuda_shim, fake_cuda
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.cuda_memory import CudaMemory
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.record.compiling import cache_folder, compile_library, installed_compiler

SOURCE = Path(__file__).with_name("cuda_shim.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FIX = (
    "Install a C++20 compiler (g++ 10 or clang 12 or newer), or name one in the environment variable "
    "CXX. Or estimate with device='cpu'."
)


def switch(on: bool) -> None:
    """Make PyTorch know a CUDA device, or forget it again. Calls nest: each True needs one False.

    The first call compiles the library. A PyTorch built with CUDA needs it too: without a driver, autograd
    cannot ask for the device of a tensor.

    Raises:
        MemPluginError: no compiler was found, compiling failed, or the library cannot be loaded.
    """
    library = _library()
    if on:
        _users.append(None)
    else:
        _users.pop()
    library.tb_memplugin_activate(int(bool(_users)))


_users: list[None] = []
"""One entry for each caller that has switched it on and not yet off."""


@cache
def _library() -> ctypes.CDLL:
    path = _cached()
    try:
        return ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise MemPluginError(
            f"The library that makes the device 'cuda' known to torch cannot be loaded: {error}.",
            where=os.fspath(path),
            fix="Delete that file; it is then compiled again.",
        ) from error


def _cached() -> Path:
    """Return the path of the compiled library; compile it if it is not in the cache."""
    text = SOURCE.read_bytes()
    key = hashlib.sha256(
        b"\0".join([text, torch.__version__.encode(), sys.platform.encode(), str(_abi()).encode()])
    ).hexdigest()[:16]
    path = cache_folder() / f"cuda_shim-{key}.so"
    if not path.is_file():
        _compile(path)
    return path


def _abi() -> int:
    return int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))


def compiler() -> str:
    """Return the path of the C++ compiler: the one named by `CXX`, or else the first that is installed.

    Raises:
        MemPluginError: no compiler was found.
    """
    installed, chosen = installed_compiler("CXX", _COMPILERS), os.environ.get("CXX")
    if installed is None:
        raise MemPluginError(
            "On a machine without a GPU, the first estimate for a GPU needs a C++ compiler; "
            + (f"{chosen!r} is not one." if chosen else "none was found."),
            where=f"torch {torch.__version__}",
            fix=_FIX,
        )
    return installed


def _compile(path: Path) -> None:
    root = Path(torch.__file__).parent
    command = [
        *(compiler(), "-O0", "-shared", "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"),
        f"-I{root / 'include'}",
        os.fspath(SOURCE),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    compile_library(path, command, purpose="makes the device 'cuda' known to torch", fix=_FIX)


class Devices(Correction):
    """Provides a CUDA device.

    It also keeps autocast and GradScaler on, which switch themselves off where `torch.cuda.is_available`
    returns False.
    """

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Make `torch.cuda` describe the target; a GPU of this machine is not asked."""
        if self.target.device_type != "cuda":
            return
        gpu = self.target.gpu or ANY_GPU
        fake_cuda.describe(patches, gpu)
        CudaMemory(mode, self.target.gpu, self.target.settings, self.target.note).apply(patches)
        cuda_shim.switch(True)
        patches.on_undo(lambda: cuda_shim.switch(False))
        fake_cuda.stand_in(patches, mode, gpu, self.target.note)
