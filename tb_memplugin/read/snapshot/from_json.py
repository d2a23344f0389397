"""Convert snapshots from JSON to the form of pickled ones, and refuse hostile snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.snapshot.entry_columns import EntryColumns

POOLS = ("pool_id", "segment_pool_id")
"""Fields that are tuples in a pickled snapshot, but lists in JSON."""

SHORTEST_ENTRY, ROOM_BYTES = 16, 1 << 20
"""The smallest size of an entry in a file (real ones take 60 bytes and more), and bytes allowed beyond the
file's size."""

FIX = "Take the snapshot again, or load a complete copy of the file."


def as_pickled(snapshot: object, where: str, content_bytes: int) -> object:
    """Turn the lists of a snapshot from JSON into tuples where pickled ones have them, in place.

    Raises:
        UnreadableFileError: see `check_not_shared`.
    """
    for record in _records(snapshot):
        for field in POOLS:
            pool = record.get(field)
            if type(pool) is list:
                record[field] = tuple(pool)
    return check_not_shared(snapshot, where, content_bytes)


def check_not_shared(snapshot: object, where: str, content_bytes: int) -> object:
    """Return the snapshot; refuse it if the same object appears many times, so that a small file is huge.

    Args:
        content_bytes: the uncompressed size of the file.

    Raises:
        UnreadableFileError: devices or segments share one list, or there are more entries than fit into the
            file.
    """
    for kind, lists in _read_row_by_row(snapshot):
        long = [rows for rows in lists if isinstance(rows, list | EntryColumns) and len(rows)]
        if len(long) != len(set(map(id, long))):
            raise UnreadableFileError(f"{kind} of the snapshot are the same list.", where=where, fix=FIX)
        if sum(map(len, long)) * SHORTEST_ENTRY > content_bytes + ROOM_BYTES:
            raise UnreadableFileError(
                f"The snapshot has more {kind} than {content_bytes:,} bytes can hold: they are shared.",
                where=where,
                fix=FIX,
            )
    return snapshot


def _read_row_by_row(snapshot: object) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists whose rows are read into columns, with what their rows are."""
    content = snapshot if isinstance(snapshot, dict) else {"segments": snapshot}
    for key in ("device_traces", "host_traces"):
        traces = content.get(key)
        yield "traces", [traces]
        yield "trace entries", traces if isinstance(traces, list) else []
    for key in ("segments", "host_segments"):
        segments = content.get(key)
        dicts = (
            [segment for segment in segments if isinstance(segment, dict)]
            if isinstance(segments, list)
            else []
        )
        yield "segments", [segments]
        yield "blocks", [segment.get("blocks") for segment in dicts]
    yield "annotations", [content.get("external_annotations")]


def _records(snapshot: object) -> Iterator[dict[str, Any]]:
    """Yield the segments and trace entries that are dicts."""
    content: dict[str, Any] = snapshot if isinstance(snapshot, dict) else {"segments": snapshot}
    traces = content.get("device_traces")
    for records in (content.get("segments"), *(traces if isinstance(traces, list) else ())):
        if isinstance(records, list):
            yield from (record for record in records if type(record) is dict)
