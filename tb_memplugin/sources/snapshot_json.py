"""Snapshots that came through JSON, or from strangers, in the form that the snapshot reader takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tb_memplugin.errors import UnreadableFileError

POOLS = ("pool_id", "segment_pool_id")
"""Fields that are tuples in a snapshot, and lists in JSON."""

FIX = "Take the snapshot again, or load a whole copy of the file."


def as_pickled(snapshot: object, where: str) -> object:
    """A snapshot from JSON with its lists turned back into tuples, in place.

    Raises:
        UnreadableFileError: see `check_not_shared`.
    """
    for one in _records(snapshot):
        for field in POOLS:
            pool = one.get(field)
            if type(pool) is list:
                one[field] = tuple(pool)
    return check_not_shared(snapshot, where)


def check_not_shared(snapshot: object, where: str) -> object:
    """The snapshot, unless its devices share one trace: a few bytes that would be read 256 times.

    Raises:
        UnreadableFileError: they do.
    """
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    long = [id(trace) for trace in traces if trace] if isinstance(traces, list) else []
    if len(long) != len(set(long)):
        raise UnreadableFileError("Devices of the snapshot share one trace.", where=where, fix=FIX)
    return snapshot


def _records(snapshot: object) -> Iterator[dict[str, Any]]:
    """The segments and trace entries, as far as they are any."""
    held: dict[str, Any] = snapshot if isinstance(snapshot, dict) else {"segments": snapshot}
    traces = held.get("device_traces")
    for records in (held.get("segments"), *(traces if isinstance(traces, list) else ())):
        if isinstance(records, list):
            yield from (record for record in records if type(record) is dict)
