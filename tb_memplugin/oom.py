"""`record_on_oom`: when memory runs out, what filled it is kept, and the error goes on as it was."""

from __future__ import annotations

import logging
import os
import pickle
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from types import TracebackType
from typing import Literal

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.handler import default_worker_name
from tb_memplugin.sources.history.recording import (
    SWITCH,
    Allocator,
    HistorySwitch,
    Observer,
    Snapshot,
    allocators,
)
from tb_memplugin.sources.snapshot.trace import trace_from_snapshot
from tb_memplugin.store import files
from tb_memplugin.store.paths import folder_name
from tb_memplugin.store.writer import RunWriter

logger = logging.getLogger("tb_memplugin")

MOST_ENTRIES = 100_000
"""Entries of history kept for each device: some ten steps of a large model, below 1 GB of host memory."""

MOST_DUMPS = 3
"""Files for each device. Not one: cuDNN's autotuner asks for workspaces that may not fit and catches the
error itself, and loops that look for a batch size catch it too, so the first failure may not be the one
that ends the training. Not many: a dump stops the process for seconds."""


def record_on_oom(
    dir_name: str | os.PathLike[str],
    worker_name: str | None = None,
    *,
    max_entries: int = MOST_ENTRIES,
    stacks: Literal["python", "all"] = "python",
    most_dumps: int = MOST_DUMPS,
) -> OomRecorder:
    """Keep the allocator's history from here on, and write it when an out-of-memory error strikes.

    Once at the top of a script is enough; as a context manager it ends with its block. When a request
    fails, the state at that moment goes into the folder twice: as a snapshot's pickle
    (`oom-….pickle`), and as a run of the Memory tab. The error is raised as if we were not there;
    what goes wrong on our side is a warning. A history that is on already is used and left on.

    Args:
        dir_name: the logdir, or a run's folder below it. Local, or a URL that fsspec opens.
        worker_name: unique per process. Default: `rank<N>` under torchrun, else `<host>_<pid>`.
        max_entries: allocator events to keep for each device; older ones are forgotten, but not what
            they left alive.
        stacks: "python", or "all" for C++ frames too, which make writing take minutes.
        most_dumps: files for each device; later failures are only counted.

    Raises:
        ValueError: `max_entries` or `most_dumps` below 1, or other `stacks`.

    Example:
        >>> record_on_oom("runs/a")
        >>> train()
    """
    if max_entries < 1 or most_dumps < 1:
        raise ValueError(f"max_entries={max_entries} and most_dumps={most_dumps} must be at least 1")
    if stacks not in ("python", "all"):
        raise ValueError(f'stacks={stacks!r}; give "python" or "all"')
    found = allocators()
    if not found:
        logger.warning(
            "There is no CUDA or XPU device with torch's own caching allocator here: out-of-memory errors "
            "are not recorded.\n"
            "  fix: leave record_on_oom out here, or run where there is one."
        )
    recorder = OomRecorder(files.absolute(os.fsdecode(dir_name)), worker_name, most_dumps)
    recorder.begin(found, max_entries=max_entries, stacks=stacks)
    return recorder


class OomRecorder:
    """What `record_on_oom` gives: a context manager, and `close()` for those who need no block.

    It records until it is closed, also when nobody keeps it. Closed once, it stays closed.
    """

    def __init__(self, dir_name: str, worker_name: str | None = None, most_dumps: int = MOST_DUMPS) -> None:
        self.dir_name = dir_name
        self.dumps: list[str] = []
        """The pickles written so far."""
        self._worker_name = worker_name
        self._most_dumps = most_dumps
        self._writer: RunWriter | None = None
        self._switch: HistorySwitch = SWITCH
        self._using: list[Allocator] = []
        self._failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._busy = threading.local()
        self._closed = False

    def begin(
        self,
        found: Sequence[Allocator],
        *,
        max_entries: int = MOST_ENTRIES,
        stacks: str = "python",
        switch: HistorySwitch = SWITCH,
    ) -> None:
        """Switch the histories on, each as soon as its type of device is in use. Never raises."""
        self._switch = switch
        for allocator in found:
            try:
                allocator.when_in_use(lambda one=allocator: self._use(one, max_entries, stacks))  # type: ignore[misc]
            except Exception as error:  # the training goes on, whatever happens to us
                self._warn(f"The history of {allocator.device_type} could not be switched on", error)

    def close(self) -> None:
        """End the recording, and the histories that are on for it. Safe to call twice. Never raises."""
        self._closed = True
        _active.pop(id(self), None)
        while self._using:
            allocator = self._using.pop()
            try:
                self._switch.off(allocator)
            except Exception as error:  # see begin
                self._warn(f"The history of {allocator.device_type} could not be switched off", error)

    def __enter__(self) -> OomRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError) and not self._failures:
            self._handle_all()
        self.close()

    def handle(self, device_type: str, device: int, snapshot: Snapshot) -> None:
        """Write the state when a request failed on a device: pickle first, then the run. Never raises.

        Args:
            device_type: "cuda" or "xpu".
            device: its number.
            snapshot: what `_snapshot()` gave then.
        """
        name = f"{device_type}:{device}"
        try:
            path = self._dump(name, snapshot)
        except Exception as error:  # see begin
            self._warn(f"Memory ran out on {name}, and what filled it could not be written", error)
            return
        try:
            self._import(device_type, snapshot)
        except Exception as error:  # see begin
            self._warn(f"Memory ran out on {name}; what filled it is in {path}, but not in the tab", error)
            return
        logger.warning(
            "Memory ran out on %s: what filled it is in %s\n"
            "  see it in the Memory tab of: tensorboard --logdir %s",
            name,
            path,
            shlex.quote(self.dir_name),
        )

    def failed(self, allocator: Allocator, device: int) -> None:
        """A request failed on a device, and the error is about to be raised. Never raises."""
        if getattr(self._busy, "now", False):
            return  # memory ran out while we write why it ran out
        self._busy.now = True
        try:
            if self._may_dump(f"{allocator.device_type}:{device}"):
                self.handle(allocator.device_type, device, allocator.snapshot())
        except Exception as error:  # see begin
            name = f"{allocator.device_type}:{device}"
            self._warn(f"Memory ran out on {name}, and its allocator's history could not be taken", error)
        finally:
            self._busy.now = False

    def _use(self, allocator: Allocator, max_entries: int, stacks: str) -> None:
        """Runs when the device is first used: what it raised would stop the training."""
        if self._closed:
            return
        try:
            self._switch.on(allocator, max_entries=max_entries, stacks=stacks)
            self._using.append(allocator)
            _active[id(self)] = self
            _observe(allocator)
        except Exception as error:  # see begin
            self._warn(f"The history of {allocator.device_type} could not be switched on", error)

    def _handle_all(self) -> None:
        """The error came to the block's end without an observer that saw it: XPU has none."""
        for allocator in list(self._using):
            self.failed(allocator, allocator.current_device())

    def _may_dump(self, name: str) -> bool:
        with self._lock:
            self._failures[name] += 1
            count = self._failures[name]
        if count == self._most_dumps + 1:
            logger.warning("Memory ran out on %s more than %d times; no more is written.", name, count - 1)
        return count <= self._most_dumps

    def _dump(self, name: str, snapshot: Snapshot) -> str:
        files.make_folder(self.dir_name)
        worker = self._worker_name or default_worker_name()
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%f")
        path = files.join(self.dir_name, f"oom-{folder_name(worker)}-{name.replace(':', '')}-{now}.pickle")
        files.write_whole(path, lambda stream: pickle.dump(snapshot, stream, protocol=4))
        self.dumps.append(path)
        return path

    def _import(self, device_type: str, snapshot: Snapshot) -> None:
        trace = trace_from_snapshot(snapshot, "out of memory", device_type)
        if self._writer is None:
            self._writer = RunWriter(self.dir_name, f"oom_{self._worker_name or default_worker_name()}")
        self._writer.write(trace)

    def _warn(self, what: str, error: Exception) -> None:
        logger.debug("%s", what, exc_info=error)
        text = str(error) if isinstance(error, MemPluginError) else f"{type(error).__name__}: {error}"
        logger.warning("%s. The error itself goes on unchanged.\n  reason: %s", what, text)


_active: dict[int, OomRecorder] = {}
"""The recorders that are not closed, oldest first."""

_observed: set[Callable[[Observer], None]] = set()
"""Allocators that call `_struck` already: torch cannot take an observer back, so each gets one for good."""


def _observe(allocator: Allocator) -> None:
    if allocator.observe is None:
        logger.warning(
            "torch does not tell when memory runs out on %s. It is recorded where the error leaves the block "
            "of `with record_on_oom(...):`, and nowhere else.",
            allocator.device_type,
        )
    elif allocator.observe not in _observed:
        _observed.add(allocator.observe)
        allocator.observe(partial(_struck, allocator))


def _struck(allocator: Allocator, device: int, asked: int, limit: int, free: int) -> None:  # noqa: ARG001
    """Runs in the thread that asked for memory, before torch raises: an error here would hide its own."""
    for recorder in _one_a_folder():
        recorder.failed(allocator, device)


def _one_a_folder() -> Iterator[OomRecorder]:
    """The active recorders, the newest alone where several write to one folder."""
    yield from {recorder.dir_name: recorder for recorder in list(_active.values())}.values()
