"""Frames: function, file and line out of one text."""

from __future__ import annotations

import pytest

from tb_memplugin.trace.frames import Frame, lowest_in_stacks, read_frame


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("forward /work/model.py:7", Frame("forward", "/work/model.py", 7)),
        (r"f C:\My Files\a b.py:3", Frame("f", r"C:\My Files\a b.py", 3)),
        ("f a>b/c d.py:3", Frame("f", "a>b/c d.py", 3)),
        ("<module> <string>:1", Frame("<module>", "<string>", 1)),
        ("_call <frozen importlib._bootstrap>:241", Frame("_call", "<frozen importlib._bootstrap>", 241)),
        ("at::mm(int, int) Register CUDA.cpp:0", Frame("at::mm(int, int) Register", "CUDA.cpp", 0)),
        ("bool operator< <int>(int, int) ??:0", Frame("bool operator< <int>(int, int)", "??", 0)),
        ("PyRun :0", Frame("PyRun", "", 0)),
        ("g a.py:codegen(fn_backward):21", Frame("g", "a.py:codegen(fn_backward)", 21)),
        ("f x.py:7 [fx mm_1 call_function aten.mm]", Frame("f", "x.py", 7, "mm_1 call_function aten.mm")),
        ("nothing of the kind", Frame("nothing of the kind", "", 0)),
        ("", Frame("", "", 0)),
    ],
)
def test_a_text_is_taken_apart(text, frame):
    assert read_frame(text) == frame


@pytest.mark.parametrize(
    "text",
    [
        " [fx " * 200_000,
        "f <" + ">" * 1_000_000 + " x:1",
        "f a.py:" + "9" * 5_000,
        ":" * 1_000_000,
        "f a.py:1 [fx ",
    ],
)
def test_a_hostile_text_is_read_at_once(text):
    assert read_frame(text).function


def test_python_is_told_from_native_code():
    python = ["f a.py:1", "f <string>:1", "f <eval_with_key>.3:9", "f a.py:codegen(fn):2"]
    native = ["f ??:0", "f a.cpp:4", "f :0", "f methodobject.c:537"]
    assert all(read_frame(text).is_python for text in python)
    assert not any(read_frame(text).is_python for text in native)


def test_only_python_whose_line_is_not_known_has_no_line():
    texts = ["f train.py:20", "f train.py:0", "f a.cpp:4", "f ??:0"]
    assert [read_frame(text).place for text in texts] == ["train.py:20", "train.py", "a.cpp:4", "??:0"]


def test_the_lowest_rank_of_a_stack_is_found():
    rank = {"a": 2, "b": 0, "c": 1}
    assert lowest_in_stacks(rank, [("a", "b"), ("c", "a"), ()], 3).tolist() == [0, 1, 3]


def test_a_function_whose_name_has_the_mark_of_torch_fx_is_read_whole() -> None:
    assert read_frame("a [fx b] m.py:3 [fx add_1 call_function]") == (
        "a",
        "[fx b] m.py",
        3,
        "add_1 call_function",
    )
