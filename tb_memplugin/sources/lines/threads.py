"""Threads that allocate while lines are traced: new ones from their first call on, others from a layer's."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

logger = logging.getLogger("tb_memplugin")

Hook = Callable[[FrameType, Any, Any], object]
"""What `threading.setprofile` takes."""


class ThreadWatch:
    """Calls something once on every thread but the one that makes this, until `stop`.

    A thread that `threading` starts is met at its first call, by `threading.setprofile`, before the code that
    it runs; a profile function that others set there goes on as if ours were not there. A thread that runs
    already is met when it calls a layer.

    Args:
        met: called on a thread that was not met before.
    """

    def __init__(self, met: Callable[[], None]) -> None:
        self._met = met
        self._on = True
        self._known = threading.local()
        self._known.met = True
        self._profile: Hook | None = None
        self._others: Hook | None = None
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin to meet threads."""
        self._others = threading.getprofile()
        self._profile = self._first_call
        threading.setprofile(self._profile)
        if threading.active_count() > 1:  # a hook on all layers costs, and is seen in stacks
            hook = torch.nn.modules.module.register_module_forward_pre_hook
            self._handles.append(hook(self._layer_called))

    def stop(self) -> None:
        """No thread is met from here on."""
        self._on = False
        if threading.getprofile() is self._profile:
            threading.setprofile(self._beneath())
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _beneath(self) -> Hook | None:
        """What others set, without watches that ended while this one stood on them."""
        others = self._others
        while isinstance(watch := getattr(others, "__self__", None), ThreadWatch) and not watch._on:
            others = watch._others
        return others

    def _first_call(self, frame: FrameType, event: str, arg: Any) -> None:
        sys.setprofile(self._others)
        if self._others is not None:
            self._others(frame, event, arg)
        self._meet()

    def _layer_called(self, *_: object) -> None:
        self._meet()

    def _meet(self) -> None:
        if not self._on or getattr(self._known, "met", False):
            return
        self._known.met = True
        try:
            self._met()
        except Exception as error:  # the training goes on, whatever happens to us
            logger.debug("watching a thread failed", exc_info=error)
