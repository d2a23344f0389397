"""Stacks taken while tracing: which frames, each once, bounded; and which of them made an autograd node."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tb_memplugin.record import lines as line_stacks
from tb_memplugin.record.lines import NO_ROW, NOT_KEPT, NodeStacks, PythonStacks, forward_of

HERE = __file__


def take(stacks, **given):
    return stacks.here(**given), sys._getframe().f_lineno


def test_a_stack_is_the_lines_that_run_innermost_first():
    stacks = PythonStacks()
    row, line = take(stacks)
    assert stacks.texts()[row][0] == f"take {HERE}:{line}"
    called = test_a_stack_is_the_lines_that_run_innermost_first
    assert stacks.texts()[row][1] == f"{called.__name__} {HERE}:{called.__code__.co_firstlineno + 2}"


def test_equal_stacks_have_one_row_and_other_lines_another():
    stacks = PythonStacks()
    rows = [take(stacks)[0] for _ in range(3)]
    assert len(set(rows)) == 1
    assert take(stacks)[0] != rows[0]


def test_the_empty_stack_is_the_first():
    assert PythonStacks().texts() == ((),)
    assert NOT_KEPT == 0


def test_a_threads_name_is_its_outermost_frame():
    stacks = PythonStacks()
    row, _ = take(stacks, thread="loader:1")
    assert stacks.texts()[row][-1] == "(thread loader:1)"


def test_functions_that_are_gone_are_still_named():
    stacks = PythonStacks()
    rows = []
    for name in ("one", "two"):
        space: dict[str, Any] = {"stacks": stacks}
        exec(compile("row = stacks.here()", f"/made/{name}.py", "exec"), space)
        rows.append(space["row"])
    assert [stacks.texts()[row][0] for row in rows] == ["<module> /made/one.py:1", "<module> /made/two.py:1"]


def test_no_more_stacks_are_kept_than_said(monkeypatch):
    monkeypatch.setattr(line_stacks, "MOST_STACKS", 2)
    stacks = PythonStacks()
    first, second = take(stacks)[0], take(stacks)[0]
    again = take(stacks)[0]
    assert (first, second, again) == (1, NOT_KEPT, NOT_KEPT)
    assert stacks.left_out == 2


def test_deep_stacks_keep_their_inner_frames(monkeypatch):
    monkeypatch.setattr(line_stacks, "MOST_FRAMES", 5)
    stacks = PythonStacks()

    def deep(calls):
        return take(stacks, thread="w")[0] if not calls else deep(calls - 1)

    row = deep(50)
    text = stacks.texts()[row]
    assert [frame.split()[0] for frame in text] == ["take", *["deep"] * 4, "(thread"]
    assert stacks.cut == 1


class Node:
    def __init__(self, name, sequence):
        self._name, self._sequence = name, sequence

    def name(self):
        return self._name

    def _sequence_nr(self):
        return self._sequence


class Operator:
    def __init__(self, name):
        self._schema = type("Schema", (), {"name": name})()


def test_a_node_is_of_the_operator_that_had_its_number():
    mine = NodeStacks(5)
    mine.add(6, 10, Operator("aten::mul"))
    mine.add(8, 20, Operator("aten::sum"))
    rows = [forward_of(Node("XBackward0", number), mine, [mine]) for number in range(4, 10)]
    assert rows == [NO_ROW, 10, 20, 20, NO_ROW, NO_ROW]


@pytest.mark.parametrize(
    ("name", "row"),
    [("MulBackward0", 10), ("NativeLayerNormBackward0", 30), ("SumBackward1", NO_ROW), ("Mine", NO_ROW)],
)
def test_where_several_threads_made_nodes_the_name_tells_which(name, row):
    mine, other = NodeStacks(0), NodeStacks(0)
    mine.add(1, 10, Operator("aten::mul"))
    other.add(1, 30, Operator("aten::native_layer_norm"))
    assert forward_of(Node(name, 0), mine, [mine, other]) == row


def test_old_nodes_are_forgotten(monkeypatch):
    monkeypatch.setattr(line_stacks, "_MOST_NODES", 4)
    mine = NodeStacks(0)
    for number in range(100):
        mine.add(number + 1, number + 1, None)
    assert mine.maker_of(99) == (100, None)
    assert mine.maker_of(3)[0] == NO_ROW
