"""The histories of the caching allocators: turn them on and off, restore their earlier state, read them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from types import ModuleType
from typing import Any

import torch

from tb_memplugin.record.torch_private.allocators import (
    BINDINGS,
    HISTORY_ENABLED,
    LAZY_CALL,
    MARK,
    OBSERVE_FAILURES,
    RECORD_HISTORY,
    SET_MARK,
    SNAPSHOT,
)

Snapshot = dict[str, Any]
Observer = Callable[[int, int, int, int], None]
"""A function called with the device's number, the requested bytes, the process's limit in bytes, and the
device's free bytes."""


@dataclass(frozen=True, slots=True)
class Allocator:
    """The functions of one device type's caching allocator. They may raise any exception of torch.

    Attributes:
        device_type: "cuda" (also for ROCm) or "xpu".
        record: turns the history on or off; see `torch.cuda.memory._record_memory_history`.
        snapshot: returns the dict of `torch.cuda.memory._snapshot()`, for all devices of the type.
        is_recording: whether the history is on.
        is_in_use: whether the process has a context on a device of the type.
        when_in_use: calls a function now, or once the process gets such a context.
        current_device: returns the number of this thread's device.
        set_mark, mark: set and return the text on the allocations of this thread (`user_metadata`); None if
            torch does not support it.
        observe: calls a function whenever an allocation fails, before the error is raised. torch cannot
            remove an observer. None if torch does not support it.
    """

    device_type: str
    record: Callable[..., None]
    snapshot: Callable[[], Snapshot]
    is_recording: Callable[[], bool]
    is_in_use: Callable[[], bool]
    when_in_use: Callable[[Callable[[], None]], None]
    current_device: Callable[[], int]
    set_mark: Callable[[str], None] | None = None
    mark: Callable[[], str] | None = None
    observe: Callable[[Observer], None] | None = None


def allocators() -> tuple[Allocator, ...]:
    """Return the allocators on this machine that keep a history; none without CUDA, ROCm or XPU.

    `cudaMallocAsync` and pluggable allocators keep no history.
    """
    backends = ((name, getattr(torch, name, None)) for name in ("cuda", "xpu"))
    return tuple(
        _allocator(name, backend)
        for name, backend in backends
        if backend is not None
        and hasattr(backend.memory, RECORD_HISTORY)
        and hasattr(backend.memory, SNAPSHOT)
        and backend.is_available()
        and getattr(backend.memory, "get_allocator_backend", _native)() == _native()
    )


def _native() -> str:
    """Return torch's name for its own caching allocator."""
    return "native"


def _allocator(name: str, backend: ModuleType) -> Allocator:
    memory, snapshot = backend.memory, getattr(backend.memory, SNAPSHOT)
    call_later = getattr(backend, LAZY_CALL, _at_once)
    return Allocator(
        device_type=name,
        record=getattr(memory, RECORD_HISTORY),
        snapshot=snapshot,
        is_recording=getattr(BINDINGS, HISTORY_ENABLED[name], lambda: _has_entries(snapshot())),
        is_in_use=backend.is_initialized,
        when_in_use=lambda call: call() if backend.is_initialized() else call_later(call),
        current_device=backend.current_device,
        set_mark=getattr(memory, SET_MARK, None),
        mark=getattr(memory, MARK, None),
        observe=getattr(BINDINGS, OBSERVE_FAILURES[name], None),
    )


def _at_once(call: Callable[[], None]) -> None:
    call()


def _has_entries(snapshot: Snapshot) -> bool:
    """Whether a snapshot has entries, which shows on XPU that the history is on."""
    return any(snapshot.get("device_traces", ()))


@dataclass(slots=True)
class _Use:
    """The use of one device type's history: how many recorders use it, and whether it was on before them."""

    users: int = 0
    was_on: bool = False


@dataclass(slots=True)
class HistorySwitch:
    """Turns a history on for its first user and off after the last one.

    A history that was already on is left on: turning it off would clear it, and torch does not reveal the
    settings with which it was turned on, so it could not be restored.
    """

    _uses: dict[str, _Use] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def on(self, allocator: Allocator, *, max_entries: int, stacks: str = "python") -> bool:
        """Begin to use an allocator's history.

        Args:
            max_entries: the largest number of entries to keep per device; older ones are overwritten.
            stacks: "python", or "all" to include C++ frames, with which a snapshot takes minutes.

        Returns:
            Whether the history was off before; if so, it contains nothing from before this call.
        """
        with self._lock:
            use = self._uses.setdefault(allocator.device_type, _Use())
            was_on = use.users > 0 or allocator.is_recording()
            if not was_on:
                allocator.record(**_settings(allocator, max_entries, stacks))
            if not use.users:
                use.was_on = was_on
            use.users += 1
            return not was_on

    def off(self, allocator: Allocator) -> None:
        """End a use that `on` began."""
        with self._lock:
            use = self._uses[allocator.device_type]
            use.users -= 1
            if not use.users and not use.was_on:
                allocator.record(enabled=None)


def _settings(allocator: Allocator, max_entries: int, stacks: str) -> dict[str, Any]:
    """Return the arguments for `_record_memory_history` that this version of torch supports."""
    wanted = {
        "enabled": "all",
        "context": "alloc",  # a free's stack costs as much as an alloc's and is not shown
        "stacks": stacks,
        "max_entries": max_entries,
        "global_record_annotations": True,  # otherwise only those of the thread that turned it on
    }
    parameters = signature(allocator.record).parameters
    return {name: value for name, value in wanted.items() if name in parameters}


SWITCH = HistorySwitch()
"""The switch of this process: a history is per process."""


def since(snapshot: Snapshot, start_ns: int) -> Snapshot:
    """Return a snapshot without entries and annotations before a time (epoch nanoseconds).

    The blocks alive at that time are still known from the final state and the later entries.
    """
    start_us = start_ns / 1_000
    return {
        **snapshot,
        "device_traces": [
            trace[bisect_left(trace, start_us, key=_time_us) :] for trace in snapshot.get("device_traces", ())
        ],
        "external_annotations": [
            annotation
            for annotation in snapshot.get("external_annotations", ())
            if _time_us(annotation) >= start_us
        ],
    }


def reaches(snapshot: Snapshot, start_ns: int, device: int) -> bool:
    """Whether a device's entries begin before a time (epoch nanoseconds), so that no later one is lost."""
    traces = snapshot.get("device_traces", ())
    entries = traces[device] if device < len(traces) else ()
    return not entries or _time_us(entries[0]) <= start_ns / 1_000


def _time_us(entry: dict[str, Any]) -> int:
    return int(entry.get("time_us", 0))
