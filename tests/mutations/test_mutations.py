"""Two thousand damaged files, by seed: a clear error or a marked result; no crash, no hang, no silent lie."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tb_memplugin.analysis.breakdown import breakdown
from tb_memplugin.analysis.peak import peak
from tb_memplugin.errors import MemPluginError
from tb_memplugin.loading import load
from tb_memplugin.sources.snapshot.trace import trace_from_snapshot
from tb_memplugin.store.windows import write_window
from tb_memplugin.trace import MemoryTrace
from tests.mutations.damage import bytes_damaged, story_damaged
from tests.mutations.stories import replayed, story

LONGEST_SECONDS = 10
BATCH = 50


def outcome(load_it: Callable[[], MemoryTrace]) -> MemoryTrace | None:
    """A trace, or None for a clear error, within the time; anything else that is raised fails the test."""
    begin = time.monotonic()
    refusal: MemPluginError | None = None
    found: MemoryTrace | None = None
    try:
        found = load_it()
    except MemPluginError as error:
        refusal = error
    assert time.monotonic() - begin < LONGEST_SECONDS
    assert refusal is None or all((refusal.what, refusal.where, refusal.fix))
    return found


def assert_sums(trace: MemoryTrace) -> None:
    """Every analysis that a view begins with works, and the parts sum to the whole."""
    for device in range(len(trace.devices)):
        top = peak(trace, trace.devices[device].name)
        assert top.bytes == sum(part.bytes for part in top.parts("category"))
        parts = breakdown(trace, device, len(trace.events) - 1, "module")
        assert sum(part.bytes for part in parts) == int(trace.live(device)[-1])


@pytest.mark.parametrize("batch", range(4))
def test_true_stories_are_read_without_a_note(batch: int) -> None:
    for seed in range(BATCH):
        content = story(Random(1000 * batch + seed))
        trace = trace_from_snapshot(content, "x")
        levels, wrong = replayed(content)
        assert wrong == 0
        assert trace.notes == ()
        assert trace.live(0).tolist() == levels


@pytest.mark.parametrize("batch", range(20))
def test_a_snapshot_that_says_something_else_is_refused_or_told_or_right(batch: int) -> None:
    for seed in range(BATCH):
        random = Random(7000 * batch + seed)
        content = story_damaged(story(random), random)
        found = outcome(lambda content=content: load(content))  # type: ignore[misc]
        if found is None:
            continue
        assert_sums(found)
        if not found.notes:
            levels, wrong = replayed(content)
            assert wrong == 0, (batch, seed)
            assert found.live(0).tolist() == levels, (batch, seed)


def kineto() -> dict[str, Any]:
    """Three blocks of a step on two devices, with an operator around them."""
    rows = [(10, 1, 100, 100), (20, 2, 50, 150), (30, 1, -100, 50), (40, 2, -50, 0)]
    memory = [
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "ts": at,
            "pid": 1,
            "tid": 1,
            "args": {
                "Addr": address,
                "Bytes": size,
                "Total Allocated": total,
                "Total Reserved": 200,
                "Device Type": 1,
                "Device Id": 0,
                "Ev Idx": row,
            },
        }
        for row, (at, address, size, total) in enumerate(rows)
    ]
    ranges = [
        {"ph": "X", "cat": cat, "name": name, "ts": 5, "dur": 50, "pid": 1, "tid": 1, "args": {"Ev Idx": 9}}
        for cat, name in (("user_annotation", "ProfilerStep#3"), ("cpu_op", "aten::empty"))
    ]
    return {
        "schemaVersion": 1,
        "traceEvents": memory + ranges,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    }


def window() -> bytes:
    stream = io.BytesIO()
    write_window(stream, trace_from_snapshot(story(Random(5)), "x"))
    return stream.getvalue()


FILES: dict[str, bytes] = {
    "protocol 2": pickle.dumps(story(Random(1)), protocol=2),
    "protocol 4": pickle.dumps(story(Random(2)), protocol=4),
    "json": json.dumps(story(Random(3))).encode(),
    "kineto": json.dumps(kineto()).encode(),
    "packed": gzip.compress(pickle.dumps(story(Random(4))), mtime=0),
    "timeline": json.dumps([[-1, 1, 10, 0], [5, 2, 20, 3], [9, 4, -20, 3]]).encode(),
    "window": window(),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_whole_file_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(FILES[kind])
    assert_sums(load(path))


@pytest.mark.parametrize("batch", range(3))
@pytest.mark.parametrize("kind", FILES)
def test_damaged_bytes_are_refused_or_make_a_trace_that_holds_together(
    kind: str, batch: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    for seed in range(BATCH):
        damaged = bytes_damaged(FILES[kind], Random(9000 * batch + seed))
        path.write_bytes(damaged)
        found = outcome(lambda: load(path))
        if found is not None:
            assert_sums(found)
