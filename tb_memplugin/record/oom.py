"""`record_on_oom`: write what filled the memory when an out-of-memory error is raised."""

from __future__ import annotations

import logging
import os
import pickle
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from types import TracebackType
from typing import Literal

import torch

from tb_memplugin.errors import MemPluginError, is_of_signal
from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.record.arguments import default_worker_name
from tb_memplugin.record.guard import UNOWNED, Guard, guarded
from tb_memplugin.record.history.allocators import (
    SWITCH,
    Allocator,
    HistorySwitch,
    Observer,
    Snapshot,
    allocators,
)
from tb_memplugin.record.own_names import with_own_names
from tb_memplugin.record.whole_device.card import CardMemory, card_memory
from tb_memplugin.record.whole_device.window import WholeReading, whole_devices
from tb_memplugin.store import files
from tb_memplugin.store.paths import folder_name
from tb_memplugin.store.worker_folder import workers_of_process
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.labels import DUMP_OF

logger = logging.getLogger("tb_memplugin")

MOST_ENTRIES = 100_000
"""History entries kept per device: about ten steps of a large model, in less than 1 GB of host memory."""

MOST_DUMPS = 3
"""The largest number of files per device. One is too few: cuDNN's autotuner requests workspaces that may
not fit and catches the error itself, as do loops that search for a batch size, so the first failure may not
be the one that ends the training. Many are too many: each dump stops the process for seconds."""


def record_on_oom(
    dir_name: str | os.PathLike[str],
    worker_name: str | None = None,
    *,
    max_entries: int = MOST_ENTRIES,
    stacks: Literal["python", "all"] = "python",
    most_dumps: int = MOST_DUMPS,
) -> OomRecorder:
    """Record the allocator's history from now on, and write it when an out-of-memory error occurs.

    One call at the top of a script is enough; used as a context manager, it ends with its block. When an
    allocation fails, the state at that moment is written to the folder twice: as a snapshot pickle
    (`oom-….pickle`) and as a run of the Memory tab. The out-of-memory error is raised unchanged; errors of
    the recorder itself are logged as warnings. A history that is already on is used and left on.

    Args:
        dir_name: the logdir, or a run's folder below it: a local path, or a URL that fsspec opens.
        worker_name: a name that is unique per process. Default: `rank<N>` under torchrun, else
            `<host>_<pid>`.
        max_entries: allocator events to keep per device. Older events are dropped, but blocks that they
            allocated and that are still alive are kept. Each keeps its stack, about 2 kB of host memory for
            100 frames, and the code in it: functions that a program compiles and drops stay until then.
            torch has no limit in bytes.
        stacks: "python", or "all" to include C++ frames, with which writing takes minutes.
        most_dumps: the largest number of files per device; later failures are only counted.

    Raises:
        ValueError: `max_entries` or `most_dumps` is below 1, or `stacks` has another value.

    Example:
        >>> record_on_oom("runs/a")
        >>> train()
    """
    if max_entries < 1 or most_dumps < 1:
        raise ValueError(f"max_entries={max_entries} and most_dumps={most_dumps} must be at least 1")
    if stacks not in ("python", "all"):
        raise ValueError(f'stacks={stacks!r}; give "python" or "all"')
    usable = allocators()
    if not usable:
        logger.warning(
            "record_on_oom has no effect here: no CUDA or XPU device with torch's own caching "
            "allocator was found.\n  fix: remove record_on_oom here, or run on a machine with such a "
            "device."
        )
    recorder = OomRecorder(files.absolute(os.fsdecode(dir_name)), worker_name, most_dumps)
    recorder.begin(usable, max_entries=max_entries, stacks=stacks)
    return recorder


Program = tuple[Mapping[str, torch.nn.Module], Sequence[torch.optim.Optimizer]]
"""(models by the first part of their names, "" for none; optimizers)."""

DUMPS = "oom_"
"""What the names of workers begin with that have dumps; the worker's own name follows."""


class OomRecorder:
    """The recorder that `record_on_oom` returns: a context manager that can also be ended with `close()`.

    It records until it is closed, even if no reference to it is kept. It cannot be reopened.
    """

    def __init__(self, dir_name: str, worker_name: str | None = None, most_dumps: int = MOST_DUMPS) -> None:
        self.dir_name = dir_name
        self.dumps: list[str] = []
        """The pickles written so far."""
        self.program: Callable[[], Program] | None = None
        """Returns the models and optimizers, whose names the dumps get. None if they are not known."""
        self._worker_name = worker_name
        self._most_dumps = most_dumps
        self._writer: RunWriter | None = None
        self._dump_of = ""
        self._guard = Guard("What fills the memory may not be written")
        self._switch: HistorySwitch = SWITCH
        self._using: list[Allocator] = []
        self._failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._busy = threading.local()
        self._closed = False

    def fail(self, where: str, error: BaseException) -> None:
        """Log an error of the recorder itself. The next failed allocation is handled."""
        self._guard.end(where, error)

    @guarded("record_on_oom")
    def begin(
        self,
        usable: Sequence[Allocator],
        *,
        max_entries: int = MOST_ENTRIES,
        stacks: str = "python",
        switch: HistorySwitch = SWITCH,
    ) -> None:
        """Turn on each allocator's history as soon as its device type is in use. Never raises."""
        self._switch = switch
        for allocator in usable:
            try:
                allocator.when_in_use(lambda allocator=allocator: self._use(allocator, max_entries, stacks))  # type: ignore[misc]
            except Exception as error:  # the training goes on, whatever happens to us
                self._warn(f"The history of {allocator.device_type} could not be turned on", error)

    @guarded("the end of record_on_oom")
    def close(self) -> None:
        """Stop recording and turn off the histories that it turned on. Safe to call twice. Never raises."""
        self._closed = True
        _active.pop(id(self), None)
        while self._using:
            allocator = self._using.pop()
            try:
                self._switch.off(allocator)
            except Exception as error:  # see begin
                self._warn(f"The history of {allocator.device_type} could not be turned off", error)

    def __enter__(self) -> OomRecorder:
        return self

    @guarded("the end of record_on_oom")
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError) and not self._failures:
            self._handle_all()
        self.close()

    @guarded("a failed allocation")
    def handle(
        self, device_type: str, device: int, snapshot: Snapshot, card: CardMemory | None = None
    ) -> None:
        """Write the state of a device on which an allocation failed: the pickle, then the run. Never raises.

        Args:
            device_type: "cuda" or "xpu".
            device: the device's index.
            snapshot: what `_snapshot()` returned at that moment.
            card: what filled the whole device then, None if not known.
        """
        name = f"{device_type}:{device}"
        try:
            path = self._dump(name, snapshot)
        except Exception as error:  # see begin
            self._warn(f"Memory ran out on {name}, but what filled it could not be written", error)
            return
        try:
            self._import(device_type, snapshot, {} if card is None else {name: card})
        except Exception as error:  # see begin
            message = (
                f"Memory ran out on {name}. What filled it was written to {path}, but could not be added"
            )
            self._warn(f"{message} to the Memory tab", error)
            return
        logger.warning(
            "Memory ran out on %s: what filled it was written to %s\n  see it in the Memory tab: "
            "tensorboard --logdir %s",
            name,
            path,
            shlex.quote(self.dir_name),
        )

    @guarded("a failed allocation")
    def failed(self, allocator: Allocator, device: int) -> None:
        """Handle a failed allocation, just before torch raises the error. Never raises itself."""
        if getattr(self._busy, "now", False):
            return  # memory ran out again while the dump is written
        self._busy.now = True
        try:
            if self._may_dump(f"{allocator.device_type}:{device}"):
                card = self._card(f"{allocator.device_type}:{device}")
                self.handle(allocator.device_type, device, allocator.snapshot(), card)
        except Exception as error:  # see begin
            name = f"{allocator.device_type}:{device}"
            self._warn(f"Memory ran out on {name}, but its allocator's history could not be read", error)
        finally:
            self._busy.now = False

    @guarded("record_on_oom")
    def _use(self, allocator: Allocator, max_entries: int, stacks: str) -> None:
        """Turn on the history when the device is first used. Never raises, to not stop the training."""
        if self._closed:
            return
        try:
            self._switch.on(allocator, max_entries=max_entries, stacks=stacks)
            self._using.append(allocator)
            _active[id(self)] = self
            _observe(allocator)
        except Exception as error:  # see begin
            self._warn(f"The history of {allocator.device_type} could not be turned on", error)

    @guarded("a failed allocation")
    def _handle_all(self) -> None:
        """Handle an error that reached the end of the block unobserved, as on XPU, which has no observers."""
        for allocator in list(self._using):
            self.failed(allocator, allocator.current_device())

    def _may_dump(self, name: str) -> bool:
        with self._lock:
            self._failures[name] += 1
            count = self._failures[name]
        if count == self._most_dumps + 1 and self.dumps:
            logger.warning(
                "Memory ran out on %s more than %d times; later failures are not written.", name, count - 1
            )
        return count <= self._most_dumps

    def _dump(self, name: str, snapshot: Snapshot) -> str:
        files.make_folder(self.dir_name)
        worker = self._worker_name or default_worker_name()
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%f")
        path = files.join(self.dir_name, f"oom-{folder_name(worker)}-{name.replace(':', '')}-{now}.pickle")
        files.write_new(path, lambda stream: pickle.dump(snapshot, stream, protocol=4))
        self.dumps.append(path)
        return path

    def _card(self, name: str) -> CardMemory | None:
        try:
            return card_memory(name)
        except Exception as error:  # see begin
            self._warn(f"Memory ran out on {name}, but what others have there could not be read", error)
            return None

    def _import(self, device_type: str, snapshot: Snapshot, cards: Mapping[str, CardMemory]) -> None:
        trace = self._named(trace_from_snapshot(snapshot, "out of memory", device_type))
        if self._writer is None:
            worker = self._worker_name or default_worker_name()
            workers = workers_of_process(self.dir_name)  # of a handler or monitor that has another name, too
            others = [name for name in workers if not name.startswith(DUMPS)]
            self._dump_of = worker if worker in others else next(iter(others), worker)
            self._writer = RunWriter(self.dir_name, f"{DUMPS}{worker}", self._guard.end_flush)
        totals = {name: card.total for name, card in cards.items()}
        trace = replace(
            trace,
            devices=tuple(
                replace(device, capacity=totals.get(device.name, device.capacity)) for device in trace.devices
            ),
            properties={**trace.properties, DUMP_OF: self._dump_of},
            whole_devices=whole_devices(None, WholeReading(cards), trace),
        )
        self._writer.write(trace)

    def _named(self, trace: MemoryTrace) -> MemoryTrace:
        """Return a trace with the modules that the program has, or at least those that its stacks show."""
        if self.program is not None:
            try:
                return with_own_names(trace, *self.program())
            except Exception as error:  # see begin
                self._warn("Memory ran out, but the modules of the program could not be read", error)
        return with_inferred_layers(trace)

    def _warn(self, message: str, error: Exception) -> None:
        if is_of_signal(error):
            raise error
        logger.debug("%s", message, exc_info=error)
        text = str(error) if isinstance(error, MemPluginError) else f"{type(error).__name__}: {error}"
        self._guard.warn(
            f"{message}. The out-of-memory error itself is raised unchanged.\n  reason: {text}", once=message
        )


_active: dict[int, OomRecorder] = {}
"""The recorders that are open, oldest first, by id."""

_observed: set[Callable[[Observer], None]] = set()
"""The `observe` functions to which `_struck` was already passed: torch cannot remove an observer again."""


def _observe(allocator: Allocator) -> None:
    if allocator.observe is None:
        logger.warning(
            "torch does not report when memory runs out on %s. It is recorded only where the error "
            "leaves the block of `with record_on_oom(...):`.",
            allocator.device_type,
        )
    elif allocator.observe not in _observed:
        _observed.add(allocator.observe)
        allocator.observe(partial(_struck, allocator))


def _struck(allocator: Allocator, device: int, asked: int, limit: int, free: int) -> None:  # noqa: ARG001
    """Notify the recorders in the allocating thread, before torch raises. Errors here would hide torch's.

    Of several recorders that write to the same folder, only the newest does.
    """
    try:
        for recorder in {recorder.dir_name: recorder for recorder in list(_active.values())}.values():
            recorder.failed(allocator, device)
    except BaseException as error:
        UNOWNED.end("a failed allocation", error)
