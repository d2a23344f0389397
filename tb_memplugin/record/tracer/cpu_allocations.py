"""Record every allocation and free of torch's CPU allocator while an operator runs, in order.

The allocator reports to the profiler that is on. torch's old profiler (`torch.autograd.profiler_legacy`)
starts and ends within two microseconds, so it is turned on for one operator at a time, with its callbacks for
operators off; it is never on while the user's code runs. It reports sizes and times, but no addresses. If
another profiler records on the thread, it stays off; if one starts (inside an operator written in Python), it
ends.

It must not be left on, nor be read while it runs: `_disable_profiler_legacy` would then leave its callback
behind, and autograd would restore the thread's state from the start of the backward. Both make the next
profiler crash.
"""

from __future__ import annotations

import threading
from collections import deque
from time import time_ns
from typing import Any

from tb_memplugin.record.profiler_windows import can_listen
from tb_memplugin.record.torch_private.profiler import (
    ActiveProfilerType,
    ExperimentalConfig,
    ProfilerConfig,
    ProfilerState,
    disable_legacy,
    enable_legacy,
    profiler_enabled,
    profiler_type,
    record_operators,
)

_profiler_enabled: Any = profiler_enabled
_profiler_type: Any = profiler_type
_enable: Any = enable_legacy
_disable: Any = disable_legacy
_record_functions: Any = record_operators

Reported = tuple[int, int]
"""(epoch nanoseconds, bytes); bytes are negative for a free."""


class AllocatorLog:
    """The allocator's reports on one thread, passed on to all readers there. See `allocator_log`."""

    def __init__(self) -> None:
        self._on = False
        self._readers: list[deque[Reported]] = []

    def begin(self, reader: deque[Reported]) -> bool:
        """Begin to fill a queue. Return whether reports will come: not if another profiler is on."""
        if self._on:  # an outer tracer is on, and torch has only made tensors of numbers until this call
            self._disable()
        if not self._on and not _profiler_enabled():
            _enable(_CONFIG)
            _record_functions(False)
            self._on = True
        self._readers.append(reader)
        return self._on

    def end(self, reader: deque[Reported]) -> None:
        """End the last `begin` of this thread. Operators of nested tracers end from the inside out."""
        if self._on:
            self.stop()
        readers = self._readers
        if readers and readers[-1] is reader:
            readers.pop()

    def abandon(self, reader: deque[Reported]) -> None:
        """End a `begin` whose `end` failed, without reports."""
        self._disable()
        self._readers[:] = [kept for kept in self._readers if kept is not reader]

    def stop(self) -> None:
        """Stop reporting, and pass the reports on to the readers."""
        now = time_ns()
        lists = self._disable()
        if len(lists) > 1 or (lists and len(lists[0]) > 2):  # more than the profiler's two marks
            self._pass_on(lists, now)

    def _disable(self) -> list[list[Any]]:
        """Stop reporting and return the reports, none if another profiler has replaced this one."""
        lists: list[list[Any]] = []
        if self._on:
            self._on = False
            if _profiler_type().value == _LEGACY:
                lists = _disable()
                _record_functions(True)
        return lists

    def _pass_on(self, lists: list[list[Any]], now: int) -> None:
        events = lists[0]
        if len(lists) == 1:
            mark = events[-1]
        else:
            mark = next(each[-1] for each in lists if each and each[-1].kind() == "mark")
            events = [event for each in lists for event in each]
        reports = [
            (now - int(event.cpu_elapsed_us(mark) * 1000), size)
            for event in events
            if (size := event.cpu_memory_usage())
        ]
        if len(lists) > 1:
            reports.sort(key=lambda report: report[0])
        for reader in self._readers:
            reader.extend(reports)


def _settings() -> tuple[Any, int] | None:
    """Return the old profiler's configuration and type, None if this version of torch does not have it."""
    try:
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, ExperimentalConfig())
        needed = (_profiler_enabled, _profiler_type, _enable, _disable, _record_functions)
        return (config, ActiveProfilerType.LEGACY.value) if None not in needed and can_listen() else None
    except (AttributeError, TypeError):
        return None


_CONFIG, _LEGACY = _settings() or (None, -1)
_logs = threading.local()


def allocator_log() -> AllocatorLog | None:
    """Return the log of the calling thread, None if this version of torch does not support it."""
    if _CONFIG is None:
        return None
    log: AllocatorLog | None = getattr(_logs, "log", None)
    if log is None:
        log = _logs.log = AllocatorLog()
    return log


class StepsAside:
    """Stops a thread's log before a profiler starts on it, while it listens: torch allows only one."""

    def start(self) -> None:
        """Stop the log of this thread."""
        log: AllocatorLog | None = getattr(_logs, "log", None)
        if log is not None:
            log.stop()

    def stop(self) -> None:
        """Do nothing: the log starts again with the next operator."""
