"""Call stacks merged for a flame graph: whole, folded, and the user's frames alone."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis.source_lines import NO_STACK
from tb_memplugin.analysis.stacks import flame, label_of, stack_table
from tests.recorded_program import program

TORCH = "/usr/lib/python3.12/site-packages/torch"
CALL, LINEAR = f"_call_impl {TORCH}/nn/modules/module.py:7", f"linear {TORCH}/nn/functional.py:9"
MAIN, STEP, MLP, HEAD = "<module> train.py:3", "step train.py:9", "mlp model.py:20", "head model.py:40"
STACKS = {
    "mlp": ("malloc ??:0", LINEAR, MLP, CALL, STEP, MAIN),
    "head": ("malloc ??:0", LINEAR, HEAD, CALL, STEP, MAIN),
    "native": ("malloc ??:0", "start_thread ??:0"),
}
PROGRAM = program(
    "before 1000 w", "alloc 30 a at=mlp", "alloc 10 b at=head", "alloc 7 c at=native", stacks=STACKS
)
ROWS = stack_table(PROGRAM, 0, len(PROGRAM.events) - 1)


def told(tree):
    """Each node as its frames and bytes, with the depth at which it stands."""
    return [
        (len(tree.path(node)) - 1, run, size)
        for node, (run, size) in enumerate(zip(tree.runs, tree.bytes.tolist(), strict=True))
    ]


def test_a_frame_that_only_calls_one_other_is_folded_into_it():
    assert told(flame(ROWS, "folded")) == [
        (0, (), 1047),
        (1, (MAIN, STEP, CALL), 40),
        (2, (MLP, LINEAR, "malloc ??:0"), 30),
        (2, (HEAD, LINEAR, "malloc ??:0"), 10),
        (1, ("start_thread ??:0", "malloc ??:0"), 7),
        (1, (NO_STACK,), 1000),
    ]


def test_without_libraries_the_users_frames_are_left():
    assert told(flame(ROWS, "user")) == [
        (0, (), 1047),
        (1, (MAIN,), 40),
        (2, (STEP,), 40),
        (3, (MLP,), 30),
        (3, (HEAD,), 10),
        (1, ("malloc ??:0",), 7),
        (1, (NO_STACK,), 1000),
    ]


def test_all_frames_are_merged_from_the_outermost():
    assert told(flame(ROWS, "all")) == [
        (0, (), 1047),
        *((depth, (frame,), 40) for depth, frame in enumerate((MAIN, STEP, CALL), 1)),
        *((depth, (frame,), 30) for depth, frame in enumerate((MLP, LINEAR, "malloc ??:0"), 4)),
        *((depth, (frame,), 10) for depth, frame in enumerate((HEAD, LINEAR, "malloc ??:0"), 4)),
        (1, ("start_thread ??:0",), 7),
        (2, ("malloc ??:0",), 7),
        (1, (NO_STACK,), 1000),
    ]


@pytest.mark.parametrize("frames", ["all", "folded", "user"])
def test_what_ends_in_a_node_and_what_it_calls_sum_to_it(frames):
    tree = flame(ROWS, frames)
    below = [0] * len(tree.runs)
    for node, above in enumerate(tree.parent.tolist()):
        if above >= 0:
            below[above] += int(tree.bytes[node])
    assert [own + inner for own, inner in zip(tree.own.tolist(), below, strict=True)] == tree.bytes.tolist()


def test_a_node_in_sight_keeps_what_lies_above_it_and_tells_what_is_too_small():
    tree = flame(ROWS, "folded")
    seen, hidden = zip(*(tree.in_sight(node, 20) for node in (0, 1)), strict=True)
    assert [places.tolist() for places in seen] == [[0, 1, 2, 5], [0, 1, 2]]
    assert hidden == (2, 1)


def test_a_run_goes_by_the_innermost_line_of_the_user():
    assert label_of((MAIN, STEP, CALL)) == STEP
    assert label_of((CALL, LINEAR, "malloc ??:0")) == LINEAR
    assert label_of(("start_thread ??:0", "malloc ??:0")) == "malloc ??:0"


def test_a_stack_deeper_than_python_recurses_is_merged():
    deep = program("alloc 5 a at=deep", stacks={"deep": tuple(f"f{n} deep.py:{n}" for n in range(9_000))})
    rows = stack_table(deep, 0)
    assert len(flame(rows, "all").runs) == 9_001
    assert [len(run) for run in flame(rows, "folded").runs] == [0, 9_000]


def test_nothing_allocated_is_a_root_alone():
    assert told(flame((), "folded")) == [(0, (), 0)]
