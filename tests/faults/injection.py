"""Raise an error in one function of the package, at its first call or at every one."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import tb_memplugin

_PACKAGE = os.path.dirname(tb_memplugin.__file__) + os.sep  # noqa: PTH120


def name_of(frame: FrameType) -> str:
    """`record/guard.py:57:end`: file, line and name of the function that a frame runs."""
    code = frame.f_code
    return f"{code.co_filename[len(_PACKAGE) :]}:{code.co_firstlineno}:{code.co_name}"


@contextmanager
def calls_seen(counts: Counter[str]) -> Iterator[None]:
    """Count the calls of the package's functions, on this thread and on those that it starts."""

    def trace(frame: FrameType, _event: str, _arg: Any) -> None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            counts[name_of(frame)] += 1

    with _tracing(trace):
        yield


class Injection:
    """Whether the error was raised."""

    fired = False


@contextmanager
def raising(function: str, error: BaseException, *, always: bool = False) -> Iterator[Injection]:
    """Raise an error when a function is called (for the first time), before its first statement."""
    injection = Injection()
    line = int(function.split(":")[1])

    def trace(frame: FrameType, _event: str, _arg: Any) -> None:
        code = frame.f_code
        is_due = always or not injection.fired
        if code.co_firstlineno == line and is_due and name_of(frame) == function:
            injection.fired = True
            raise error

    with _tracing(trace):
        yield injection


@contextmanager
def _tracing(trace: Any) -> Iterator[None]:
    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)
