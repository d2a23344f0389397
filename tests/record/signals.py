"""A signal that comes just before an object is freed: no Python runs between the two."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

SIGNAL = signal.SIGINT
raise_signal = partial(ctypes.CDLL(None)["raise"], SIGNAL)
"""Raises the signal in C: Python calls its handler at the next instruction that looks for one."""


class _Last(ctypes.c_int):
    freed: Any


def free_after_signal(objects: list[Any]) -> None:
    """Raise a signal, and free an object of which the list has the only reference, in one call of C."""
    last = [_Last(SIGNAL)]
    last[0].freed = objects.pop()
    raise_signal.func(last.pop())


@contextmanager
def interrupts() -> Iterator[None]:
    """Let the signal raise a KeyboardInterrupt, as in a program that pytest does not run."""
    before = signal.signal(SIGNAL, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)
