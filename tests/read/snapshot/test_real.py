"""Real snapshots, each number to the byte (FORMATS.md and its files are strangers': used in place)."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tb_memplugin.analysis.moments import peak
from tb_memplugin.store.windows import read_window, write_window
from tb_memplugin.trace import MemoryTrace
from tests.snapshots import load_snapshot

ROOT = Path(__file__).parents[3]
SNAPSHOTS = ROOT.parent / "shared" / "data" / "snapshots"
MIB = 1 << 20
real = pytest.mark.skipif(
    not SNAPSHOTS.is_dir(), reason=f"{SNAPSHOTS} holds strangers' snapshots; it is absent"
)


@dataclass(frozen=True)
class Truth:
    """A row of shared/data/README.md: live MiB, peak in requested bytes, peak reserve in MiB."""

    file: str
    device: str
    events: int
    start: float
    end: float
    peak: int
    index: int
    reserved: float


TRUTHS = [
    Truth("01", "cuda:0", 6445, 0, 7719.6, 8456473388, 6279, 8146),
    Truth("01", "cuda:1", 596, 0, 384.8, 84063351764, 422, 80302),
    Truth("01", "cuda:2", 882, 0, 19293.5, 21564645800, 716, 20870),
    Truth("03", "cuda:0", 19430, 4859.4, 6512.7, 9103544320, 2781, 8836),
    Truth("07", "cuda:0", 20128, 13062.5, 52089.4, 54824462340, 20122, 58280),
    Truth("10", "cuda:0", 10327, 13384.5, 15448.7, 20802383104, 10183, 21476),
    Truth("12", "cuda:0", 5803, 8.4, 46.5, 108258676, 5400, 128),
    Truth("14", "cuda:0", 1, 11291.7, 11291.7, 11840159744, 0, 11296),
    Truth("16", "cuda:1", 0, 3154.9, 3154.9, 3308174782, -1, 3480),
    Truth("20", "cuda:0", 97, 0, 30.3, 3249143816, 53, 3606),
    Truth("23", "cuda:0", 1040, 0, 0, 2255398598, 999, 250),  # synthetic: parity, not truth
]
FILES = ["01", "03", "07", "10", "12", "14", "16", "19", "20"]
"""The real ones: 23 is made up."""


def path_of(number: str) -> Path:
    return next(SNAPSHOTS.glob(f"{number}_*"))


def levels(trace: MemoryTrace, device: int) -> np.ndarray:
    """Live bytes before the first event of a device and after each of its own."""
    return trace.live(device)[np.concatenate(([0], 1 + np.flatnonzero(trace.events.device == device)))]


def highest_reserve(trace: MemoryTrace, device: int) -> int:
    after = trace.events.reserved[trace.events.device == device].max(initial=0)
    name = trace.devices[device].name
    return max(int(after), trace.devices[trace.device_row(name)].reserved_at_start or 0)


@real
@pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: f"{truth.file}-{truth.device}")
def test_a_real_snapshot_has_its_true_numbers(truth: Truth) -> None:
    trace = load_snapshot(path_of(truth.file))
    device = trace.device_row(truth.device)
    live = levels(trace, device)
    assert len(live) - 1 == truth.events
    assert [round(live[0] / MIB, 1), round(live[-1] / MIB, 1)] == [truth.start, truth.end]
    assert live.max() == truth.peak
    # README tells the last event after which the peak holds.
    assert np.flatnonzero(live == live.max())[-1] - 1 == truth.index
    assert highest_reserve(trace, device) == truth.reserved * MIB
    assert peak(trace, truth.device).bytes == truth.peak


@real
@pytest.mark.parametrize("number", FILES)
def test_a_real_snapshot_rewinds_without_contradiction_and_ends_as_its_segments_say(number: str) -> None:
    trace = load_snapshot(path_of(number))
    written = pickle.loads(path_of(number).read_bytes())
    segments = written["segments"] if isinstance(written, dict) else written
    assert len(trace.allocations.unmatched_frees) == trace.allocations.unseen_frees == 0
    assert all(
        told.split(": ")[1].startswith(("out of memory", "the snapshot tells no times"))
        for told in trace.notes
        if told.startswith("cuda")
    )
    assert [device.name for device in trace.devices] == sorted({f"cuda:{s['device']}" for s in segments})
    for row, device in enumerate(trace.devices):
        mine = [segment for segment in segments if f"cuda:{segment['device']}" == device.name]
        assert trace.live(row)[-1] == sum(segment["requested_size"] for segment in mine)
        last = trace.events.reserved[trace.events.device == row][-1:]
        assert all(last == sum(segment["total_size"] for segment in mine))


@real
def test_the_empty_snapshot_says_that_it_is_empty() -> None:
    trace = load_snapshot(path_of("19"))
    assert (trace.devices, len(trace.events), len(trace.start)) == ((), 0, 0)
    assert trace.notes == ("The snapshot is empty: no device has a segment or a trace entry.",)


@real
def test_each_device_keeps_its_own_order_in_real_files() -> None:
    trace = load_snapshot(path_of("01"))
    written = pickle.loads(path_of("01").read_bytes())["device_traces"]
    for row, device in enumerate(trace.devices):
        here = trace.events.device == row
        entries = written[int(device.name[5:])]
        assert trace.events.address[here].tolist() == [entry.get("addr", 0) for entry in entries]
        assert trace.events.bytes[here].tolist() == [entry["size"] for entry in entries]
        stacks = [trace.stacks[stack] for stack in trace.events.stack[here].tolist()]
        assert stacks == [
            tuple(f"{f['name']} {f['filename']}:{f['line']}" for f in entry["frames"]) for entry in entries
        ]
    (told,) = trace.notes
    assert "cuda:1: out of memory at entry 421: 5,308,694,528 bytes requested with 95,682,560" in told


@real
@pytest.mark.parametrize("number", ["01", "14", "16", "19"])
def test_a_snapshot_goes_through_the_store_unchanged(number: str, tmp_path: Path) -> None:
    trace = load_snapshot(path_of(number))
    with (tmp_path / "w").open("wb") as stream:
        size = write_window(stream, trace)
    data = (tmp_path / "w").read_bytes()
    back = read_window(lambda start, count: data[start : start + count], size, "w")
    assert (back.stacks, back.notes, back.devices) == (trace.stacks, trace.notes, trace.devices)
    assert all(np.array_equal(back.live(row), trace.live(row)) for row in range(len(trace.devices)))
