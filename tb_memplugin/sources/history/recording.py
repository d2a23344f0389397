"""The allocators' own record of what they do: switched on for a while, read, and left as it was found."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from types import ModuleType
from typing import Any

import torch

Snapshot = dict[str, Any]
Observer = Callable[[int, int, int, int], None]
"""Called with device, bytes asked for, bytes that the process may use at most, bytes free on the device."""


@dataclass(frozen=True, slots=True)
class Allocator:
    """The caching allocator of one type of device, by what it can do. Calls may raise what torch raises.

    Attributes:
        device_type: "cuda" (ROCm too) or "xpu".
        record: switch the history on or off; see `torch.cuda.memory._record_memory_history`.
        snapshot: the dict of `torch.cuda.memory._snapshot()`, of all devices of the type.
        is_recording: whether the history is on.
        is_in_use: whether the process has a context on a device of the type.
        when_in_use: call something now, or once the process gets such a context.
        current_device: the number of this thread's device.
        set_mark, mark: the text that the allocations of this thread carry (`user_metadata`); None where
            torch has none.
        observe: call something whenever a request fails, before the error is raised. For ever: torch
            cannot take an observer back. None where torch has none.
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
    """The allocators on this machine that keep a history: none on a machine without CUDA, ROCm or XPU.

    `cudaMallocAsync` and pluggable allocators keep none.
    """
    backends = ((name, getattr(torch, name, None)) for name in ("cuda", "xpu"))
    return tuple(
        _allocator(name, backend)
        for name, backend in backends
        if backend is not None
        and hasattr(backend.memory, "_record_memory_history")
        and backend.is_available()
        and getattr(backend.memory, "get_allocator_backend", _native)() == _native()
    )


def _native() -> str:
    """What torch calls its own caching allocator."""
    return "native"


def _allocator(name: str, backend: ModuleType) -> Allocator:
    memory = backend.memory
    return Allocator(
        device_type=name,
        record=memory._record_memory_history,
        snapshot=memory._snapshot,
        is_recording=getattr(torch._C, f"_{name}_isHistoryEnabled", lambda: _has_entries(memory._snapshot())),
        is_in_use=backend.is_initialized,
        when_in_use=lambda call: call() if backend.is_initialized() else backend._lazy_call(call),
        current_device=backend.current_device,
        set_mark=getattr(memory, "_set_memory_metadata", None),
        mark=getattr(memory, "_get_memory_metadata", None),
        observe=getattr(torch._C, f"_{name}_attach_out_of_memory_observer", None),
    )


def _has_entries(snapshot: Snapshot) -> bool:
    """XPU does not tell whether its history is on; where it has entries, somebody switched it on."""
    return any(snapshot.get("device_traces", ()))


@dataclass(slots=True)
class _Use:
    """Who uses the history of one type of device: `users` of ours, and whether it was on before them."""

    users: int = 0
    was_on: bool = False


@dataclass(slots=True)
class HistorySwitch:
    """Switches histories on for the first that needs one, and off after the last; never another's.

    A history that was on before us is left as it is: torch does not tell with which settings it was
    switched on, so it could not be restored, and switching it off clears it.
    """

    _uses: dict[str, _Use] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def on(self, allocator: Allocator, *, max_entries: int, stacks: str = "python") -> bool:
        """Begin to use an allocator's history.

        Args:
            allocator: whose.
            max_entries: most entries to keep for each device; older ones are overwritten.
            stacks: "python", or "all" for C++ frames too. They make a snapshot take minutes.

        Returns:
            Whether it was off until now: then it holds nothing from before this call.
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
    """Arguments for `_record_memory_history`: those that this torch knows."""
    wanted = {
        "enabled": "all",
        "context": "alloc",  # a free's stack costs as much as an alloc's and is not shown
        "stacks": stacks,
        "max_entries": max_entries,
        "global_record_annotations": True,  # else those of the thread that switched it on alone
    }
    known = signature(allocator.record).parameters
    return {name: value for name, value in wanted.items() if name in known}


SWITCH = HistorySwitch()
"""The one of this process: a history is the process's, whoever switches it on."""


def since(snapshot: Snapshot, start_ns: int) -> Snapshot:
    """A snapshot without the entries and annotations from before a time (epoch nanoseconds).

    What was alive at that time is still known: it follows from the final state and the entries since.
    """
    start_us = start_ns / 1_000
    return {
        **snapshot,
        "device_traces": [
            trace[bisect_left(trace, start_us, key=_time_us) :] for trace in snapshot.get("device_traces", ())
        ],
        "external_annotations": [
            one for one in snapshot.get("external_annotations", ()) if _time_us(one) >= start_us
        ],
    }


def reaches(snapshot: Snapshot, start_ns: int, device: int) -> bool:
    """Whether a device's entries begin before a time (epoch nanoseconds), so that none since is lost."""
    traces = snapshot.get("device_traces", ())
    entries = traces[device] if device < len(traces) else ()
    return not entries or _time_us(entries[0]) <= start_ns / 1_000


def _time_us(entry: dict[str, Any]) -> int:
    return int(entry.get("time_us", 0))
