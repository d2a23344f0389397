"""Single allocations: told apart by address and version, found by text, put in order."""

from __future__ import annotations

import numpy as np
import pytest

from tb_memplugin.analysis.informative import informative
from tb_memplugin.analysis.lives import alive_between, in_order, rows_with_text, versions
from tb_memplugin.analysis.usage import usage
from tb_memplugin.errors import MemPluginError
from tests.recorded_program import program
from tests.traces import trace

PROGRAM = program(
    "before 400 w category=parameter",
    "alloc 100 a at=mlp",
    "free a",
    "alloc 50 a at=head",
    "alloc 9 n device=1",
    "free a",
    "alloc 70 a",
    stacks={"mlp": ("Mlp_forward model.py:20",), "head": ("head Model.py:40",)},
)
EVERY = np.arange(len(PROGRAM.allocations))
"""w, then a three times on cuda:0, with n of cuda:1 between."""


def bytes_found(text):
    return PROGRAM.allocations.bytes[rows_with_text(PROGRAM, EVERY, text, versions(PROGRAM))].tolist()


def test_versions_count_the_blocks_of_an_address():
    assert versions(PROGRAM).tolist() == [0, 0, 1, 0, 2]
    address = int(PROGRAM.allocations.address[1])
    assert usage(PROGRAM, address, 2).allocation.bytes == 70


def test_the_same_address_on_another_device_is_another_place():
    two = trace("alloc 1 a", "free a", "alloc 2 b device=cuda:0")
    two.allocations.address[:] = 4096
    assert versions(two).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mlp", [100]),
        ("MODEL.PY", [100, 50]),
        ("parameter", [400]),
        ("0x2000", [100, 50, 70]),
        ("2000_2", [70]),
        ("0x20", []),
        ("0x200", [100, 50, 70]),
        ("nothing of the kind", []),
        ("", [400, 100, 50, 9, 70]),
    ],
)
def test_a_text_is_found_in_stacks_categories_and_addresses(text, wanted):
    assert bytes_found(text) == wanted


def test_a_text_is_found_in_modules_operators_and_names():
    blocks = trace("start 8 w label=Head.weight", "alloc 4 a module=mlp operator=aten::mm", "alloc 2 b")
    every, version = np.arange(3), versions(blocks)
    for text, wanted in {"head.w": [8], "MLP": [4], "aten::": [4]}.items():
        assert blocks.allocations.bytes[rows_with_text(blocks, every, text, version)].tolist() == wanted


@pytest.mark.parametrize(
    ("sort", "wanted"),
    [
        ("bytes", [400, 100, 70, 50, 9]),
        ("-bytes", [9, 50, 70, 100, 400]),
        ("born", [70, 9, 50, 100, 400]),
        ("-born", [400, 100, 50, 9, 70]),
        ("lifetime", [400, 50, 9, 100, 70]),
    ],
)
def test_allocations_are_put_in_order(sort, wanted):
    assert PROGRAM.allocations.bytes[in_order(PROGRAM, EVERY, sort)].tolist() == wanted


def test_equal_ones_stay_in_order_of_birth():
    same = trace("alloc 5 a", "alloc 9 b", "alloc 5 c")
    assert in_order(same, np.arange(3), "bytes").tolist() == [1, 0, 2]
    assert in_order(same, np.arange(3), "-bytes").tolist() == [0, 2, 1]


def test_an_order_that_does_not_exist_is_refused():
    with pytest.raises(MemPluginError, match="sort by"):
        in_order(PROGRAM, EVERY, "colour")


def test_what_was_alive_in_a_stretch():
    sizes = PROGRAM.allocations.bytes
    assert sizes[alive_between(PROGRAM, 0, 0, 6)].tolist() == [400, 100, 50, 70]
    assert sizes[alive_between(PROGRAM, 0, 2, 3)].tolist() == [400, 50]
    assert sizes[alive_between(PROGRAM, 1, 2, 4)].tolist() == [9]


def test_divisions_that_hold_nothing_are_not_offered():
    assert informative(PROGRAM, 0) == ("category", "line", "stack")
    assert informative(PROGRAM, 1) == ("category",)
    told = program("START epoch", "alloc 1 a stream=1 context=0/0", "alloc 1 b pool=1")
    assert informative(told, 0) == ("category", "annotation", "pool", "stream", "context")
    step = trace("alloc 1 a module=m phase=forward operator=aten::mm")
    assert informative(step, 0) == ("category", "module", "phase", "operator")
