"""Ask cuDNN from the estimate. It runs in a process of its own: whatever it does cannot end the estimate.

A GPU is described as the JSON representation of CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR. cuDNN refuses a
description that lacks a key. Which keys change what it answers is in docs/gpus.md; the others have the values
of any GPU.
"""

from __future__ import annotations

import ctypes.util
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

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.libraries.cudnn.answers import Answer
from tb_memplugin.estimate.libraries.cudnn.convolution import Convolution
from tb_memplugin.estimate.libraries.cudnn.library import version_name

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
        for path in libraries(setting):
            self._connection = _started(path)
            first = self._received()
            self.refusal = first.refusal
            if not self.refusal:
                self.version = version_name(first.number)
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


def _started(path: str) -> Connection[Any, Any] | None:
    """Start the process that asks the library at a path, and return the connection to it."""
    ours, theirs = Pipe()
    home = str(Path(__file__).parents[4])  # the folder of the package tb_memplugin
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    command = [
        sys.executable,
        "-m",
        "tb_memplugin.estimate.libraries.cudnn.answers",
        str(theirs.fileno()),
        path,
    ]
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
