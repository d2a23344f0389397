"""Convert figures of steps to records of an event file, and back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto import recording_pb2 as pb
from tb_memplugin.store.envelope import RERECORD, check_version, unpacked
from tb_memplugin.store.paths import readable
from tb_memplugin.trace.notes import OTHER, Note
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseBytes, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Bool, Int64, differences

Column = TypeVar("Column", Int64, Bool)

VERSION = 1
MOST_FIGURES_BYTES = 64 << 20
"""The largest decompressed size of one record. More is an attack."""

FIGURES_OF_ANY_SERIES, FIGURES_PER_BYTE = 16 << 20, 32
"""What all records of a series may unpack to, in bytes: of any, and more for each of its bytes. The noise
in durations is hard to compress: records of 1,000 steps unpack to about five times their size."""

_OPTIONAL = {
    "peak_reserved": "peak_reserved_bytes",
    "end_reserved": "end_reserved_bytes",
    "retries": "retries",
    "ooms": "ooms",
    "allocations": "allocations",
    "allocated_bytes": "allocated_bytes",
    "end_requested": "end_requested_bytes",
    "whole_free": "whole_free_bytes",
    "whole_total": "whole_total_bytes",
    "heap_free": "heap_free_bytes",
}
_SUBJECT = "Figures of steps have"
_LEVELS = ("peak_reserved", "end_reserved", "end_requested", "whole_free", "whole_total", "heap_free")


def pack_figures(figures: StepFigures) -> bytes:
    """Serialize and compress figures of steps to the bytes of one record."""
    message = pb.StepFigures(
        steps=_differences(figures.steps),
        durations_ns=figures.durations_ns.tolist(),
        devices=map(_device_message, figures.devices),
        phases=map(_phase_message, figures.phases),
        notes=map(readable, figures.notes),
        note_codes=[note.code for note in figures.notes],
    )
    raw = message.SerializeToString()
    packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(raw)
    return pb.StepRecord(version=VERSION, raw_size=len(raw), figures=packed).SerializeToString()


def read_figures(data: bytes, where: str = "") -> StepFigures:
    """Return the figures in a record.

    Raises:
        UnreadableFileError: the record is damaged or newer than this reader. The error names `where`.
    """
    try:
        outer = pb.StepRecord.FromString(data)
        check_version(_SUBJECT, outer.version, VERSION, where)
        raw = unpacked(outer.figures, outer.raw_size, MOST_FIGURES_BYTES)
        return _figures(pb.StepFigures.FromString(raw))
    except (DecodeError, zstandard.ZstdError, ValueError, OverflowError) as error:
        message = f"A record of steps' figures is damaged ({error})."
        raise UnreadableFileError(message, where=where, fix=RERECORD) from error


class SeriesReader:
    """Reads the records of one series, which together may not unpack to far more than they have."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = FIGURES_OF_ANY_SERIES

    def read(self, data: bytes) -> StepFigures:
        """Return the figures in the next record.

        Raises:
            UnreadableFileError: the record is damaged, newer than this reader, or unpacks to too much.
        """
        self._left += FIGURES_PER_BYTE * len(data) - _claimed(data)
        if self._left < 0:
            message = "The records of steps' figures unpack to far more than they have."
            raise UnreadableFileError(message, where=self._where, fix=RERECORD)
        return read_figures(data, self._where)


def _claimed(data: bytes) -> int:
    """Return how many bytes a record says that it unpacks to; 0 if it cannot be read."""
    try:
        return int(pb.StepRecord.FromString(data).raw_size)
    except DecodeError:
        return 0


def read_series(content: bytes, where: str = "") -> pb.SeriesMetadata:
    """Return the metadata that is stored with the tag of a series of steps.

    Raises:
        UnreadableFileError: the metadata is damaged or newer than this reader.
    """
    try:
        metadata = pb.SeriesMetadata.FromString(content)
    except DecodeError as error:
        message = "The description of a series of steps is damaged."
        raise UnreadableFileError(message, where=where, fix=RERECORD) from error
    check_version(_SUBJECT, metadata.version, VERSION, where)
    return metadata


def _device_message(device: DeviceFigures) -> pb.DeviceFigures:
    message = pb.DeviceFigures(
        name=readable(device.name),
        kind=device.kind,
        product=readable(device.product),
        capacity_bytes=device.capacity,
        peak_bytes=_differences(device.peak),
        at_least=_flag_values(device.at_least),
        end_bytes=_differences(device.end),
    )
    for field, name in _OPTIONAL.items():
        column = getattr(device, field)
        if column is not None:
            getattr(message, name).extend(_differences(column) if field in _LEVELS else column.tolist())
    return message


def _phase_message(phase: PhaseFigures) -> pb.PhaseFigures:
    return pb.PhaseFigures(
        name=readable(phase.name),
        counts=phase.counts.tolist(),
        durations_ns=phase.durations_ns.tolist(),
        devices=[
            pb.PhaseBytes(
                peak_bytes=_differences(device.peak),
                at_least=_flag_values(device.at_least),
                end_bytes=_differences(device.end),
            )
            for device in phase.devices
        ],
    )


def _figures(message: pb.StepFigures) -> StepFigures:
    rows = len(message.steps)
    return StepFigures(
        steps=_levels(message.steps, rows),
        durations_ns=_column(message.durations_ns, rows),
        devices=tuple(_device(device, rows) for device in message.devices),
        phases=tuple(_phase(phase, rows, len(message.devices)) for phase in message.phases),
        notes=tuple(
            Note(text, code or OTHER, level="warning")
            for text, code in zip_longest(message.notes, message.note_codes[: len(message.notes)])
        ),
    )


def _device(message: pb.DeviceFigures, rows: int) -> DeviceFigures:
    optional = {}
    for field, name in _OPTIONAL.items():
        values = getattr(message, name)
        read = _levels if field in _LEVELS else _column
        optional[field] = read(values, rows) if len(values) else None
    return DeviceFigures(
        name=message.name,
        kind=message.kind,
        product=message.product,
        capacity=message.capacity_bytes if message.HasField("capacity_bytes") else None,
        peak=_levels(message.peak_bytes, rows),
        at_least=_flags(message.at_least, rows),
        end=_levels(message.end_bytes, rows),
        **optional,
    )


def _phase(message: pb.PhaseFigures, rows: int, devices: int) -> PhaseFigures:
    if len(message.devices) != devices:
        raise ValueError("a phase has other devices than its steps")
    return PhaseFigures(
        name=message.name,
        counts=_column(message.counts, rows),
        durations_ns=_column(message.durations_ns, rows),
        devices=tuple(
            PhaseBytes(
                peak=_levels(device.peak_bytes, rows),
                at_least=_flags(device.at_least, rows),
                end=_levels(device.end_bytes, rows),
            )
            for device in message.devices
        ),
    )


def _differences(column: Int64) -> list[int]:
    steps: list[int] = differences(column).tolist()
    return steps


def _flag_values(flags: Bool) -> list[bool]:
    """Return the flags, empty if none is set."""
    values: list[bool] = flags.tolist() if flags.any() else []
    return values


def _levels(values: Iterable[int], rows: int) -> Int64:
    return np.cumsum(_column(values, rows), dtype=np.int64)


def _column(values: Iterable[int], rows: int) -> Int64:
    return _checked(np.fromiter(values, np.int64), rows)


def _flags(values: Iterable[bool], rows: int) -> Bool:
    flags = np.fromiter(values, np.bool_)
    return _checked(flags, rows) if len(flags) else np.zeros(rows, np.bool_)


def _checked(column: Column, rows: int) -> Column:
    if len(column) != rows:
        raise ValueError(f"a column has {len(column)} values for {rows} steps")
    return column
