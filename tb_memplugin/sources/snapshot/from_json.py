"""Convert snapshots from JSON to the form of pickled ones, and refuse hostile snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tb_memplugin.errors import UnreadableFileError

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
    for one in _records(snapshot):
        for field in POOLS:
            pool = one.get(field)
            if type(pool) is list:
                one[field] = tuple(pool)
    return check_not_shared(snapshot, where, content_bytes)


def check_not_shared(snapshot: object, where: str, content_bytes: int) -> object:
    """Return the snapshot; refuse it if the same object appears many times, so that a small file is huge.

    Args:
        snapshot: an object that may be a snapshot.
        where: the file's name for error messages.
        content_bytes: the uncompressed size of the file.

    Raises:
        UnreadableFileError: devices share one trace, or there are more entries than fit into the file.
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
    """Yield the segments and trace entries that are dicts."""
    held: dict[str, Any] = snapshot if isinstance(snapshot, dict) else {"segments": snapshot}
    traces = held.get("device_traces")
    for records in (held.get("segments"), *(traces if isinstance(traces, list) else ())):
        if isinstance(records, list):
            yield from (record for record in records if type(record) is dict)
