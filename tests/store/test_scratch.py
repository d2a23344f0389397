"""Large columns in scratch files: the same values, in memory only while somebody looks at them."""

import gc
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tb_memplugin.analysis.curves import event_curve
from tb_memplugin.server.cache import size_of
from tb_memplugin.store import pairing, scratch, windows
from tb_memplugin.store.scratch import is_mapped, joined, release
from tb_memplugin.trace import replay
from tests.analysis.test_long_windows import recorded
from tests.store.test_windows import read, written
from tests.traces import same


def resident():
    return int(scratch._STATM.read_text().split()[2]) * 4096


@pytest.fixture
def maps_all(monkeypatch):
    monkeypatch.setattr(scratch, "MAPPED_FROM", 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64, np.float64])
def test_a_mapped_array_has_the_same_values(dtype, maps_all):
    values = np.arange(30).astype(dtype).reshape(10, 3)
    kept = joined(lambda: (values[:4], values[4:]))
    assert kept.dtype == dtype
    assert kept.tolist() == values.tolist()
    assert [is_mapped(each) for each in (values, kept, kept[2:])] == [False, True, True]
    assert [size_of(each) for each in (values, kept)] == [values.nbytes, 0]
    with pytest.raises(ValueError, match="read-only"):
        kept[0, 0] = 1


def test_small_arrays_stay_as_they_are_and_constants_take_no_memory():
    small, constant = np.zeros(9), np.broadcast_to(np.int64(3), 1 << 30)
    assert joined(lambda: (small,)) is small
    assert size_of(constant) == 0


def test_without_room_for_a_file_an_array_stays_in_memory(monkeypatch, maps_all):
    pieces = (np.arange(9), np.arange(9, 20))
    with Path("/dev/full").open("wb", 0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        assert joined(lambda: iter(pieces)).tolist() == list(range(20))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much is mapped")
def test_pages_are_given_back_and_read_again_when_looked_at():
    values = joined(lambda: (np.arange(row, row + (1 << 20)) for row in range(0, 8 << 20, 1 << 20)))
    assert values.sum() == values.sum()
    looked_at = resident()
    release(looked_at + 1)
    assert resident() > looked_at - (1 << 20)
    release(0)
    assert resident() < looked_at - (60 << 20)
    assert values[:: 1 << 20].tolist() == list(range(0, 8 << 20, 1 << 20))
    before = len(scratch._maps)
    del values
    gc.collect()
    assert len(scratch._maps) == before - 1


def test_a_window_in_scratch_files_says_the_same(monkeypatch, maps_all):
    monkeypatch.setattr(windows, "UNPACKED_LATER", 0)
    monkeypatch.setattr(pairing, "PAIRED_FROM", 0)
    monkeypatch.setattr(replay, "PIECE", 100)
    original = recorded(5)
    stored = read(written(original))
    assert same(original, stored)
    columns = (stored.events.time_ns, stored.allocations.freed, stored.allocations.bytes, stored.live(1))
    assert all(map(is_mapped, columns))
    drawn, expected = (event_curve(each, 1, 0, 6_000, 9, "module") for each in (stored, original))
    assert drawn.stacks.tolist() == expected.stacks.tolist()
