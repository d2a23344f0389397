"""Detect threads while lines are traced: new ones at their first call, others when they call a layer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tb_memplugin.record.guard import UNOWNED, Failed
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.other_threads import frames_of_other_threads

Hook = Callable[[FrameType, Any, Any], object]
"""A function for `threading.setprofile`."""


class ThreadWatch:
    """Calls a function once on every thread except the one that creates this object, until `stop`.

    A thread that `threading` starts is detected at its first call, by `threading.setprofile`, before its own
    code runs; a profile function that was already set still works. A thread that is already running is
    detected when it calls a layer.

    Args:
        on_thread: the function, called on each newly detected thread.
        failed: is called with errors of it.
    """

    def __init__(self, on_thread: Callable[[], None], failed: Failed = UNOWNED.end) -> None:
        self._on_thread, self._failed = on_thread, failed
        self._on = True
        self._local = threading.local()
        self._local.is_known = True
        self._profile: Hook | None = None
        self._previous: Hook | None = None
        self._calls = ModuleCalls()

    def start(self) -> None:
        """Begin to detect threads."""
        self._previous = threading.getprofile()
        self._profile = self._first_call
        threading.setprofile(self._profile)
        if frames_of_other_threads():  # only if needed: it costs time and appears in stacks
            self._calls.watch_all(self._detect, lambda *_: None, self._failed)

    def stop(self) -> None:
        """Stop detecting threads."""
        self._on = False
        if threading.getprofile() is self._profile:
            threading.setprofile(self._beneath())
        self._calls.stop()

    def _beneath(self) -> Hook | None:
        """Return the profile function to restore, skipping those of watches that have stopped."""
        hook = self._previous
        while isinstance(watch := getattr(hook, "__self__", None), ThreadWatch) and not watch._on:
            hook = watch._previous
        return hook

    def _first_call(self, frame: FrameType, event: str, arg: Any) -> None:
        sys.setprofile(self._previous)
        if self._previous is not None:
            self._previous(frame, event, arg)
        self._detect()

    def _detect(self, *_: object) -> None:
        if not self._on or getattr(self._local, "is_known", False):
            return
        self._local.is_known = True
        try:
            self._on_thread()
        except BaseException as error:
            self._failed("a new thread", error)
