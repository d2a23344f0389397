"""Ask cuDNN from the estimate. It runs in a process of its own: whatever it does cannot end the estimate."""

from __future__ import annotations

import ctypes.util
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
from tb_memplugin.estimate.libraries.cudnn.answers import Answer, Question
from tb_memplugin.estimate.libraries.cudnn.device import described
from tb_memplugin.estimate.libraries.cudnn.library import version_name

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
        self._answers: dict[tuple[str, Question], Answer] = {}
        self._connection: Connection[Any, Any] | None = None
        for path in libraries(setting):
            self._connection = _started(path)
            first = self._received()
            self.refusal = first.refusal
            if not self.refusal:
                self.version = version_name(first.number)
                break
            self._connection = None

    def workspace_bytes(self, gpu: GpuSpec, question: Question) -> int | None:
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

    def _asked(self, key: tuple[str, Question]) -> Answer:
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
