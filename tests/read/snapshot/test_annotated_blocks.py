"""Labels that a program gives to tensors later: entries of the action `annotate`, since PyTorch 2.15."""

from __future__ import annotations

from typing import Any

import pytest

from tb_memplugin.analysis.divisions import LabelKey, breakdown
from tb_memplugin.errors import MemPluginError
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import Category, MemoryTrace
from tests.snapshots import block, entries, segment, snapshot

CACHE, WEIGHT = '{"role": "kv_cache", "layer": 3}', '{"role": "weight"}'


def read(*lines: tuple[str, str]) -> MemoryTrace:
    """A trace of entries with user_metadata; a block of 512 bytes at 9000 is alive all the time."""
    written: list[dict[str, Any]] = entries(*(line for line, _ in lines))
    for entry, (_, text) in zip(written, lines, strict=True):
        entry["user_metadata"] = text
    return trace_from_snapshot(snapshot([segment(block(9000, 512))], written), "x")


def labels(trace: MemoryTrace) -> list[str]:
    return [trace.labels[row] if row >= 0 else "" for row in trace.allocations.label.tolist()]


def test_a_label_belongs_to_the_block_that_is_alive_at_its_address() -> None:
    trace = read(
        ("alloc 1000 16", ""),
        ("free_requested 1000 16", ""),
        ("free_completed 1000 16", ""),
        ("alloc 1000 64", "made in a step"),
        ("annotate 1000 64", CACHE),
        ("annotate 9000 512", "old"),
        ("annotate 1000 64", "kept"),
        ("annotate 5000 64", "nobody's"),
    )
    assert labels(trace) == ["old", "", f"made in a step + {CACHE} + kept"]
    assert trace.allocations.category[2] == Category.CACHE
    assert [note for note in trace.notes if "unknown action" in note] == []


def test_bytes_by_a_key_of_labels_that_are_json() -> None:
    trace = read(
        ("alloc 1000 16", CACHE),
        ("alloc 2000 32", WEIGHT),
        ("alloc 3000 64", '{"role": ["a", 1]}'),
        ("alloc 4000 128", "{not JSON"),
        ("alloc 5000 256", "[1]"),
    )
    by_role = {part.key: part.bytes for part in breakdown(trace, 0, 4, LabelKey("role"))}
    assert by_role == {"(none)": 512 + 128 + 256, "kv_cache": 16, "weight": 32, '["a", 1]': 64}
    by_layer = {part.key: part.bytes for part in breakdown(trace, 0, 4, LabelKey("layer"))}
    assert by_layer == {"(none)": 512 + 32 + 64 + 128 + 256, "3": 16}
    with pytest.raises(MemPluginError, match=r"'rank'(.|\n)*role, layer"):
        breakdown(trace, 0, 4, LabelKey("rank"))


def test_what_is_no_json_has_no_keys() -> None:
    trace = read(("alloc 1000 16", "plain"))
    with pytest.raises(MemPluginError, match="not JSON objects"):
        breakdown(trace, 0, 0, LabelKey("role"))
