"""`tb_memplugin.load`: one call for whatever wrote the file."""

from __future__ import annotations

import pickle

import pytest

from tb_memplugin import MemPluginError, load
from tb_memplugin.analysis.peak import peak
from tb_memplugin.store.writer import RunWriter
from tests.snapshots import block, entries, segment, snapshot
from tests.traces import trace


def test_a_recorded_window_and_a_snapshot_load_the_same_way(tmp_path):
    written = RunWriter(str(tmp_path), "w").write(trace("alloc 100 a", "alloc 50 b", "free a"))
    assert peak(load(written.side_file)).bytes == 150


def test_what_is_neither_is_refused_by_name(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no pickle")
    with pytest.raises(MemPluginError, match=r"notes\.txt"):
        load(path)


def test_a_snapshot_file(tmp_path):
    path = tmp_path / "snapshot.pickle"
    content = snapshot(
        [segment(block(1000, 300))], entries("alloc 1000 300", "alloc 1512 90", "free_completed 1512 90")
    )
    path.write_bytes(pickle.dumps(content))
    assert peak(load(path), "cuda:0").bytes == 390
