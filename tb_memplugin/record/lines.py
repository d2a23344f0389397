"""A recording of source lines: on the CPU by a dispatch mode, elsewhere by the allocator's history.

Call stacks are recorded as code objects while tracing, and converted to texts at the end. The ledger keeps
the blocks alive at the peak, even if the entries of that time are dropped.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from tb_memplugin.read.python_frames import MOST_FRAMES, note_on_cut
from tb_memplugin.record.guard import UNOWNED, Failed, Guard, call_all
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.storage_lifetimes import BEFORE, Block, Buffer, EntryKind, Ledger
from tb_memplugin.record.storages_alive import frames_of_other_threads
from tb_memplugin.record.torch_private.autograd import (
    NO_SEQUENCE,
    current_graph_task,
    current_node,
    node_number,
    run_backward,
    sequence_number,
)
from tb_memplugin.record.torch_private.dispatch import DISPATCH_FILES, HiddenFromDynamo, schema_of
from tb_memplugin.record.tracer.history import HistoryRecording
from tb_memplugin.record.tracer.layers import Layers
from tb_memplugin.record.tracer.mode import StorageMode, must_hide_from_dynamo
from tb_memplugin.record.tracer.recording import StorageRecording
from tb_memplugin.trace import Category, Kind, MemoryTrace, Note, Phase, events, start_state
from tb_memplugin.trace.frames import BACKWARD, THREAD
from tb_memplugin.trace.notes import HISTORY_FULL

NO_ROW = -1
NOT_KEPT = 0
"""The row of the empty stack, for allocations whose stack was not recorded or not kept."""

MOST_STACKS = 200_000
"""The largest number of distinct stacks; allocations from further stacks have none."""

_MOST_NODES = 400_000

_OURS = str(Path(__file__).parents[1])
_ENGINE: CodeType | None = getattr(run_backward, "__code__", None)

Key = tuple[Any, ...]


class PythonStacks:
    """Call stacks by row. A stack is stored as the addresses of its code objects, which are kept alive.

    In backward, the frames inside autograd's engine are followed by `(backward of NODE)` and then by the
    stack of the forward call that made the node, if that is known.

    Attributes:
        left_out: how many stacks were not kept, because there were `MOST_STACKS`.
        cut: how many of those kept were deeper than `MOST_FRAMES`.
    """

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {("", None, NO_ROW): NOT_KEPT}
        self._codes: dict[int, CodeType] = {}
        self.left_out = self.cut = 0

    def here(self, thread: str = "", node: str = "", forward: int = NO_ROW) -> int:
        """Return the row of the current stack without tb_memplugin's own frames; `NOT_KEPT` if not kept.

        Args:
            thread: the thread's name, "" for the main thread.
            node: the name of the autograd node that runs now, "" for none.
            forward: the row of the stack that made that node.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_dispatch(frame.f_code.co_filename):
            frame = frame.f_back
        innermost, engine = frame, _ENGINE if forward > NOT_KEPT else None
        key: list[Any] = []
        while frame is not None:
            code = frame.f_code
            if code is engine:
                break
            key.append(id(code))
            key.append(frame.f_lasti)
            frame = frame.f_back
        # Strings and None end a key, and never occur in its middle.
        ended = (node, forward) if frame is not None else (None, NO_ROW)
        row = self._rows.get(stack := (*key, thread, *ended))
        return row if row is not None else self._add(stack, innermost)

    def _add(self, key: Key, frame: FrameType | None) -> int:
        if len(self._rows) >= MOST_STACKS:
            self.left_out += 1
            return NOT_KEPT
        for _ in range(len(key) // 2 - 1):
            if frame is not None:
                self._codes[id(frame.f_code)] = frame.f_code
                frame = frame.f_back
        row = self._rows[key] = len(self._rows)
        return row

    def texts(self) -> tuple[tuple[str, ...], ...]:
        """Return all stacks in row order: `function file:line`, innermost first, then the thread's name."""
        frames: dict[tuple[int, int], str] = {}
        stacks: list[tuple[str, ...]] = []
        for *called, thread, node, forward in self._rows:
            stack = [self._text(frames, code, at) for code, at in zip(called[::2], called[1::2], strict=True)]
            if node is not None:
                stack += [f"{BACKWARD}{node})", *stacks[forward]]
            kept = [text for text in stack if text and not text.startswith(THREAD)]
            self.cut += len(kept) > MOST_FRAMES
            stacks.append((*kept[:MOST_FRAMES], *([f"{THREAD}{thread})"] if thread else [])))
        return tuple(stacks)

    def _text(self, frames: dict[tuple[int, int], str], code: int, at: int) -> str:
        text = frames.get((code, at))
        if text is None:
            text = frames[code, at] = _text(self._codes[code], at)
        return text


def _is_dispatch(file: str) -> bool:
    return file.startswith(_OURS) or file in DISPATCH_FILES


def _text(code: CodeType, at: int) -> str:
    """Return a frame's text from its code object and instruction offset; "" for dispatch and ours."""
    if _is_dispatch(code.co_filename):
        return ""
    lines = (line for first, end, line in code.co_lines() if first <= at < end)
    return f"{code.co_name} {code.co_filename}:{next(lines, None) or code.co_firstlineno}"


class NodeStacks:
    """The stacks that made the autograd nodes of one thread, by sequence number.

    Each thread counts its own sequence numbers: an operator's node gets the next one just before the
    operator is dispatched.
    """

    def __init__(self, sequence: int) -> None:
        self._until = array("q", [sequence])
        self._rows = array("q", [NO_ROW])
        self._made_by: list[Any] = [None]
        self.last = sequence

    def add(self, sequence: int, row: int, made_by: Any) -> None:
        """Record that an operator made the nodes from the last number to before `sequence`."""
        self.last = sequence
        self._until.append(sequence)
        self._rows.append(row)
        self._made_by.append(made_by)
        if len(self._rows) > _MOST_NODES:
            half = _MOST_NODES // 2
            del self._until[:half], self._rows[:half], self._made_by[:half]

    def maker_of(self, sequence: int) -> tuple[int, Any]:
        """Return the row of the stack that made a node, and the operator; (`NO_ROW`, None) if not known."""
        index = bisect_right(self._until, sequence)
        if 0 < index < len(self._rows):
            return self._rows[index], self._made_by[index]
        return NO_ROW, None


def forward_of(node: Any, mine: NodeStacks, every: list[NodeStacks]) -> int:
    """Return the row of the stack of the forward call that made an autograd node, `NO_ROW` if not known.

    A node does not know its thread. If several threads made nodes, the operator whose name matches the
    node's is searched, first on this thread.
    """
    sequence = node_number(node)
    if sequence == NO_SEQUENCE:
        return NO_ROW
    if len(every) == 1:
        return mine.maker_of(sequence)[0]
    name = node.name()
    here = mine.maker_of(sequence)
    if _fits(name, here[1]):
        return here[0]
    elsewhere = [stacks.maker_of(sequence) for stacks in every if stacks is not mine]
    rows = [row for row, made_by in elsewhere if _fits(name, made_by)]
    return rows[0] if len(rows) == 1 else NO_ROW


def _fits(name: str, made_by: Any) -> bool:
    """Whether a node's name (`LogSoftmaxBackward0`) matches an operator's (`aten::_log_softmax`)."""
    operator = str(getattr(schema_of(made_by), "name", "")).rpartition("::")[2].replace("_", "").lower()
    return bool(operator) and name.lower().partition("backward")[0] == operator


class LineLedger(Ledger):
    """A ledger that knows the blocks at each device's true peak, however few entries it keeps.

    A dropped entry is first applied to the state before the oldest entry. If that state is the peak of all
    entries so far, including those still kept, its blocks are saved. This happens at most once each time
    that all entries have been replaced.

    Attributes:
        allocated: the sum of the bytes of all allocations, by device row.
        peaks: the highest live bytes, by device row.
        stack_of_now: functions that return the row of a thread's current stack, by thread ident.
    """

    def __init__(self, max_entries: int, device_type: str) -> None:
        super().__init__(max_entries, device_type)
        self.allocated: dict[int, int] = {}
        self.peaks: dict[int, int] = {}
        self.stack_of_now: dict[int, Callable[[], int]] = {}
        self._is_late = False
        self._before: dict[int, Block | Buffer] = {}
        self._level_before: dict[int, int] = {}
        self._set_aside: dict[int, tuple[int, list[Block | Buffer]]] = {}

    def begin(self) -> int:
        """See `Ledger`. The blocks alive now are also the state before the first entry."""
        begun = super().begin()
        self.peaks = dict(enumerate(self.levels))
        for block in self.blocks.values():
            self._before[id(block)] = block
            self._level_before[block.device] = self._level_before.get(block.device, 0) + block.bytes
        return begun

    def blocks_at_dropped_peak(self, device: int) -> list[Block | Buffer] | None:
        """Return the blocks at a device's peak if its entry was dropped; None if it may still be kept."""
        level, blocks = self._set_aside.get(device, (-1, []))
        return blocks if level == self.peaks.get(device, 0) else None

    def blocks_of(
        self, storages: Iterable[torch.UntypedStorage], *, late: bool = False
    ) -> list[Block | Buffer]:
        """See `Ledger`. Blocks that are found late get no stack: the current one did not allocate them."""
        self._is_late = late
        try:
            return super().blocks_of(storages, late=late)
        finally:
            self._is_late = False

    def write(
        self,
        kind: EntryKind,
        block: Block | Buffer | None,
        row: int,
        phase: Phase,
        *,
        began: int = 0,
        now: int = 0,
    ) -> int:
        """Add an entry. An entry that is dropped for it is applied to the state before the oldest one."""
        entries = self.entries
        if len(entries) == entries.maxlen:
            _, oldest_kind, oldest_block, *_ = entries[0]
            if oldest_block is not None:
                self._apply(oldest_kind, oldest_block)
        if kind is EntryKind.ALLOC and block is not None:
            self.allocated[block.device] = self.allocated.get(block.device, 0) + block.bytes
        return super().write(kind, block, row, phase, began=began, now=now)

    def pass_through(
        self, reports: Iterable[tuple[int, int]], made_by: Any, row: int, phase: Phase, *, recomputing: bool
    ) -> int:
        """See `Ledger`."""
        buffers: list[Buffer] = []
        top = self.level
        for now, size in reports:
            if size > 0:
                buffer = self.allocate_buffer(size, made_by, row, phase, recomputing=recomputing, now=now)
                buffer.category = Category.TEMPORARY
                buffers.append(buffer)
                top = max(top, self.level)
            else:
                self.free(buffers.pop(), row, phase, now)
        return top

    def _apply(self, kind: EntryKind, block: Block | Buffer) -> None:
        device = block.device
        level = self._level_before.get(device, 0)
        if level == self.peaks.get(device, 0) and self._set_aside.get(device, (-1,))[0] < level:
            alive = [before for before in self._before.values() if before.device == device]
            self._set_aside[device] = (level, alive)
        if kind is EntryKind.ALLOC:
            self._before[id(block)] = block
            self._level_before[device] = level + block.bytes
        elif self._before.pop(id(block), None) is not None:
            self._level_before[device] = level - block.bytes

    def _grow(self, block: Block | Buffer) -> None:
        super()._grow(block)
        if block.serial > BEFORE:
            stack_of_now = None if self._is_late else self.stack_of_now.get(threading.get_ident())
            block.stack = NOT_KEPT if stack_of_now is None else stack_of_now()
        level = self.levels[block.device]
        if level > self.peaks.get(block.device, 0):
            self.peaks[block.device] = level


SOURCE = "LineTracer"


@dataclass(frozen=True, slots=True)
class RecordedLines:
    """The result of a recording.

    `total_allocated` is the bytes of all allocations between start and stop, by device row. `dropped_peaks`
    are traces for devices whose peak is older than the kept events: they have no events, and their start
    state is the blocks alive at the peak. `knows_threads` tells whether stacks contain their thread.
    """

    trace: MemoryTrace
    total_allocated: dict[int, int]
    dropped_peaks: dict[int, MemoryTrace]
    knows_threads: bool


class StorageLines(StorageRecording):
    """Records the storages of one device type, on all threads, with stacks.

    Args:
        max_events: how many entries to keep. Peaks and totals count all entries.
    """

    def __init__(self, device_type: str, max_events: int, guard: Guard = UNOWNED) -> None:
        super().__init__(device_type, max_events, guard)
        self._stacks = RecordedStacks()
        self._threads = ThreadWatch(self._enter_thread, guard.end)
        self._entered: list[LineMode] = []
        self._unmet = 0

    def begin(self) -> None:
        """Record the start state and begin recording."""
        self._unmet = len(frames_of_other_threads())
        super().start({}, [])
        with self._abandoned_on_error():
            self._threads.start()

    def abandon(self) -> None:
        """Remove all that is ours, without a result."""
        call_all(self._threads.stop, *(mode.leave for mode in self._entered), super().abandon)

    def end(self) -> RecordedLines:
        """End the recording and return its result."""
        with self._abandoned_on_error():
            return self._end()

    def _end(self) -> RecordedLines:
        self._threads.stop()
        self._lines.stack_of_now.clear()
        result = super().stop({}, [])
        for mode in self._entered:
            mode.leave()
        stacks = self._stacks.stacks.texts()
        trace = replace(result.trace, source=SOURCE, stacks=stacks)
        trace = replace(trace, notes=(*trace.notes, *self._line_notes(trace)))
        dropped_peaks = {
            row: _at_peak(trace, blocks)
            for row in range(len(trace.devices))
            if (blocks := self._lines.blocks_at_dropped_peak(row)) is not None
            and self._lines.peaks.get(row, 0) > int(trace.live(row).max())
        }
        return RecordedLines(trace, dict(self._lines.allocated), dropped_peaks, knows_threads=True)

    def _open_ledger(self) -> LineLedger:
        self._lines = LineLedger(self._max_events, self._device_type)
        return self._lines

    def _mode(self) -> LineMode:
        return line_mode(self.layers, self._lines, self._stacks)

    def _has_blind_spots(self) -> bool:
        return bool(self._unmet) or super()._has_blind_spots()

    def _enter_thread(self) -> None:
        with self._lines.lock:
            mode = self._mode()
            self._entered.append(mode)
        mode.enter()

    def _line_notes(self, trace: MemoryTrace) -> Iterator[Note]:
        stacks = self._stacks.stacks
        if self._unmet:
            yield Note(
                f"{self._unmet:,} other threads were running when tracing began. What such a thread "
                "allocates counts from the first layer that it calls; at the end, at least "
                f"{self._missed:,} bytes are alive that are not counted.",
                "other_threads",
                self._missed,
            )
        if stacks.left_out:
            yield Note(
                f"{stacks.left_out:,} allocations have no line: there were more than {MOST_STACKS:,} "
                f"different call stacks. {_without_stack(trace):,} bytes are without a line.",
                "no_line",
                _without_stack(trace),
            )
        if stacks.cut:
            yield note_on_cut(stacks.cut, trace)


class HistoryLines(HistoryRecording):
    """Records a device whose allocator keeps a history with Python stacks: CUDA, ROCm and XPU."""

    STARTS_BY = "LineTracer.start_tracing"
    NOT_IN_USE_FIX = "Create a tensor on the device before tracing starts."

    def begin(self) -> None:
        """Turn on the history.

        Raises:
            MemPluginError: the process does not use the device yet.
        """
        super().start({}, [])

    def end(self) -> RecordedLines:
        """End the recording and return its result from the allocator's history."""
        result = super().stop({}, [])
        trace = _with_forward_lines(replace(result.trace, source=SOURCE))
        lost = tuple(self._lost(result.peak_allocated, trace))
        notes = [note for note in trace.notes if not (lost and note.code == HISTORY_FULL)]
        trace = replace(trace, notes=(*notes, *self._history_notes(trace), *lost))
        born = trace.events.kind == Kind.ALLOC
        total = {
            row: int(trace.events.bytes[born & (trace.events.device == row)].sum())
            for row in range(len(trace.devices))
        }
        return RecordedLines(trace, total, {}, knows_threads=False)

    def _history_notes(self, trace: MemoryTrace) -> Iterator[Note]:
        if not self._is_fresh:
            yield Note(
                "The allocator's history was already on: lines of older blocks that it knows are shown too, "
                f"for {int(trace.start.bytes[trace.start.stack >= 0].sum()):,} bytes.",
                "history_was_on",
                int(trace.start.bytes[trace.start.stack >= 0].sum()),
            )

    def _lost(self, counted_peak: int, trace: MemoryTrace) -> Iterator[Note]:
        kept = max((int(trace.live(row).max()) for row in range(len(trace.devices))), default=0)
        if counted_peak > kept:
            yield Note(
                f"The allocator counted a peak of {counted_peak:,} bytes, but the history has "
                f"overwritten some of its entries (max_events {self._max_events:,}). The lines are "
                f"those of {kept:,} bytes, the highest moment of the entries that were kept, and the "
                "total counts only kept entries. Use a larger max_events.",
                HISTORY_FULL,
                counted_peak,
            )


def _without_stack(trace: MemoryTrace) -> int:
    blocks = trace.allocations
    return int(blocks.bytes[(blocks.born >= 0) & (blocks.stack == NOT_KEPT)].sum())


def _at_peak(trace: MemoryTrace, blocks: Sequence[Block | Buffer]) -> MemoryTrace:
    return MemoryTrace(
        source=trace.source,
        events=events([]),
        start=start_state(
            [block.bytes for block in blocks],
            device=[block.device for block in blocks],
            address=np.array([block.address for block in blocks], np.uint64),
            stack=[block.stack for block in blocks],
        ),
        devices=trace.devices,
        steps=trace.steps,
        stacks=trace.stacks,
        notes=trace.notes,
    )


def _with_forward_lines(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace, with the forward call's stack for events in backward that have no own stack."""
    alone = (trace.events.stack < 0) & (trace.events.forward >= 0)
    if not alone.any():
        return trace
    stack = np.where(alone, trace.events.forward, trace.events.stack).astype(np.int32)
    return replace(trace, events=replace(trace.events, stack=stack))


def recording_device(device: torch.device | None) -> torch.device:
    """Return the given device, else the accelerator that this process uses, else the CPU."""
    if device is not None:
        return device
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_available() and backend.is_initialized():
            return torch.device(name)
    return torch.device("cpu")


_NOT_RECORDED = -2


@dataclass(slots=True)
class RecordedStacks:
    """The stacks of all threads, and the stacks that made each thread's autograd nodes."""

    stacks: PythonStacks = field(default_factory=PythonStacks)
    nodes: list[NodeStacks] = field(default_factory=list)


class LineMode(StorageMode):
    """A mode that gives every block the row of the stack that allocated it. Each thread has its own mode.

    Args:
        ledger: the recording's ledger, which requests stacks from the mode.
    """

    def __init__(self, layers: Layers, ledger: LineLedger, stacks: RecordedStacks) -> None:
        super().__init__(layers)
        ledger.stack_of_now[threading.get_ident()] = self._stack
        self._stacks = stacks
        self._nodes = NodeStacks(sequence_number())
        stacks.nodes.append(self._nodes)
        thread = threading.current_thread()
        self._thread = "" if thread is threading.main_thread() else thread.name
        self._row = _NOT_RECORDED

    def _note(self, out: Any, func: Any, began_ns: int) -> None:
        self._row = _NOT_RECORDED
        super()._note(out, func, began_ns)
        sequence = sequence_number()
        if sequence != self._nodes.last:
            self._nodes.add(sequence, self._stack(), func)
        self._row = _NOT_RECORDED  # an allocation before the next operator is noted takes a new stack

    def _stack(self) -> int:
        """Return the row of this operator's stack, which is recorded when first requested."""
        if self._row == _NOT_RECORDED:
            node = current_node() if current_graph_task() != -1 else None
            forward = NO_ROW if node is None else forward_of(node, self._nodes, self._stacks.nodes)
            name = node.name() if node is not None and forward > NOT_KEPT else ""
            self._row = self._stacks.stacks.here(self._thread, name, forward)
        return self._row


class LineModeBesideDynamo(HiddenFromDynamo, LineMode):
    """A `LineMode` that is hidden from dynamo; see `tracer.mode.StorageModeBesideDynamo`."""

    __torch_dispatch__ = LineMode.__torch_dispatch__


def line_mode(layers: Layers, ledger: LineLedger, stacks: RecordedStacks) -> LineMode:
    """Return a new mode for the calling thread."""
    return (LineModeBesideDynamo if must_hide_from_dynamo() else LineMode)(layers, ledger, stacks)


Hook = Callable[[FrameType, Any, Any], object]
"""A function for `threading.setprofile`."""


class ThreadWatch:
    """Calls a function once on every thread except the one that creates this object, until `stop`.

    A thread that `threading` starts is detected at its first call, by `threading.setprofile`, before its own
    code runs; a profile function that was already set still works. A thread that is already running is
    detected when it calls a layer.

    Args:
        on_thread: the function, called on each newly detected thread.
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
