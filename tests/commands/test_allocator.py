import json

import pytest

from tb_memplugin.store.writer import RunWriter
from tests.analysis.histories import M, allocator_trace
from tests.commands.files import failing_snapshot, real, refused, run, step_snapshot, stranger, told, write
from tests.snapshots import block, entries, segment, snapshot
from tests.traces import trace


@pytest.fixture
def step(tmp_path):
    return write(tmp_path / "step.pickle", step_snapshot())


def test_a_device_at_its_peak(step):
    (device,) = told("allocator", step)["devices"]
    assert (device["device"], device["event"]) == ("cuda:0", 1)
    assert (device["allocated_bytes"], device["active_bytes"], device["pending_bytes"]) == (390, 390, 0)
    assert device["rounded_bytes"] == 1024
    assert (device["reserved_bytes"], device["peak_reserved_bytes"]) == (2 * M, 2 * M)
    assert device["peak"] == {"event": 1, "bytes": 390, "before_bytes": 0, "came_bytes": 390}
    assert device["fragmentation"] == {
        "unused": (2 * M - 390) / (2 * M),
        "split": 0.0,
        "free_bytes": 2 * M - 1024,
        "largest_free_bytes": 2 * M - 1024,
    }
    assert device["free_blocks"] == [{"from_bytes": M, "count": 1, "bytes": 2 * M - 1024}]
    (segment,) = device["segments"]
    assert (segment["address"], segment["bytes"], segment["free_bytes"]) == (4096, 2 * M, 2 * M - 1024)
    assert "blocks" not in segment


@pytest.mark.parametrize(
    ("moment", "event", "allocated", "pending"),
    [("start", -1, 0, 0), ("0", 0, 300, 0), ("2", 2, 300, 90), ("end", 3, 300, 0), ("-1", -1, 0, 0)],
)
def test_any_moment(step, moment, event, allocated, pending):
    (device,) = told("allocator", step, "--at", moment)["devices"]
    assert (device["event"], device["allocated_bytes"], device["pending_bytes"]) == (
        event,
        allocated,
        pending,
    )


def test_every_block_where_asked_for(step):
    (device,) = told("allocator", step, "--blocks", "--at", "2")["devices"]
    assert device["segments"][0]["blocks"] == [
        {"address": 4096, "state": "allocated", "bytes": 300, "extent_bytes": 512},
        {"address": 4608, "state": "pending", "bytes": 90, "extent_bytes": 512},
        {"address": 5120, "state": "free", "bytes": 0, "extent_bytes": 2 * M - 1024},
    ]


def test_pools_and_streams_sum_to_the_device(tmp_path):
    recorded = allocator_trace(
        "held 16M 2M", "live 16M 600", "segment_alloc 32M 4M pool=1 stream=1", "alloc 32M 1M pool=1 stream=1"
    )
    side_file = RunWriter(str(tmp_path), "w").write(recorded).side_file
    (device,) = told("allocator", side_file, "--at", "end")["devices"]
    assert [(pool["pool"], pool["stream"], pool["reserved_bytes"]) for pool in device["pools"]] == [
        ("private (7, 1)", "stream 0xabc0", 4 * M),
        ("default", "default stream", 2 * M),
    ]
    assert sum(pool["allocated_bytes"] for pool in device["pools"]) == device["allocated_bytes"] == M + 600


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("segment_alloc 16M 2M",), None),
        (("held 16M 2M", "live 16M 2M", "free_requested 16M 2M"), "0.0 % …; no block is free"),
        (
            ("held 16M 8M", "live 16M 1M pending=1", "live 19M 1M", "oom 0 9M"),
            "87.5 % …; 33.3 % of the free memory is outside the largest free block (4.00 MiB of 6.00 MiB)",
        ),
    ],
)
def test_how_much_is_not_allocated_and_how_much_of_the_free_memory_is_apart(tmp_path, lines, told):
    """A pending block is neither allocated nor free."""
    side_file = RunWriter(str(tmp_path), "w").write(allocator_trace(*lines)).side_file
    shown = run("allocator", side_file, "--at", "start").stdout.splitlines()
    said = [line for line in shown if "frag" in line]
    whole = told and told.replace("…", "of the reserved memory is not allocated")
    assert said == ([f"fragmentation: {whole}"] if whole else [])


def test_a_failed_request_with_the_state_then(tmp_path):
    path = write(tmp_path / "oom.pickle", failing_snapshot())
    (device,) = told("allocator", path, "--at", "oom")["devices"]
    assert (device["event"], device["allocated_bytes"]) == (1, 300)
    (oom,) = device["ooms"]
    assert (oom["event"], oom["requested_bytes"], oom["free_bytes"]) == (1, 9000, 77)
    assert sum(part["bytes"] for part in oom["parts"]) == oom["active_bytes"] == 300
    assert "out of memory at event 1: " in run("allocator", path).stdout


def test_of_very_many_failed_requests_the_last_are_told(tmp_path):
    lines = entries("alloc 4096 300", *(f"oom 77 {9000 + row}" for row in range(103)))
    path = write(tmp_path / "a.pickle", snapshot([segment(block(4096, 300))], lines))
    result = run("allocator", path, "--json")
    (device,) = json.loads(result.stdout)["devices"]
    assert [oom["requested_bytes"] for oom in device["ooms"]] == list(range(9003, 9103))
    assert "note: cuda:0: 3 earlier failed requests are not shown." in result.stderr


def test_people_get_pools_and_segments(step):
    shown = run("allocator", step).stdout
    assert "reserved 2.00 MiB" in shown
    assert "0x1000 (not known), default stream    2.00   < 0.01   2.00        2" in shown


def test_what_the_source_does_not_tell_is_said_not_guessed(tmp_path):
    side_file = RunWriter(str(tmp_path), "w").write(trace("alloc 5 a")).side_file
    (device,) = told("allocator", side_file)["devices"]
    assert (device["segments"], device["reserved_bytes"], device["rounded_bytes"]) == (None, None, None)
    assert device["fragmentation"]["unused"] is None
    shown = run("allocator", side_file).stdout
    assert "contains no segments" in shown
    assert "reserved ?" in shown


def test_a_profilers_sizes_are_whole_blocks_and_are_called_so(tmp_path):
    event = {"Addr": 4096, "Bytes": 1024, "Total Allocated": 1536, "Total Reserved": 2048, "Ev Idx": 1}
    event |= {"Device Type": 1, "Device Id": 0}
    path = tmp_path / "a.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "[memory]", "ph": "i", "ts": 5, "args": event}]}))
    shown = run("allocator", path).stdout
    assert "allocated 1.50 KiB in whole blocks (requested sizes are not recorded), pending 0 B" in shown
    (device,) = told("allocator", path)["devices"]
    assert (device["rounded_bytes"], device["rounded_exact"]) == (1536, True)


def test_moments_that_are_not_there_are_refused(step):
    assert "no event 4" in refused("allocator", step, "--at", "4")
    assert "'noon' is not a moment" in refused("allocator", step, "--at", "noon")
    assert "This recording has no failed request" in refused("allocator", step, "--at", "oom")
    assert "cuda:9" in refused("allocator", step, "--device", "cuda:9")


@real
@pytest.mark.parametrize(
    ("file", "device", "reserved_mib"),
    [("01*", "cuda:1", 80302), ("03*", "cuda:0", 8836), ("10*", "cuda:0", 21476), ("16*", "cuda:1", 3480)],
)
def test_real_reserves_to_the_byte_and_segments_that_sum_to_them(file, device, reserved_mib):
    (state,) = told("allocator", stranger(f"snapshots/{file}"), "--device", device)["devices"]
    assert state["peak_reserved_bytes"] == reserved_mib << 20
    assert sum(segment["bytes"] for segment in state["segments"]) == state["reserved_bytes"]
    assert sum(pool["reserved_bytes"] for pool in state["pools"]) == state["reserved_bytes"]


def test_a_device_with_less_memory_than_the_blocks_at_the_start_need_is_said_to_be_too_small(tmp_path):
    kept = segment(block(1 << 30, 2 * M, size=2 * M), total=2 * M)
    path = write(tmp_path / "start.pickle", snapshot([kept]))
    out = run("allocator", path, "--capacity", "1MiB").stdout
    assert (
        "cuda:0: 2.00 MiB are needed for the blocks that are alive at the start: more than the capacity "
        "of 1.00 MiB. Nothing was simulated.\n"
    ) in out
    assert "reserved before the first event" not in out


def test_a_simulation_is_not_written_between_its_tables(step):
    assert "stdout gets the tables already" in refused("allocator", step, "--replay", "-o", "-")
