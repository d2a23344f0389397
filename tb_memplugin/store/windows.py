"""Write a whole window (`MemoryTrace`) to a side file and read it back without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.proto import recording_pb2
from tb_memplugin.proto.recording_pb2 import (
    CONSTANT,
    Chunk,
    Column,
    DeviceInfo,
    Footer,
    Names,
    NoteData,
    Property,
    StepInfo,
)
from tb_memplugin.store.blob import MOST_DEVICES
from tb_memplugin.store.columns import BLOCK_ROWS, decode, encode, expected_size
from tb_memplugin.store.envelope import MOST_NAMES, RERECORD, EnvelopeReader, EnvelopeWriter, ReadRange
from tb_memplugin.store.pairing import PAIRING, pairing_columns, stored_pairing
from tb_memplugin.store.scratch import joined
from tb_memplugin.store.whole_devices import pack_whole, read_whole
from tb_memplugin.trace import (
    Allocations,
    Annotations,
    Category,
    Cause,
    Counter,
    CounterReading,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Module,
    Moment,
    OutOfMemory,
    Phase,
    Reason,
    Segments,
    Spans,
    StartState,
    Step,
    TensorMetadata,
)
from tb_memplugin.trace.counters import code_of
from tb_memplugin.trace.notes import Level, Note
from tb_memplugin.trace.tables import ABSENT, DEEPEST, EVENT_DTYPES, Array, is_too_deep

UnpackColumn = Callable[[str], np.ndarray]


class StoredEvents(Events):
    """Events that unpack a column when it is first read. Equal to `Events` in all else."""

    __slots__: tuple[str, ...] = ("_unpack",)
    _unpack: UnpackColumn

    @classmethod
    def of(cls, unpack: UnpackColumn) -> StoredEvents:
        """Return events whose column `name` is the result of `unpack(name)`, which may raise any error."""
        events = object.__new__(cls)
        object.__setattr__(events, "_unpack", unpack)
        return events

    def __getattr__(self, name: str) -> Any:
        """Unpack a column; Python asks this only for those that are not set yet."""
        if name not in EVENT_DTYPES:
            raise AttributeError(name)
        column = self._unpack(name)
        object.__setattr__(self, name, column)
        return column

    def kept(self, pieces: Callable[[], Iterable[Array]]) -> Array:
        """Return the pieces of a column that is computed from these events as one: on disk if it is large."""
        return joined(pieces)


StoredEvents.__slots__ = Events.__slots__  # by which others name the columns


MOST_ROWS = 1 << 26
"""The largest number of rows of a table. A file that declares more is refused before memory is allocated."""

ROWS_OF_ANY_FILE, ROWS_PER_BYTE = 1 << 20, 16
NAMES_OF_ANY_FILE, NAMES_PER_BYTE = 4 << 20, 100
"""What a small file may unpack to: rows of a table and bytes of names, and how many more per byte of file."""

MOST_STACK_BYTES, STACK_BYTES_OF_ANY_FILE, STACK_BYTES_PER_BYTE = 16 << 30, 1 << 26, 100
"""How many bytes the call stacks may have, each written out with all its frames, as tables do: at all, of a
small file, and how many more per byte of file."""

UNPACKED_LATER = 1 << 17
"""From how many events on a column is unpacked when it is first read, from the file's content in memory."""

READ_BYTES = 8 << 20
"""How much of a large file is read at once."""

FARTHEST_NS = (1 << 62) - 1
"""The latest time, and with a minus the earliest, so that the difference of two fits an int64."""

TABLES: dict[str, type[Any]] = {
    "events": Events,
    "start": StartState,
    "phases": Spans,
    "calls": Spans,
    "segments": Segments,
    "annotations": Annotations,
}
"""The columnar parts of a trace."""

LATER = {
    *(f"events.{field}" for field in ("stream", "pool", "context", "forward", "rounded")),
    *(f"start.{field}" for field in ("stack", "stream", "pool", "rounded", "pending")),
    *(
        f"{table}.{field}"
        for table in ("events", "start")
        for field in ("reason", "module_confidence", "tensor")
    ),
    *(f"segments.{field}" for field in Segments.__slots__),
    *(f"annotations.{field}" for field in Annotations.__slots__),
}
"""Columns that files of older versions lack. Those of events and the start state are written only if they
contain a value other than "none"."""

DTYPES: dict[str, np.dtype[Any]] = {
    f"{table}.{field}": getattr(kind(), field).dtype
    for table, kind in TABLES.items()
    for field in kind.__slots__
} | PAIRING
"""The dtype of every column, by its name on disk."""

Table = TypeVar("Table", Events, StartState, Spans, Segments, Annotations)


def write_window(stream: BinaryIO, trace: MemoryTrace, writer_id: str = "", window: int = 0) -> int:
    """Write a trace as a side file.

    Args:
        writer_id, window: as in the metadata of the window's steps; empty for a window of no run.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: writing to the stream failed.
        MemPluginError: a table has more than `MOST_ROWS` rows, a module `DEEPEST` others around it, or the
            stacks `MOST_STACK_BYTES`.
    """
    if is_too_deep([module.parent for module in trace.modules]):
        raise MemPluginError(
            f"The window has {DEEPEST:,} modules in each other; a file can hold fewer.",
            where="modules",
            fix="Profile a model whose modules call themselves less deeply.",
        )
    envelope = EnvelopeWriter(stream)
    columns = {name: _column(envelope, name, values) for name, values in _columns(trace)}
    columns |= {name: _column(envelope, name, values) for name, values in pairing_columns(trace, columns)}
    texts = _names(trace)
    stack_bytes = _stack_bytes(texts)
    if stack_bytes > MOST_STACK_BYTES:
        raise MemPluginError(
            f"The window's call stacks have {stack_bytes:,} bytes; a file can hold {MOST_STACK_BYTES:,}.",
            where="stacks",
            fix="Record fewer steps at a time, or without stacks.",
        )
    names = envelope.add(Chunk(), texts.SerializeToString())
    rows = max(column.rows for column in columns.values())
    envelope.fill(_least_size(rows, names, stack_bytes))  # readers refuse what claims more than it allows
    footer = Footer(
        source=_utf8(trace.source),
        notes=map(_utf8, trace.notes),
        note_data=map(_note_data, trace.notes),
        properties=[Property(key=_utf8(key), value=_utf8(value)) for key, value in trace.properties.items()],
        devices=[
            DeviceInfo(
                name=_utf8(device.name),
                capacity_bytes=device.capacity,
                product=_utf8(device.product),
                reserved_at_start=device.reserved_at_start,
            )
            for device in trace.devices
        ],
        steps=[
            StepInfo(number=step.number, start_ns=step.start_ns, end_ns=step.end_ns) for step in trace.steps
        ],
        columns=columns.values(),
        names=names,
        streams=trace.streams,
        pools=[recording_pb2.PoolId(first=first, second=second) for first, second in trace.pools],
        ooms=[
            recording_pb2.OutOfMemory(
                event=oom.event, requested_bytes=oom.requested_bytes, free_bytes=oom.free_bytes
            )
            for oom in trace.ooms
        ],
        counters=[
            recording_pb2.CounterReading(
                device=reading.device,
                moment=reading.moment,
                counter=reading.counter,
                bytes=reading.bytes,
                at_least=reading.at_least,
                causes=[cause for cause, _ in reading.causes],
                cause_bytes=[size for _, size in reading.causes],
            )
            for reading in trace.counters
        ],
        whole_devices=map(pack_whole, trace.whole_devices),
        writer_id=writer_id,
        window=window,
    )
    return envelope.finish(footer)


def read_window(read: ReadRange, size: int, name: str, of: tuple[str, int] | None = None) -> MemoryTrace:
    """Return the trace in a side file.

    Args:
        read: returns a range of the file's bytes.
        size: the file's size in bytes.
        of: the writer's id and the window's number, which a file has that a run's writer wrote. None accepts
            any window.

    Raises:
        UnreadableFileError: the file is truncated, not a side file, damaged, newer than this reader, or of
            another window.
    """
    try:
        return _WindowReader(read, size, name, of).trace()
    except (ValueError, IndexError) as error:
        raise UnreadableFileError(
            f"The file's tables are damaged ({error}).", where=name, fix=RERECORD
        ) from error


def of_another_window(name: str) -> UnreadableFileError:
    """Return the error of a side file that is not the one of a step."""
    message, fix = (
        "The side file belongs to another window.",
        "Copy the file of this run here, or record it again.",
    )
    return UnreadableFileError(message, where=name, fix=fix)


class _WindowReader:
    def __init__(self, read: ReadRange, size: int, name: str, of: tuple[str, int] | None) -> None:
        self._read, self._name, self._size = read, name, size
        self._bytes = 0.0
        self._envelope = EnvelopeReader(read, size, name)
        footer = self._envelope.footer
        if footer.writer_id and of not in (None, (footer.writer_id, footer.window)):
            raise of_another_window(name)
        self._columns = {column.name: column for column in self._envelope.footer.columns}

    def trace(self) -> MemoryTrace:
        footer = self._envelope.footer
        names = self._names(footer.names)
        self._limits = _limits(footer, names, self._rows("events"))
        events, start = self._events(), self._table("start", StartState)
        trace = MemoryTrace(
            source=_text(footer.source),
            events=events,
            start=start,
            devices=tuple(
                Device(
                    _text(device.name),
                    device.capacity_bytes if device.HasField("capacity_bytes") else None,
                    _text(device.product),
                    device.reserved_at_start if device.HasField("reserved_at_start") else None,
                )
                for device in footer.devices
            ),
            steps=tuple(Step(step.number, step.start_ns, step.end_ns) for step in footer.steps),
            operators=tuple(map(_text, names.operators)),
            modules=_modules(names),
            labels=tuple(map(_text, names.labels)),
            stacks=_stacks(names),
            phases=self._table("phases", Spans),
            calls=self._table("calls", Spans),
            segments=self._table("segments", Segments),
            annotations=self._table("annotations", Annotations),
            annotation_names=tuple(map(_text, names.annotation_names)),
            tensors=_tensors(names),
            streams=tuple(footer.streams),
            pools=tuple((pool.first, pool.second) for pool in footer.pools),
            contexts=tuple(map(_text, names.contexts)),
            ooms=tuple(
                OutOfMemory(
                    oom.event, oom.requested_bytes, oom.free_bytes if oom.HasField("free_bytes") else None
                )
                for oom in footer.ooms
            ),
            counters=tuple(map(_reading, footer.counters)),
            whole_devices=tuple(map(read_whole, footer.whole_devices)),
            notes=tuple(
                _note(text, footer.note_data[row : row + 1]) for row, text in enumerate(footer.notes)
            ),
            properties={_text(item.key): _text(item.value) for item in footer.properties},
            paired=self._pairing(events, start),
        )
        self._check(trace)
        return trace

    def _events(self) -> Events:
        """Return the events; those of a large file unpack their columns when they are read."""
        rows = self._rows("events")
        if rows < UNPACKED_LATER:
            return self._table("events", Events)
        begins = range(0, self._size, READ_BYTES)
        content = joined(lambda: (np.frombuffer(self._read(begin, READ_BYTES), np.uint8) for begin in begins))
        self._envelope.read = lambda offset, size: content[offset : offset + size].tobytes()
        for column in self._columns.values():
            for chunk in column.chunks if column.name not in PAIRING else ():
                self._envelope.packed(chunk)
        return StoredEvents.of(lambda field: self._field("events", field, rows))

    def _pairing(self, events: Events, start: StartState) -> Allocations | None:
        try:
            return stored_pairing(events, start, self._columns, self._blocks)
        except (UnreadableFileError, ValueError):  # damaged, or in other pieces than a writer's
            return None

    def _table(self, name: str, kind: type[Table]) -> Table:
        rows = self._rows(name)
        return kind(**{field: self._field(name, field, rows) for field in kind.__slots__})

    def _rows(self, table: str) -> int:
        """Return how many rows a table has, by what the file says of its columns."""
        names = (f"{table}.{field}" for field in TABLES[table].__slots__)
        rows = {self._stored(name).rows for name in names if name in self._columns or name not in LATER}
        if len(rows) > 1:
            self._refuse(f"The columns of {table} have different lengths.")
        return max(rows, default=0)

    def _stored(self, name: str) -> Column:
        """Return what the file says of a column; refuse one that claims too many rows."""
        if name not in self._columns:
            self._refuse(f"Column {name} is missing.")
        column = self._columns[name]
        most = min(MOST_ROWS, max(ROWS_OF_ANY_FILE, ROWS_PER_BYTE * self._size))
        if column.rows > most or column.rows != sum(chunk.rows for chunk in column.chunks):
            self._refuse(f"Column {name} claims {column.rows} rows.")
        return column

    def _field(self, table: str, field: str, rows: int) -> np.ndarray:
        name = f"{table}.{field}"
        if name in LATER and name not in self._columns:
            return np.broadcast_to(np.array(ABSENT.get(field, 0), DTYPES[name]), rows)
        return self._column(name)

    def _column(self, name: str) -> np.ndarray:
        column, dtype = self._stored(name), DTYPES[name]
        if not column.chunks:
            return np.empty(0, dtype)
        constants = {chunk.base if chunk.encoding == CONSTANT else None for chunk in column.chunks}
        if len(constants) == 1 and None not in constants:
            same = np.broadcast_to(decode(column.chunks[0], b"", dtype)[0], column.rows)
            self._check_column(name, same)
            return same
        values = joined(lambda: self._blocks(name))
        values.flags.writeable = False
        self._check_column(name, values)
        return values

    def _blocks(self, name: str) -> Iterator[np.ndarray]:
        try:
            for chunk in self._stored(name).chunks:
                yield decode(chunk, self._envelope.raw(chunk, expected_size(chunk)), DTYPES[name])
        except ValueError as error:
            self._refuse(f"Column {name} is damaged: {error}.")

    def _check_column(self, name: str, values: np.ndarray) -> None:
        """Refuse what points outside its table, and what would break computations."""
        limit = self._limits.get(name)
        if limit and len(values) and not limit[0] <= int(values.min()) <= int(values.max()) < limit[1]:
            self._refuse(f"Column {name} points outside its table.")
        if name.endswith(".bytes"):
            self._bytes += float(values.sum(dtype=np.float64))
            if self._bytes > 1 << 62:
                self._refuse("The sizes sum to more bytes than a number can hold.")
        if name == "events.time_ns" and bool((values[1:] < values[:-1]).any()):
            self._refuse("The events are not in time order.")

    def _names(self, chunk: Chunk) -> Names:
        if chunk.raw_size > min(MOST_NAMES, max(NAMES_OF_ANY_FILE, NAMES_PER_BYTE * self._size)):
            self._refuse(f"The names claim {chunk.raw_size} bytes.")
        try:
            names = Names.FromString(self._envelope.raw(chunk, chunk.raw_size))
        except DecodeError:
            self._refuse("The names cannot be read: they are damaged.")
        stack_bytes = _stack_bytes(names)
        most = max(STACK_BYTES_OF_ANY_FILE, STACK_BYTES_PER_BYTE * self._size)
        if stack_bytes > min(MOST_STACK_BYTES, most):
            self._refuse(f"The call stacks claim {stack_bytes:,} bytes.")
        return names

    def _check(self, trace: MemoryTrace) -> None:
        """Refuse indices that point outside their tables. Nothing checks them again after this."""
        if not trace.steps:
            self._refuse("The file has no step.")
        if len(trace.devices) > MOST_DEVICES:
            self._refuse(f"The file has {len(trace.devices):,} devices.")
        ends = [edge for step in trace.steps for edge in (step.start_ns, step.end_ns)]
        if not -FARTHEST_NS <= min(ends) <= max(ends) <= FARTHEST_NS:
            self._refuse("A step is centuries away.")
        if len({step.start_ns for step in trace.steps}) < len(trace.steps):
            self._refuse("Two steps begin at the same moment.")
        if any(not -1 <= module.parent < row for row, module in enumerate(trace.modules)):
            self._refuse("A module comes before its parent.")
        if any(oom.event >= len(trace.events) for oom in trace.ooms):
            self._refuse("A failed request comes after the last event.")
        if any(reading.device >= len(trace.devices) for reading in trace.counters):
            self._refuse("A counter is of a device that the file does not have.")
        if any(reading.device >= len(trace.devices) for reading in trace.whole_devices):
            self._refuse("A whole device is one that the file does not have.")
        if any(step.start_ns > later.start_ns for step, later in pairwise(trace.steps)):
            self._refuse("The steps are not in time order.")

    def _refuse(self, message: str) -> NoReturn:
        raise UnreadableFileError(message, where=self._name, fix=RERECORD)


def _limits(footer: Footer, names: Names, events: int) -> dict[str, tuple[int, int]]:
    """Return the lowest value and the one after the highest of columns that nothing checks again later."""
    ends = {
        "operator": len(names.operators),
        "module": len(names.module_keys),
        "label": len(names.labels),
        "stack": len(names.stack_lengths),
        "forward": len(names.stack_lengths),
        "stream": len(footer.streams),
        "pool": len(footer.pools),
        "context": len(names.contexts),
        "tensor": len(names.tensor_dtypes),
    }
    rows = {field: (-1, end) for field, end in ends.items()}
    codes = {
        "kind": (0, len(Kind)),
        "device": (0, len(footer.devices)),
        "category": (0, len(Category)),
        "phase": (0, len(Phase)),
        "reason": (0, len(Reason)),
        "module_confidence": (0, 101),
        "bytes": (0, 1 << 62),
    }
    times = (-FARTHEST_NS, FARTHEST_NS + 1)
    limits = {
        f"{table}.{field}": limit
        for table in ("events", "start", "segments", "annotations")
        for field, limit in (rows | codes).items()
    }
    limits |= {f"{table}.{edge}": times for table in ("phases", "calls") for edge in ("start_ns", "end_ns")}
    return limits | {
        "events.time_ns": times,
        "annotations.name": (0, len(names.annotation_names)),
        "annotations.event": (-1, events),
        "calls.name": (0, len(names.module_keys)),
        "calls.phase": (0, len(Phase)),
        "phases.name": (0, len(Phase)),
        "phases.phase": (0, len(Phase)),
    }


def _columns(trace: MemoryTrace) -> Iterator[tuple[str, np.ndarray]]:
    for table, kind in TABLES.items():
        for field in kind.__slots__:
            name, values = f"{table}.{field}", getattr(getattr(trace, table), field)
            if (
                name not in LATER
                or _has_values(field, values)
                or (len(values) and table not in ("events", "start"))
            ):
                yield name, values


def _has_values(field: str, values: np.ndarray) -> bool:
    """Whether a column contains a value other than "none", so that it must be written."""
    return bool((values != ABSENT.get(field, 0)).any())


def _column(envelope: EnvelopeWriter, name: str, values: np.ndarray) -> Column:
    if len(values) > MOST_ROWS:
        raise MemPluginError(
            f"The window has {len(values)} {name.partition('.')[0]}; a file can hold {MOST_ROWS}.",
            where=name,
            fix="Profile fewer steps at a time.",
        )
    blocks = (values[row : row + BLOCK_ROWS] for row in range(0, len(values), BLOCK_ROWS))
    chunks = [envelope.add(*encode(name, block)) for block in blocks]
    return Column(name=name, rows=len(values), chunks=chunks)


def _least_size(rows: int, names: Chunk, stack_bytes: int) -> int:
    """Return from which size in bytes on a file may have so many rows, these names, and such stacks."""
    for_rows = rows // ROWS_PER_BYTE if rows > ROWS_OF_ANY_FILE else 0
    for_names = names.raw_size // NAMES_PER_BYTE if names.raw_size > NAMES_OF_ANY_FILE else 0
    for_stacks = -(-stack_bytes // STACK_BYTES_PER_BYTE) if stack_bytes > STACK_BYTES_OF_ANY_FILE else 0
    return max(for_rows, for_names, for_stacks)


def _names(trace: MemoryTrace) -> Names:
    frames: dict[str, int] = {}
    for stack in trace.stacks:
        for frame in stack:
            frames.setdefault(frame, len(frames))
    return Names(
        operators=map(_utf8, trace.operators),
        labels=map(_utf8, trace.labels),
        module_keys=[_utf8(module.key) for module in trace.modules],
        module_parents=[module.parent for module in trace.modules],
        module_classes=[_utf8(module.class_name) for module in trace.modules],
        frames=map(_utf8, frames),
        stack_lengths=map(len, trace.stacks),
        stack_frames=[frames[frame] for stack in trace.stacks for frame in stack],
        contexts=map(_utf8, trace.contexts),
        annotation_names=map(_utf8, trace.annotation_names),
        tensor_dtypes=[_utf8(tensor.dtype) for tensor in trace.tensors],
        tensor_dims=[len(tensor.shape) for tensor in trace.tensors],
        tensor_shapes=[size for tensor in trace.tensors for size in tensor.shape],
        tensor_strides=[stride for tensor in trace.tensors for stride in tensor.strides],
    )


def _stack_bytes(names: Names) -> int:
    """Return how many bytes the call stacks have, each written out, a sign after each frame.

    Raises:
        IndexError, ValueError: they have frames that the names lack, or other lengths than they claim.
    """
    if sum(names.stack_lengths) != len(names.stack_frames):
        raise ValueError("the call stacks have other lengths than they claim")
    sizes = np.array([len(frame) for frame in names.frames], np.int64)
    used = np.fromiter(names.stack_frames, np.int64, len(names.stack_frames))
    return int(sizes[used].sum()) + len(used)


def _modules(names: Names) -> tuple[Module, ...]:
    if is_too_deep(names.module_parents):
        raise ValueError(f"{DEEPEST:,} modules are in each other")
    rows = zip(names.module_keys, names.module_parents, names.module_classes, strict=True)
    return tuple(Module(_text(key), parent, _text(class_name)) for key, parent, class_name in rows)


def _tensors(names: Names) -> tuple[TensorMetadata, ...]:
    if not len(names.tensor_shapes) == len(names.tensor_strides) == sum(names.tensor_dims):
        raise ValueError("shapes and strides of tensors have other lengths than their dimensions")
    ends = np.cumsum([0, *names.tensor_dims]).tolist()
    return tuple(
        TensorMetadata(
            _text(dtype), tuple(names.tensor_shapes[start:end]), tuple(names.tensor_strides[start:end])
        )
        for dtype, (start, end) in zip(names.tensor_dtypes, pairwise(ends), strict=True)
    )


def _reading(stored: recording_pb2.CounterReading) -> CounterReading:
    causes = zip(stored.causes, stored.cause_bytes, strict=True)
    return CounterReading(
        stored.device,
        Moment(stored.moment),
        code_of(Counter, stored.counter),
        stored.bytes if stored.HasField("bytes") else None,
        stored.at_least,
        tuple((code_of(Cause, cause), size) for cause, size in causes),
    )


def _stacks(names: Names) -> tuple[tuple[str, ...], ...]:
    frames = [_text(frame) for frame in names.frames]
    rows = [frames[row] for row in names.stack_frames]
    ends = np.cumsum([0, *names.stack_lengths]).tolist()
    return tuple(tuple(rows[start:end]) for start, end in pairwise(ends))


def _note_data(note: Note) -> NoteData:
    return NoteData(
        code=note.code, warning=note.level == "warning", size=note.bytes, device=_utf8(note.device)
    )


def _note(text: bytes, stored: Sequence[NoteData]) -> Note:
    """Return a note from its text and its data, which files of older versions do not have."""
    for data in stored:
        size = data.size if data.HasField("size") else None
        level: Level = "warning" if data.warning else "info"
        return Note(_text(text), data.code, size, level=level, device=_text(data.device))
    return Note(_text(text))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
