"""One allocation: what was alive around its making and its end."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis.usage import usage
from tb_memplugin.errors import NotRecordedError
from tests.recorded_program import program

# "w" and "a" have an address each; "a" is allocated twice. On the second device only "c" lives.
PROGRAM = program(
    "before 100 w",
    "alloc 10 a at=s",
    "free a",
    "alloc 30 a",
    "free w",
    "alloc 7 c device=1",
    "alloc 50 w",
    stacks={"s": ("f a.py:1",)},
)
W, A, C = 0x1000, 0x2000, 0x3000


def test_an_allocation_tells_the_bytes_before_and_after():
    found = usage(PROGRAM, A)
    assert (found.device, found.event, found.bytes_before, found.bytes_after) == ("cuda:0", 0, 100, 110)
    block = found.allocation
    assert (block.bytes, block.version, block.born_event, block.freed_event) == (10, 0, 0, 1)
    assert (block.frames, block.rounded_bytes) == (("f a.py:1",), None)


def test_a_free_tells_the_bytes_before_and_after():
    found = usage(PROGRAM, A, action="free")
    assert (found.event, found.bytes_before, found.bytes_after) == (1, 110, 100)


def test_versions_count_the_blocks_at_an_address_those_from_before_the_trace_too():
    assert usage(PROGRAM, A, 1).allocation.bytes == 30
    assert usage(PROGRAM, W, 0, "free").bytes_after == 30
    assert usage(PROGRAM, W, 1).bytes_after == 80


def test_a_device_is_found_or_named():
    assert usage(PROGRAM, C).device == usage(PROGRAM, C, device="cuda:1").device == "cuda:1"
    with pytest.raises(NotRecordedError, match="no allocation 0x3000_0"):
        usage(PROGRAM, C, device="cuda:0")


@pytest.mark.parametrize(
    ("address", "version", "action", "told"),
    [
        (W, 0, "alloc", "alive before the trace began"),
        (W, 1, "free", "still alive when the trace ended"),
        (A, 2, "alloc", "has versions 0 to 1"),
        (A, -1, "alloc", "has versions 0 to 1"),
        (0x9999, 0, "alloc", "no allocation 0x9999_0"),
        (0, 0, "alloc", "no allocation"),
        (1 << 70, 0, "free", "no allocation"),
        (-5, 0, "free", "no allocation"),
    ],
)
def test_what_is_not_in_the_trace_is_told(address, version, action, told):
    with pytest.raises(NotRecordedError, match=told):
        usage(PROGRAM, address, version, action)
