"""Call stacks and source lines of a program that a person can follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis.lines import line_table
from tb_memplugin.analysis.source_lines import is_user_code, leading_frame, line_key
from tb_memplugin.analysis.stacks import flame, stack_table
from tb_memplugin.trace import TensorMetadata
from tests.recorded_program import program

TORCH = "/usr/lib/python3.12/site-packages/torch"
LINEAR, ATTEND = f"linear {TORCH}/nn/functional.py:9", "attend /work/model.py:20"
TRAIN = "train /work/train.py:5"
STACKS = {
    "linear": ("malloc ??:0", LINEAR, ATTEND, TRAIN),
    "attend": ("malloc ??:0", ATTEND, TRAIN),
    "library": ("malloc ??:0", LINEAR),
    "native": ("malloc ??:0", "start_thread ??:0"),
}
PROGRAM = program(
    "before 1000 w",
    "alloc 10 a at=linear",
    "alloc 30 b at=linear",
    "alloc 5 c at=attend",
    "alloc 7 d at=library",
    "alloc 3 e at=native forward=linear",
    "alloc 2 f at=native",
    "free a",
    stacks=STACKS,
)
END = len(PROGRAM.events) - 1


def test_the_table_sums_to_what_is_alive():
    rows = stack_table(PROGRAM, 0, END)
    assert [(row.frames, row.bytes, row.calls) for row in rows] == [
        ((), 1000, 1),
        (STACKS["linear"], 30, 1),
        (STACKS["library"], 7, 1),
        (STACKS["attend"], 5, 1),
        (STACKS["native"], 3, 1),
        (STACKS["native"], 2, 1),
    ]
    assert sum(row.bytes for row in rows) == PROGRAM.live(0)[-1]


def test_a_stack_has_the_tensor_that_each_of_its_allocations_holds():
    """Both of `linear` hold the same, the one of `attend` another; of `native`'s second nothing is known."""
    small, large = TensorMetadata("float32", (2,), (1,)), TensorMetadata("int8", (5,), (1,))
    rows = np.array([0, 0, 1, -1, 0, -1, -1], np.int32)
    seen = replace(PROGRAM, tensors=(small, large), events=replace(PROGRAM.events, tensor=rows))
    table = stack_table(seen, 0)
    of_stack = {(row.frames, row.forward): row.tensor for row in table}
    assert of_stack[STACKS["linear"], ()] == "float32 [2]"
    assert of_stack[STACKS["attend"], ()] == "int8 [5]"
    assert of_stack[STACKS["library"], ()] is None
    assert of_stack[STACKS["native"], STACKS["linear"]] == "float32 [2]"
    tree = flame(table)
    names = dict(zip((run[-1:] for run in tree.runs), tree.tensors, strict=True))
    assert (names[(ATTEND,)], names[(TRAIN,)]) == (None, None)
    assert "int8 [5]" in tree.tensors


def test_without_an_event_the_table_holds_every_allocation_of_the_trace():
    first = stack_table(PROGRAM, 0)[0]
    assert (first.frames, first.bytes, first.calls, first.bytes_per_call) == (STACKS["linear"], 40, 2, 20.0)
    assert sum(row.bytes for row in stack_table(PROGRAM, 0)) == 57


def test_a_backward_is_told_by_the_forward_that_it_belongs_to():
    native = [row for row in stack_table(PROGRAM, 0) if row.frames == STACKS["native"]]
    assert [(row.bytes, row.forward) for row in native] == [(3, STACKS["linear"]), (2, ())]


def test_a_stack_deeper_than_python_recurses_is_a_tree():
    deep = tuple(f"f a.py:{line}" for line in range(5_000))
    tree = flame(stack_table(program("alloc 1 a at=deep", stacks={"deep": deep}), 0, 0))
    assert (len(tree.path(len(tree.runs) - 1)), tree.runs[-1]) == (5_001, ("f a.py:0",))


def test_a_device_without_blocks_has_no_rows():
    empty = program("alloc 1 a device=1")
    assert (stack_table(empty, 0), line_table(empty, 0)) == ((), ())


def test_lines_are_the_innermost_of_the_users_code():
    rows = line_table(PROGRAM, 0)
    assert [(row.key, row.bytes, row.calls, row.median_bytes) for row in rows] == [
        ("/work/model.py:20 (attend)", 45, 3, 10.0),
        (f"{TORCH}/nn/functional.py:9 (linear)", 7, 1, 7.0),
        ("??:0 (malloc)", 5, 2, 2.5),
    ]
    assert line_table(PROGRAM, 0, -1)[0].key == "(no stack)"


@pytest.mark.parametrize(
    ("text", "mine"),
    [
        ("f /home/me/torch_project/train.py:1", True),
        ("f /home/me/lib/model.py:1", True),
        ("f train.py:1", True),
        (r"f C:\work\train.py:1", True),
        (r"f C:\Python311\Lib\site-packages\torch\nn\functional.py:1", False),
        ("f /usr/lib/python3.12/threading.py:1", False),
        ("f /src/pytorch/torch/nn/modules/module.py:1", False),
        ("step torch/profiler/profiler.py:1227", False),
        ("f /tmp/torchinductor_me/ab/cab.py:1", False),
        ("f <eval_with_key>.3:1", False),
        ("<module> <ipython-input-3-abc>:1", True),
        ("at::mm RegisterCUDA.cpp:0", False),
    ],
)
def test_the_users_code_is_told_from_libraries(text, mine):
    assert is_user_code(text) == mine


def test_a_stack_of_cpp_goes_by_the_first_frame_that_not_every_stack_ends_in():
    native = (
        "torch::unwind::unwind() ??:0",
        "torch::cuda::(anonymous namespace)::gather_with_cpp() memory_snapshot.cpp:0",
        "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(void**) :0",
        "at::detail::empty_cuda(c10::ArrayRef<long>) ??:0",
        "at::native::mm_out(at::Tensor const&) ??:0",
        "torch::autograd::Engine::thread_main() ??:0",
    )
    blocks = program("alloc 5 a at=n", stacks={"n": native})
    assert [row.key for row in line_table(blocks, 0)] == ["??:0 (at::native::mm_out(at::Tensor const&))"]
    assert leading_frame(native[:2]) == native[0]
    node = "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&) ??:0"
    assert leading_frame((*native[:5], node, native[5])) == node


def test_the_line_of_a_node_of_autograd_has_its_name() -> None:
    node = "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"
    assert line_key(f"{node} ??:0") == "??:0 (MmBackward0)"
    assert line_key("MmBackward0::apply model.py:7") == "model.py:7 (MmBackward0::apply)"
