"""Write a whole window (`MemoryTrace`) to a side file and read it back without loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from tb_memplugin.budget import open_content
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.proto import side_file_pb2
from tb_memplugin.proto.side_file_pb2 import (
    Chunk,
    Column,
    DeviceInfo,
    Footer,
    Names,
    NoteData,
    Property,
    StepInfo,
)
from tb_memplugin.store.columns import BLOCK_ROWS, decode, encode, expected_size
from tb_memplugin.store.envelope import MOST_NAMES, RERECORD, EnvelopeReader, EnvelopeWriter, ReadRange
from tb_memplugin.store.whole_devices import pack_whole, read_whole
from tb_memplugin.trace import (
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
from tb_memplugin.trace.tables import ABSENT

MOST_ROWS = 1 << 26
"""The largest number of rows of a table. A file that declares more is refused before memory is allocated."""

ROWS_OF_ANY_FILE, ROWS_PER_BYTE = 1 << 20, 16
NAMES_OF_ANY_FILE, NAMES_PER_BYTE = 4 << 20, 100
"""What a small file may unpack to: rows of a table and bytes of names, and how many more per byte of file."""

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
}
"""The dtype of every column, by its name on disk."""

Table = TypeVar("Table", Events, StartState, Spans, Segments, Annotations)


def write_window(stream: BinaryIO, trace: MemoryTrace) -> int:
    """Write a trace as a side file.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: writing to the stream failed.
        MemPluginError: a table has more than `MOST_ROWS` rows.
    """
    envelope = EnvelopeWriter(stream)
    columns = [_column(envelope, name, values) for name, values in _columns(trace)]
    raw = _names(trace).SerializeToString()
    names = envelope.add(Chunk(), raw)
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
        columns=columns,
        names=names,
        streams=trace.streams,
        pools=[side_file_pb2.PoolId(first=first, second=second) for first, second in trace.pools],
        ooms=[
            side_file_pb2.OutOfMemory(
                event=oom.event, requested_bytes=oom.requested_bytes, free_bytes=oom.free_bytes
            )
            for oom in trace.ooms
        ],
        counters=[
            side_file_pb2.CounterReading(
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
    )
    return envelope.finish(footer)


def read_window(read: ReadRange, size: int, name: str) -> MemoryTrace:
    """Return the trace in a side file.

    Args:
        read: returns a range of the file's bytes.
        size: the file's size in bytes.
        name: the file's name for error messages.

    Raises:
        UnreadableFileError: the file is truncated, not a side file, damaged, or newer than this reader.
    """
    try:
        return _WindowReader(read, size, name).trace()
    except (ValueError, IndexError) as error:
        raise UnreadableFileError(
            f"The file's tables are damaged ({error}).", where=name, fix=RERECORD
        ) from error


class _WindowReader:
    def __init__(self, read: ReadRange, size: int, name: str) -> None:
        self._name, self._size = name, size
        self._unpacked = 0
        self._envelope = EnvelopeReader(read, size, name)
        self._columns = {column.name: column for column in self._envelope.footer.columns}

    def trace(self) -> MemoryTrace:
        footer = self._envelope.footer
        names = self._names(footer.names)
        trace = MemoryTrace(
            source=_text(footer.source),
            events=self._table("events", Events),
            start=self._table("start", StartState),
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
        )
        self._check(trace)
        return trace

    def _table(self, name: str, kind: type[Table]) -> Table:
        stored = [field for field in kind.__slots__ if not self._left_out(f"{name}.{field}")]
        columns = {field: self._column(f"{name}.{field}") for field in stored}
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            self._refuse(f"The columns of {name} have different lengths.")
        rows = max(lengths, default=0)
        for field in kind.__slots__:
            if field not in columns:
                columns[field] = np.full(rows, ABSENT.get(field, 0), DTYPES[f"{name}.{field}"])
                columns[field].flags.writeable = False
        return kind(**columns)

    def _left_out(self, column: str) -> bool:
        return column in LATER and column not in self._columns

    def _column(self, name: str) -> np.ndarray:
        if name not in self._columns:
            self._refuse(f"Column {name} is missing.")
        column = self._columns[name]
        most = min(MOST_ROWS, max(ROWS_OF_ANY_FILE, ROWS_PER_BYTE * self._size))
        if column.rows > most or column.rows != sum(chunk.rows for chunk in column.chunks):
            self._refuse(f"Column {name} claims {column.rows} rows.")
        dtype = DTYPES[name]
        self._unpacked += column.rows * dtype.itemsize
        open_content(self._unpacked)
        values = np.empty(column.rows, dtype)
        row = 0
        for chunk in column.chunks:
            try:
                block = decode(chunk, self._envelope.raw(chunk, expected_size(chunk)), dtype)
            except ValueError as error:
                self._refuse(f"Column {name} is damaged: {error}.")
            values[row : row + chunk.rows] = block
            row += chunk.rows
        values.flags.writeable = False
        return values

    def _names(self, chunk: Chunk) -> Names:
        if chunk.raw_size > min(MOST_NAMES, max(NAMES_OF_ANY_FILE, NAMES_PER_BYTE * chunk.size)):
            self._refuse(f"The names claim {chunk.raw_size} bytes.")
        try:
            return Names.FromString(self._envelope.raw(chunk, chunk.raw_size))
        except DecodeError:
            self._refuse("The names cannot be read: they are damaged.")

    def _check(self, trace: MemoryTrace) -> None:
        """Refuse indices that point outside their tables. Nothing checks them again after this."""
        if not trace.steps:
            self._refuse("The file has no step.")
        ends = [edge for step in trace.steps for edge in (step.start_ns, step.end_ns)]
        if not -FARTHEST_NS <= min(ends) <= max(ends) <= FARTHEST_NS:
            self._refuse("A step is centuries away.")
        if len({step.start_ns for step in trace.steps}) < len(trace.steps):
            self._refuse("Two steps begin at the same moment.")
        for name, column, lowest, end in _limits(trace):
            if len(column) and (int(column.min()) < lowest or int(column.max()) >= end):
                self._refuse(f"Column {name} points outside its table.")
        if any(not -1 <= module.parent < row for row, module in enumerate(trace.modules)):
            self._refuse("A module comes before its parent.")
        if any(oom.event >= len(trace.events) for oom in trace.ooms):
            self._refuse("A failed request comes after the last event.")
        if any(reading.device >= len(trace.devices) for reading in trace.counters):
            self._refuse("A counter is of a device that the file does not have.")
        if any(reading.device >= len(trace.devices) for reading in trace.whole_devices):
            self._refuse("A whole device is one that the file does not have.")
        sizes = (trace.events.bytes, trace.start.bytes, trace.segments.bytes)
        if sum(float(column.sum(dtype=np.float64)) for column in sizes) > 1 << 62:
            self._refuse("The sizes sum to more bytes than a number can hold.")
        begins = np.array([step.start_ns for step in trace.steps])
        for table, times in (("events", trace.events.time_ns), ("steps", begins)):
            if bool((np.diff(times) < 0).any()):
                self._refuse(f"The {table} are not in time order.")

    def _refuse(self, message: str) -> NoReturn:
        raise UnreadableFileError(message, where=self._name, fix=RERECORD)


def _limits(trace: MemoryTrace) -> Iterator[tuple[str, np.ndarray, int, int]]:
    ends = {
        "operator": trace.operators,
        "module": trace.modules,
        "label": trace.labels,
        "stack": trace.stacks,
        "forward": trace.stacks,
        "stream": trace.streams,
        "pool": trace.pools,
        "context": trace.contexts,
        "tensor": trace.tensors,
    }
    codes = {
        "kind": Kind,
        "device": trace.devices,
        "category": Category,
        "phase": Phase,
        "reason": Reason,
    }
    for name in ("events", "start", "segments", "annotations"):
        table = getattr(trace, name)
        for field in table.__slots__:
            if field in ends:
                yield f"{name}.{field}", getattr(table, field), -1, len(ends[field])
            elif field in codes:
                yield f"{name}.{field}", getattr(table, field), 0, len(codes[field])  # type: ignore[arg-type]
    yield "events.module_confidence", trace.events.module_confidence, 0, 101
    yield "start.module_confidence", trace.start.module_confidence, 0, 101
    yield "events.bytes", trace.events.bytes, 0, 1 << 62
    yield "start.bytes", trace.start.bytes, 0, 1 << 62
    yield "segments.bytes", trace.segments.bytes, 0, 1 << 62
    yield "annotations.name", trace.annotations.name, 0, len(trace.annotation_names)
    yield "annotations.event", trace.annotations.event, -1, len(trace.events)
    yield "calls.name", trace.calls.name, 0, len(trace.modules)
    yield "calls.phase", trace.calls.phase, 0, len(Phase)
    yield "phases.name", trace.phases.name, 0, len(Phase)
    yield "phases.phase", trace.phases.phase, 0, len(Phase)
    yield "events.time_ns", trace.events.time_ns, -FARTHEST_NS, FARTHEST_NS + 1
    for name in ("phases", "calls"):
        for field in ("start_ns", "end_ns"):
            yield f"{name}.{field}", getattr(getattr(trace, name), field), -FARTHEST_NS, FARTHEST_NS + 1


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


def _modules(names: Names) -> tuple[Module, ...]:
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


def _reading(stored: side_file_pb2.CounterReading) -> CounterReading:
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
