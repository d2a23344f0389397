"""Ask cuDNN from the estimate. It runs in a process of its own: whatever it does cannot end the estimate.

A GPU is described as the JSON representation of CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR. cuDNN refuses a
description that lacks a key. Which keys change what it answers is in docs/gpus.md; the others have the values
of any GPU.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.libraries.cudnn.convolution import Answer, Convolution
from tb_memplugin.estimate.libraries.cudnn.library import version_name
from tb_memplugin.record.compiling import cache_folder, compile_library, installed_compiler

CLOCKS = {"h100": (1980, 2619), "h100-nvl": (1785, 2619), "h200": (1980, 3201)}
"""MHz of multiprocessors and of memory, where they change answers (docs/gpus.md)."""


def described(gpu: GpuSpec) -> str:
    """Return the description of a GPU."""
    major, minor = gpu.compute_capability
    clock, memory_clock = CLOCKS.get(gpu.name, (1410, 1215))
    return json.dumps(
        {
            "deviceVer": 100 * major + 10 * minor,
            "multiProcessorCount": gpu.processors,
            "maxSharedMemoryPerBlockOptin": gpu.shared_bytes,
            "maxThreadsPerSM": gpu.threads,
            "maxCtasPerSM": 32,
            "totalGlobalMem": gpu.memory_bytes,
            "smClockRateKHz": 1000 * clock,
            "memClockRateKHz": 1000 * memory_clock,
            "l2CacheSize": 40 << 20,
            "reservedSharedMemoryPerBlock": 1024 if major >= 8 else 0,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 48 << 10,
            "maxRegistersPerSM": 65536,
            "maxThreadsPerBlock": 1024,
            "regsPerBlock": 65536,
            "maxBlockSize": [1024, 1024, 64],
            "maxGridSize": [2147483647, 65535, 65535],
            "supportCoopLaunch": 1,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "cudaDeviceId": 0,
            "driverVer": 13000,
            "deviceName": gpu.name,
        }
    )


WITHOUT_GPU = {"driver.c": ("libcuda.so.1",), "cublaslt.c": ("libcublasLt.so.12", "libcublasLt.so.13")}
"""What cuDNN opens by name and cannot use without a GPU: the sources of libraries to put in their place."""

VARIABLE = "TB_MEMPLUGIN_CUDNN"
"""The environment variable with the path of the library to ask, or `none`: then none is asked."""

ENDED = "its process ended (cuDNN needs cuBLAS beside it), or did not answer"
"""Why a cuDNN does not answer that crashed, or that takes too long."""

PATIENCE = 60.0
"""The most seconds to wait for an answer. Usual are milliseconds, and half a second for the first."""


class Cudnn:
    """The cuDNN that is installed here, or none.

    Attributes:
        version: such as `9.20.0`; empty if there is no cuDNN that answers.
        refusal: why there is none, or why the last question without an answer has none; else empty.
        missing: what is not installed here, without which cuDNN leaves out kernels that it has on a GPU.
    """

    def __init__(self, setting: str) -> None:
        """Find a cuDNN that answers.

        Args:
            setting: the path of the library, `none`, or nothing: then it is searched.
        """
        self.version = ""
        self.refusal = f"{VARIABLE}=none" if setting == "none" else "it is not installed"
        self._lock = Lock()
        self._answers: dict[tuple[str, Convolution], Answer] = {}
        self._connection: Connection[Any, Any] | None = None
        self.missing: list[str] = []
        folder = None if has_driver() else _without_gpu()
        for path in libraries(setting):
            self._connection = _started(path, folder)
            first = self._received()
            self.refusal = first.refusal
            if not self.refusal:
                self.version = version_name(first.number)
                self.missing = [] if folder or has_driver() else ["a C compiler"]
                self.missing += [] if _has_nvrtc(path) else ["nvidia-cuda-nvrtc"]
                break
            self._connection = None

    def workspace_bytes(self, gpu: GpuSpec, question: Convolution) -> int | None:
        """Return the bytes of the workspace that cuDNN takes for a question; None if it does not say."""
        key = (described(gpu), question)
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                if self._connection is None:
                    return None
                answer = self._answers[key] = self._asked(key)
        if answer.refusal:
            self.refusal = answer.refusal
            return None
        return answer.number

    def _asked(self, key: tuple[str, Convolution]) -> Answer:
        assert self._connection is not None
        with suppress(OSError):  # it ended, so there is nothing to receive
            self._connection.send(key)
        return self._received()

    def _received(self) -> Answer:
        """Return the next answer; without one, nothing is asked any more."""
        if self._connection is not None:
            try:
                if self._connection.poll(PATIENCE):
                    received: Answer = self._connection.recv()
                    return received
            except (EOFError, OSError):
                pass
        self.refusal, self._connection = ENDED, None
        return Answer(refusal=self.refusal)


def installed() -> Cudnn:
    """Return the cuDNN to ask. It is started when it is first needed, once in a process."""
    return _installed(os.getpid(), os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=4)
def _installed(_process: int, setting: str) -> Cudnn:
    return Cudnn(setting)


def libraries(setting: str = "") -> Iterator[str]:
    """Yield where cuDNN may be: the path that was set, else NVIDIA's wheel, then the system's library."""
    if setting:
        yield from () if setting == "none" else (setting,)
        return
    namespace = PathFinder.find_spec("nvidia")
    for folder in (namespace and namespace.submodule_search_locations) or ():
        path = Path(folder) / "cudnn" / "lib" / "libcudnn.so.9"
        if path.is_file():
            yield str(path)
    name = ctypes.util.find_library("cudnn")
    if name:
        yield name


def has_driver() -> bool:
    """Return whether NVIDIA's driver, or the stand-in's, can be loaded here."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _without_gpu() -> Path | None:
    """Return the folder of `WITHOUT_GPU`'s libraries, compiled once and kept; None without a compiler."""
    compiler = installed_compiler("CC", ("cc", "gcc", "clang"))
    if compiler is None:
        return None
    sources = {name: Path(__file__).with_name(name) for name in WITHOUT_GPU}
    key = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources.values())).hexdigest()[:16]
    folder = cache_folder() / f"cudnn-{key}"
    try:
        for name, source in sources.items():
            for library in WITHOUT_GPU[name]:
                if not (folder / library).is_file():
                    command = [compiler, "-shared", "-fPIC", "-O1", "-w", str(source)]
                    compile_library(folder / library, command, purpose="stands in for a GPU", fix="")
    except MemPluginError:
        return None
    return folder


def _has_nvrtc(path: str) -> bool:
    """Return whether the library at a path finds NVRTC, with which cuDNN compiles kernels."""
    wheels = Path(path).parents[2].glob("*/lib/libnvrtc.so.*") if len(Path(path).parents) > 2 else ()
    return any(wheels) or ctypes.util.find_library("nvrtc") is not None


def _started(path: str, folder: Path | None) -> Connection[Any, Any] | None:
    """Start the process that asks the library at a path, and return the connection to it.

    Args:
        folder: of libraries that cuDNN finds before the system's; see `_without_gpu`.
    """
    ours, theirs = Pipe()
    home = str(Path(__file__).parents[4])  # the folder of the package tb_memplugin
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    if folder is not None:
        paths = [os.fspath(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    module = "tb_memplugin.estimate.libraries.cudnn.convolution"
    command = [sys.executable, "-m", module, str(theirs.fileno()), path]
    try:
        subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, ValueError):
        return None
    finally:
        theirs.close()
    return ours
