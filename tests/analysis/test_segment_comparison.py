"""Segments at the ends of two recordings."""

from tb_memplugin.analysis.comparison import compare_segments
from tb_memplugin.exports import snapshot
from tests.analysis.histories import M, allocator_trace
from tests.commands.files import refused, run, told

BASE = allocator_trace("held 16M 20M", "held 64M 2M", "live 16M 4M", "segment_alloc 128M 6M", "alloc 128M 5M")
OTHER = allocator_trace("held 16M 20M", "live 16M 4M", "free_completed 16M 4M", "segment_alloc 256M 8M")


def test_what_only_one_has_and_what_both_have():
    (device,) = compare_segments(BASE, OTHER)
    assert (device.device, device.base_reserved_bytes, device.other_reserved_bytes) == (
        "cuda:0",
        28 * M,
        28 * M,
    )
    rows = [
        (each.status, each.address, each.bytes, each.base_live_bytes, each.other_live_bytes)
        for each in device.segments
    ]
    assert rows == [
        ("added", 256 * M, 8 * M, None, 0),
        ("removed", 128 * M, 6 * M, 5 * M, None),
        ("removed", 64 * M, 2 * M, 0, None),
        ("same", 16 * M, 20 * M, 4 * M, 0),
    ]


def test_a_device_of_one_alone_is_compared_with_nothing():
    (first, second) = compare_segments(allocator_trace("held 16M 20M", "held 64M 2M device=1"), OTHER)
    assert (first.other_device, second.other_device) == ("cuda:0", "")
    assert [each.status for each in second.segments] == ["removed"]


def test_as_a_command(tmp_path):
    paths = [tmp_path / "base.pickle", tmp_path / "other.pickle"]
    for trace, path in zip((BASE, OTHER), paths, strict=True):
        snapshot.write(trace, path)
    (device,) = told("diff", *paths, "--by", "segment")["devices"]
    assert [each["status"] for each in device["segments"]] == ["added", "removed", "removed", "same"]
    shown = run("diff", *paths, "--by", "segment", "--top", 1).stdout
    assert [line.split()[-4:] for line in shown.splitlines() if "more" in line] == [
        ["(2", "more)", "removed", "8.00"],
        ["(1", "more)", "same", "20.00"],
    ]
    assert "at the end" in refused("diff", *paths, "--by", "segment", "--step", 0)
