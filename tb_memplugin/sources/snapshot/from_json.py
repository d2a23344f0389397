"""Snapshots that came through JSON, or from strangers, in the form that the snapshot reader takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tb_memplugin.errors import UnreadableFileError

POOLS = ("pool_id", "segment_pool_id")
"""Fields that are tuples in a snapshot, and lists in JSON."""

SHORTEST_ENTRY, ROOM_BYTES = 16, 1 << 20
"""Bytes that an entry takes in a file at the least (real ones take 60 and more), and what all may have."""

FIX = "Take the snapshot again, or load a whole copy of the file."


def as_pickled(snapshot: object, where: str, content_bytes: int) -> object:
    """A snapshot from JSON with its lists turned back into tuples, in place.

    Raises:
        UnreadableFileError: see `check_not_shared`.
    """
    for one in _records(snapshot):
        for field in POOLS:
            pool = one.get(field)
            if type(pool) is list:
                one[field] = tuple(pool)
    return check_not_shared(snapshot, where, content_bytes)


def check_not_shared(snapshot: object, where: str, content_bytes: int) -> object:
    """The snapshot, unless parts of it stand for many: a few bytes that would be read again and again.

    Args:
        snapshot: an object that may be a snapshot.
        where: the file, as errors should name it.
        content_bytes: of the file, unpacked.

    Raises:
        UnreadableFileError: devices share one trace, or there are more entries than the file has room for.
    """
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    long = (
        [trace for trace in traces if isinstance(trace, list) and trace] if isinstance(traces, list) else []
    )
    if len(long) != len(set(map(id, long))):
        raise UnreadableFileError("Devices of the snapshot share one trace.", where=where, fix=FIX)
    if sum(map(len, long)) * SHORTEST_ENTRY > content_bytes + ROOM_BYTES:
        raise UnreadableFileError(
            f"The snapshot has more entries than {content_bytes:,} bytes can hold: they are shared.",
            where=where,
            fix=FIX,
        )
    return snapshot


def _records(snapshot: object) -> Iterator[dict[str, Any]]:
    """The segments and trace entries, as far as they are any."""
    held: dict[str, Any] = snapshot if isinstance(snapshot, dict) else {"segments": snapshot}
    traces = held.get("device_traces")
    for records in (held.get("segments"), *(traces if isinstance(traces, list) else ())):
        if isinstance(records, list):
            yield from (record for record in records if type(record) is dict)
