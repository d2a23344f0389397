"""Join two sources on one thread's memory: the allocator's reports, and storages that appear and are freed.

The reports contain every byte in order, but not its owner; the results of operators and weak references
identify the storages. Both are matched by size within one operator, so levels and peaks are always those of
the reports; only the owners of blocks of the same size can be mistaken for one another.

Record every allocation and free of torch's CPU allocator while an operator runs, in order.

The allocator reports to the profiler that is on. torch's old profiler (`torch.autograd.profiler_legacy`)
starts and ends within two microseconds, so it is turned on for one operator at a time, with its callbacks for
operators off; it is never on while the user's code runs. It reports sizes and times, but no addresses. If
another profiler records on the thread, it stays off; if one starts (inside an operator written in Python), it
ends.

It must not be left on, nor be read while it runs: `_disable_profiler_legacy` would then leave its callback
behind, and autograd would restore the thread's state from the start of the backward. Both make the next
profiler crash.

Python numbers that autograd saves for backward as tensors, such as the 2 in `x * 2`.

torch makes a tensor of the number, saves it with the node, and only then calls a dispatch mode, which
receives the number and makes a second tensor of it. The allocator reports only the second one. So its free is
delayed until the result has its node: if the node saved the number, the block lives as long as the saved
tensor, else it was freed at the reported time.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import time_ns
from typing import Any

import torch
from torch.overrides import has_torch_function

from tb_memplugin.record.guard import UNOWNED, Failed, call_all, entry, guarded
from tb_memplugin.record.profiler_windows import can_listen
from tb_memplugin.record.storage_lifetimes import Block, Buffer, Ledger
from tb_memplugin.record.tensor_metadata import dense
from tb_memplugin.record.tensors_inside import isinstance_of
from tb_memplugin.record.torch_private.autograd import saved_names
from tb_memplugin.record.torch_private.dispatch import call_in_dispatch, schema_of, without_torch_functions
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
from tb_memplugin.record.torch_private.tensors import needs_grad, storage_key
from tb_memplugin.trace import Category, Phase

NUMBER_BYTES: dict[type, int] = {float: 8, int: 8, bool: 1, complex: 16}
"""Bytes of a number of each type as a tensor."""

WaitingNumber = tuple[Buffer, int, int, Phase]
"""(buffer of the second tensor, time of its free in epoch nanoseconds, module's row or -1, phase)."""

_tensor_positions: dict[Any, tuple[int, ...]] = {}


def numbers_in(operator: Any, args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each number that is passed for a tensor argument, if autograd may save it."""
    if not torch.is_grad_enabled():
        return []
    positions = _tensor_positions.get(operator)
    if positions is None:
        positions = _tensor_positions[operator] = _positions_of_tensors(operator)
    sizes = [
        NUMBER_BYTES[type(args[at])] for at in positions if at < len(args) and type(args[at]) in NUMBER_BYTES
    ]
    return sizes if sizes and any(map(_may_have_node, args)) else []


def _may_have_node(argument: Any) -> bool:
    """Whether autograd may make a node for an operator with this argument."""
    if isinstance_of(argument, torch.Tensor):
        return bool(needs_grad(argument))
    return isinstance(argument, list | tuple)


def _positions_of_tensors(operator: Any) -> tuple[int, ...]:
    """Return the positions of an operator's tensor arguments; none if it has fewer than two.

    Only in an operator with several tensor arguments is a number converted to a tensor.
    """
    schema = schema_of(operator)
    arguments = enumerate(schema.arguments) if schema is not None else ()
    positions = tuple(
        at for at, argument in arguments if str(argument.type) == "Tensor" and not argument.kwarg_only
    )
    return positions if len(positions) > 1 else ()


class SavedNumbers:
    """The numbers of one thread's last operator, until its result has an autograd node.

    Args:
        ledger: the ledger in which their frees are recorded.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.waiting: list[WaitingNumber] = []
        self._result: Callable[[], torch.Tensor | None] = _none

    def wait_for(self, result: Any) -> None:
        """Set the result of the operator that received the numbers."""
        self._result = weakref.ref(result) if type(result) is torch.Tensor else _none

    def settle(self) -> Iterator[int]:
        """Record the free of each number that was not saved, and yield its module's row.

        The caller must hold the ledger's lock.
        """
        waiting, self.waiting = self.waiting, []
        kept = [
            storage for storage in _saved(self._result()) if storage_key(storage) not in self._ledger.blocks
        ]
        self._result = _none
        for buffer, freed_ns, row, phase in waiting:
            mine = next((storage for storage in kept if storage.nbytes() == buffer.bytes), None)
            if mine is None:
                self._ledger.free(buffer, row, phase, freed_ns)
                yield row
            else:
                kept.remove(mine)
                self._ledger.held_by(buffer, mine)


def _none() -> None:
    return None


def _saved(result: torch.Tensor | None) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the numbers that a result's node saved."""
    node = result.grad_fn if result is not None else None
    if node is None:
        return
    for name in saved_names(type(node)):
        try:
            tensor = getattr(node, name).data
        except (AttributeError, RuntimeError):
            continue  # nothing was saved, or it was freed already
        if isinstance(tensor, torch.Tensor) and not tensor.ndim:
            yield tensor.untyped_storage()


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
        self._began_ns = 0
        self._readers: list[deque[Reported]] = []

    def begin(self, reader: deque[Reported]) -> bool:
        """Begin to fill a queue. Return whether reports will come: not if another profiler is on."""
        if self._on:  # an outer tracer is on, and torch has only made tensors of numbers until this call
            self._disable()
        if not self._on and not _profiler_enabled():
            self._on = True  # first: a signal may raise an error between any two lines
            self._began_ns = time_ns()
            _enable(_CONFIG)
            _record_functions(False)
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
            if _profiler_type().value == _LEGACY:
                _record_functions(True)
                lists = _disable()
            self._on = False  # last, see `begin`
        return lists

    def _pass_on(self, lists: list[list[Any]], now: int) -> None:
        """Pass on the reports. `now` is before the last mark by as long as the thread waited there."""
        events = lists[0]
        if len(lists) == 1:
            mark = events[-1]
        else:
            mark = next(each[-1] for each in lists if each and each[-1].kind() == "mark")
            events = [event for each in lists for event in each]
        reports = [
            (max(self._began_ns, now - int(event.cpu_elapsed_us(mark) * 1000)), size)
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

    fail = staticmethod(UNOWNED.end)

    def start(self) -> None:
        """Stop the log of this thread."""
        log: AllocatorLog | None = getattr(_logs, "log", None)
        if log is not None:
            log.stop()

    def stop(self) -> None:
        """Do nothing: the log starts again with the next operator."""


_Tensor, _Parameter, _strided = torch.Tensor, torch.nn.Parameter, torch.strided
_TEMPORARY = Category.TEMPORARY
_WHERE = "the allocator's reports of an operator"
_NEVER = 1 << 62


@dataclass(slots=True)
class Origin:
    """The context of an operator: module's row or -1, phase, the operator, and whether it recomputes."""

    row: int
    phase: Phase
    made_by: Any
    recomputing: bool


@dataclass(slots=True)
class ResultStorage:
    """A storage in an operator's result that is new, or whose size differs from that of its block (`was`).

    `tensor` is the tensor of the result that lies in it, None if that is not known.
    """

    storage: torch.UntypedStorage
    bytes: int
    was: Block | Buffer | None = None
    tensor: torch.Tensor | None = None


@dataclass(slots=True)
class Counted:
    """Counts for one operator: allocations, their bytes, frees, and the highest level (-1 for none)."""

    allocations: int = 0
    bytes: int = 0
    frees: int = 0
    top: int = -1


_NOTHING = Counted()

_QUIET = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "_reshape_alias", "as_strided", "alias", "detach", "t", "transpose",
        "permute", "expand", "select", "slice", "squeeze", "unsqueeze", "unbind", "split", "split_with_sizes",
        "_local_scalar_dense",
    )
)  # fmt: skip
"""Operators that allocate nothing for a plain tensor: views, and reading the number in a tensor."""

_quiet: dict[Any, bool] = {}


def _is_quiet(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator allocates nothing, so that the allocator need not report."""
    quiet = _quiet.get(operator)
    if quiet is None:
        schema = schema_of(operator)
        quiet = _quiet[operator] = schema is not None and schema.name in _QUIET
    if not (quiet and args):
        return False
    tensor = args[0]
    kind = type(tensor)
    with without_torch_functions():
        return (kind is _Tensor or kind is _Parameter) and tensor.layout is _strided and not tensor.is_nested


def _has_torch_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether to call an operator would call a `__torch_function__`: of a mode, or of an argument's class.

    Else it is called as it is: `call_in_dispatch` attributes a warning of it to the line that calls.
    """
    if has_torch_function((*args, *kwargs.values())):
        return True
    return any(has_torch_function(each) for each in args if type(each) is list or type(each) is tuple)


@dataclass(slots=True)
class Unseen:
    """What was not reported or not identified, for the trace's notes.

    `operators` counts operators without reports, because another profiler recorded or torch does not
    support it, and `results` are the bytes of what they returned. `frees` are bytes freed inside operators,
    of unknown blocks. `kept` are bytes that an operator allocated but neither returned in a tensor nor freed:
    they count only during that operator. `excess` is (a peak, how many of its bytes at most are there only
    because a dispatch mode is on); `higher_peak` is the highest level that may be reached without one, -1 if
    none is known.
    """

    operators: int = 0
    results: int = 0
    frees: int = 0
    kept: int = 0
    excess: tuple[int, int] = (-1, 0)
    higher_peak: int = -1


class KernelMemory:
    """Writes the memory of one thread into a ledger from both sources. Must be created on that thread.

    Args:
        numbers: the thread's numbers that autograd may have saved.
        failed: is called with errors of ours; those of operators are raised.
    """

    def __init__(
        self, ledger: Ledger, unseen: Unseen, numbers: SavedNumbers, failed: Failed = UNOWNED.end
    ) -> None:
        self._failed = failed
        self._ledger, self._unseen, self._numbers = ledger, unseen, numbers
        self._on_cpu = ledger.device_type == "cpu"
        self._log: AllocatorLog | None = allocator_log() if self._on_cpu else None
        self.reports: deque[Reported] = deque()
        self.freed: list[tuple[int, Block | Buffer]] = []
        self._number_bytes: list[int] = []
        self._is_unseen = False

    def run(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, is_operator: bool = True
    ) -> Any:
        """Call an operator that reached a dispatch mode, or a function, while the allocator reports."""
        kwargs = kwargs or {}
        hides, log = self._begin(operator, args, kwargs, is_operator)
        try:
            out = call_in_dispatch(operator, (), args, kwargs) if hides else operator(*args, **kwargs)
        finally:
            if log is not None:
                self._end(log)
        if len(self.reports) > 2:  # a number is allocated and freed besides the result
            self._note_numbers(operator, args, out)
        return out

    def fail(self, where: str, error: BaseException) -> None:
        """End the recording, and the allocator's reports to it, because of an error of ours."""
        if self._log is not None:
            call_all(partial(self._log.abandon, self.reports))
        self._failed(where, error)

    def _choose(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_operator: bool
    ) -> tuple[bool, AllocatorLog | None]:
        """Return whether a `__torch_function__` is not to be called, and the log that has begun, if any."""
        hides = is_operator and _has_torch_function(args, kwargs)
        if _is_quiet(operator, args):
            return hides, None
        if self._on_cpu and (self._log is None or not self._log.begin(self.reports)):
            self._unseen.operators += 1
            self._is_unseen = True
        return hides, self._log

    _begin = entry(_choose, None, _WHERE, lambda *_: (False, None))  # it asks for `__torch_function__`

    @guarded(_WHERE)
    def _end(self, log: AllocatorLog) -> None:
        log.end(self.reports)

    def close(self) -> None:
        """End the allocator's reports, which go on where a signal raised an error just before their end."""
        if self._log is not None:
            self._log.end(self.reports)

    @guarded(_WHERE)
    def _note_numbers(self, operator: Any, args: tuple[Any, ...], out: Any) -> None:
        self._number_bytes = numbers_in(operator, args)
        if self._number_bytes:
            self._numbers.wait_for(out)

    def collect_freed(self) -> None:
        """Remove freed blocks from the ledger's blocks, so that new storages can use their keys."""
        self.freed += self._ledger.take_freed()

    def write(self, origin: Origin, results: Sequence[ResultStorage]) -> Counted:
        """Record what happened since the operator began. The caller must hold the ledger's lock."""
        if self._ledger.freed:
            self.collect_freed()
        if self._is_unseen:
            self._is_unseen = False
            self._unseen.results += sum(result.bytes for result in results)
        if not (results or self.reports or self.freed):
            return _NOTHING
        reports = list(self.reports)
        self.reports.clear()
        if not (results or self.freed or self._number_bytes) and _is_all_freed(reports):
            return self._passed(reports, origin)
        freed, self.freed = self.freed, []
        stretch = _Stretch(self._ledger, self._unseen, origin, self._numbers, self._number_bytes)
        is_alone = not (freed or self._number_bytes) and len(reports) == len(results) == 1
        if is_alone and reports[0][1] == results[0].bytes and results[0].was is None:
            stretch.allocate(results[0], reports[0][0])  # most operators
        else:
            stretch.write(reports, freed, results)
        self._number_bytes = []
        return stretch.counted

    def _passed(self, reports: Sequence[Reported], origin: Origin) -> Counted:
        top = self._ledger.pass_through(
            reports, origin.made_by, origin.row, origin.phase, recomputing=origin.recomputing
        )
        frees = len(reports) // 2
        return Counted(frees, sum(size for _, size in reports if size > 0), frees, top)


def _is_all_freed(reports: Sequence[Reported]) -> bool:
    """Whether everything that was allocated was freed, in reverse order."""
    sizes: list[int] = []
    for _, size in reports:
        if size > 0:
            sizes.append(size)
        elif not sizes or sizes.pop() != -size:
            return False
    return not sizes


@dataclass(slots=True)
class _Stretch:
    """Writes the memory of one operator into the ledger."""

    ledger: Ledger
    unseen: Unseen
    origin: Origin
    numbers: SavedNumbers
    number_bytes: list[int]
    counted: Counted = field(default_factory=Counted)

    def write(
        self,
        reports: list[Reported],
        freed: Sequence[tuple[int, Block | Buffer]],
        results: Sequence[ResultStorage],
    ) -> None:
        """Write in the order of the reports; what is not reported is written by its time, or at the end."""
        ends, unreported, pairs, allocs = _matched(reports, freed, results)
        buffers: dict[int, Buffer] = {}
        waiting = deque(unreported)
        for number, (time, size) in enumerate(reports):
            while waiting and waiting[0][0] <= time:
                freed_ns, block = waiting.popleft()
                self.free(block, freed_ns)
            if size > 0 and number in allocs:
                self.allocate(allocs[number], time)
            elif size > 0:
                buffers[number] = self.allocate_buffer(size, time)
            elif number in ends:
                self.free(ends[number], time)
            elif number in pairs:
                self.free_buffer(buffers.pop(pairs[number]), time)
            else:
                self.unseen.frees -= size
        for freed_ns, block in waiting:
            self.free(block, freed_ns)
        for buffer in buffers.values():
            self.unseen.kept += buffer.bytes
            self.free(buffer, 0)
        self._close(
            results, {id(result) for result in allocs.values()}, {id(block) for block in ends.values()}
        )

    def _close(self, results: Sequence[ResultStorage], reported: set[int], ended: set[int]) -> None:
        """Write allocations, and the blocks that they replace, which were not reported."""
        for result in results:
            if not result.bytes and result.was is not None:
                self.ledger.blocks.pop(result.was.key, None)
            elif id(result) not in reported and self.ledger.expected(result.storage) is None:
                self.allocate(result, 0)
            if result.was is not None and id(result.was) not in ended:
                self.free(result.was, 0)

    def allocate(self, result: ResultStorage, time: int) -> None:
        """Write an allocation that a result holds."""
        origin = self.origin
        block = self.ledger.allocate(
            result.storage,
            result.bytes,
            origin.made_by,
            origin.row,
            origin.phase,
            recomputing=origin.recomputing,
            now=time,
        )
        if result.tensor is not None:
            block.tensor = dense(result.tensor)
        if result.was is not None:
            block.category, block.label, block.module = (
                result.was.category,
                result.was.label,
                result.was.module,
            )
        self.count(block)

    def allocate_buffer(self, size: int, time: int) -> Buffer:
        """Write an allocation that no result holds."""
        origin = self.origin
        buffer = self.ledger.allocate_buffer(
            size, origin.made_by, origin.row, origin.phase, recomputing=origin.recomputing, now=time
        )
        buffer.category = _TEMPORARY
        self.count(buffer)
        return buffer

    def free_buffer(self, buffer: Buffer, time: int) -> None:
        """Write the free of a buffer; delay it if the buffer may be a number that autograd keeps."""
        if buffer.bytes in self.number_bytes:
            self.number_bytes.remove(buffer.bytes)
            self.numbers.waiting.append((buffer, time, self.origin.row, self.origin.phase))
        else:
            self.free(buffer, time)

    def free(self, block: Block | Buffer, time: int) -> None:
        """Write a free."""
        self.ledger.free(block, self.origin.row, self.origin.phase, time)
        self.counted.frees += 1

    def count(self, block: Block | Buffer) -> None:
        """Count an allocation that was written."""
        self.counted.allocations += 1
        self.counted.bytes += block.bytes
        self.counted.top = max(self.counted.top, self.ledger.level)


def _matched(
    reports: Sequence[Reported], freed: Sequence[tuple[int, Block | Buffer]], results: Sequence[ResultStorage]
) -> tuple[
    dict[int, Block | Buffer], list[tuple[int, Block | Buffer]], dict[int, int], dict[int, ResultStorage]
]:
    """Match the reports of one operator with storages by size, in order.

    Returns:
        The reported frees of known blocks, by report; freed blocks without a report; frees of memory that
        was allocated within the operator (free -> its allocation, the last one of the size that is not
        freed); and the allocations of new storages: those left over, the oldest first.
    """
    freeable: defaultdict[int, deque[tuple[int, Block | Buffer]]] = defaultdict(deque)
    for freed_ns, block in freed:
        freeable[block.bytes].append((freed_ns, block))
    for result in results:
        if result.was is not None:
            freeable[result.was.bytes].append((_NEVER, result.was))
    ends: dict[int, Block | Buffer] = {}
    pairs: dict[int, int] = {}
    open_rows: defaultdict[int, list[int]] = defaultdict(list)
    for number, (_, size) in enumerate(reports):
        if size > 0:
            open_rows[size].append(number)
        elif freeable[-size]:
            ends[number] = freeable[-size].popleft()[1]
        elif open_rows[-size]:
            pairs[number] = open_rows[-size].pop()
    allocs: dict[int, ResultStorage] = {}
    for result in results:
        if open_rows[result.bytes]:
            allocs[open_rows[result.bytes].pop(0)] = result
    left = [entry for same in freeable.values() for entry in same if entry[0] != _NEVER]
    return ends, sorted(left, key=lambda entry: entry[0]), pairs, allocs
