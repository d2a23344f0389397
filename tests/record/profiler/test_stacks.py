"""Call stacks of live profiles: the functions of the exported trace, with the lines that ran.

In backward those of the forward, too. `traceback` is the oracle of lines.
"""

from __future__ import annotations

import copy
import gc
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from linecache import getline
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tb_memplugin import load, memory_trace_handler
from tb_memplugin.analysis.source_lines import leading_frame
from tb_memplugin.commands import main
from tb_memplugin.read.kineto.trace import trace_from_kineto
from tb_memplugin.read.python_frames import MOST_FRAMES, CallTree, frame_text
from tb_memplugin.record.profiler.memory_events import read_memory_events
from tb_memplugin.record.profiler.stacks import stacks_of
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.tree_columns import (
    ProfilerTree,
    as_profiled,
    pack_maker,
    pack_memory,
    pack_node,
    pack_position,
    with_library_folder,
)
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.store.reader import load_window
from tb_memplugin.trace import Kind, MemoryTrace, Phase
from tests.cli import CliRunner
from tests.record.profiler.test_attribution import ALL
from tests.test_handler import loop
from tests.traces import trace
from tests.training import Transformer, train

HERE = Path(__file__).name
Told = tuple[int, int, tuple[str, ...]]


@pytest.mark.parametrize(("name", "shapes"), [*((name, False) for name in ALL), ("transformer", True)])
def test_every_allocation_has_the_stack_that_the_exported_trace_tells(name: str, shapes: bool) -> None:
    for cycle in train(ALL[name](), with_stack=True, record_shapes=shapes):
        found = without_lines(cycle.trace)
        assert found == without_lines(trace_from_kineto(cycle.chrome, name))
        assert all(stack for _, _, stack in found)


def test_lines_are_those_that_ran(tmp_path: Path) -> None:
    """In the exported trace they are first lines, and functions that ran when the window began have none.

    torch names the line at which those were then: that of the `with`, not one that allocates.
    """
    blocks: list[Tensor] = []
    code = compile(
        "import torch\nfor _ in range(1):\n  blocks.append(torch.ones(3_000))\n", "outside.py", "exec"
    )
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        with_stack=True,
        on_trace_ready=memory_trace_handler(tmp_path, "w"),
    ) as recorded:
        blocks.append(torch.ones(1_000))
        blocks.append(_called_in_the_window())
        exec(code, {"blocks": blocks})
        blocks.append(blocks[0][:750] + 1)
    recorded.export_chrome_trace(str(tmp_path / "k.json"))
    here, own = test_lines_are_those_that_ran.__code__, _called_in_the_window.__code__
    lines = {line for *_, line in here.co_lines() if line is not None}
    ran = min(line for line in lines if "torch.ones(1_000))" in getline(__file__, line))
    recording, exported_trace = (_lines_of(load(path)) for path in (tmp_path, tmp_path / "k.json"))
    assert recording == {
        3_000: f"{here.co_name} {HERE}:0",  # an operator that no function called
        4_000: f"{here.co_name} {HERE}:{ran}",
        8_000: f"{own.co_name} {HERE}:{own.co_firstlineno + 2}",
        12_000: "<module> outside.py:3",
    }
    assert exported_trace == {
        3_000: f"{here.co_name} {HERE}:0",
        4_000: f"{here.co_name} {HERE}:0",
        8_000: f"{own.co_name} {HERE}:{own.co_firstlineno}",
        12_000: "<module> outside.py:0",
    }


def test_installed_code_is_not_taken_for_the_users(tmp_path: Path) -> None:
    tensor = torch.ones(3_000)
    with profile(profile_memory=True, with_stack=True, on_trace_ready=memory_trace_handler(tmp_path, "w")):
        kept = _copied(tensor)
    trace = load(tmp_path)
    stacks = [trace.stack(row) for row in trace.allocations.stack[trace.allocations.born >= 0]]
    stack = next(stack for stack in stacks if any("deepcopy" in frame for frame in stack))
    assert kept.nbytes == 12_000
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert any(frame.startswith(f"deepcopy lib/python{version}/copy.py:") for frame in stack)
    assert any(frame.startswith("__deepcopy__ torch/_tensor.py:") for frame in stack)
    leading = leading_frame(stack) or ""
    assert leading.startswith("_copied ")
    assert leading.endswith(f"{HERE}:{_copied.__code__.co_firstlineno + 1}")
    assert with_library_folder("pytest/__init__.py") == "site-packages/pytest/__init__.py"
    assert with_library_folder("tests/pytest/__init__.py") == "tests/pytest/__init__.py"


def test_the_allocators_history_has_the_paths_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's profiler cuts off the folders of `sys.path`; the allocator's history does not."""
    monkeypatch.syspath_prepend(tmp_path)
    full = f"step {tmp_path}/mine/train.py:3", f"main {pytest.__file__}:7", "malloc ??:0"
    short = "step mine/train.py:3", "main site-packages/pytest/__init__.py:7", "malloc ??:0"
    assert as_profiled(trace("alloc 64 a", stacks=(full,))).stacks == (short,)


def _copied(tensor: Tensor) -> Tensor:
    return copy.deepcopy(tensor)


def _called_in_the_window() -> Tensor:
    size = 2_000
    return torch.ones(size)


def _lines_of(trace: MemoryTrace) -> dict[int, str]:
    """The innermost Python frame of each size that is asked for, without its folder."""
    blocks_of = {
        int(size): next(text for text in trace.stack(stack) if "built-in" not in text)
        for size, stack in zip(trace.allocations.bytes, trace.allocations.stack, strict=True)
        if size in (3_000, 4_000, 8_000, 12_000) and stack >= 0
    }
    return {size: re.sub(r"\S*/", "", text) for size, text in blocks_of.items()}


class _Traced(TorchDispatchMode):
    """Keeps the functions and lines of this file around each operator that allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[list[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("cat", "mm", "tanh"):
            frames = [(frame.name, frame.lineno) for frame in reversed(traceback.extract_stack())]
            self.stacks.append([f"{name}:{line}" for name, line in frames if name in ("forward", "attend")])
        return func(*args, **(kwargs or {}))


class _Lines(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = _Lines(width + 1) if width < 103 else nn.Identity()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((x, x[:, :1]), 1)

        def attend(x: Tensor) -> Tensor:
            scores = torch.matmul(x.T, x)
            return torch.tanh(scores)

        attend(x)
        with torch.profiler.record_function("range"):
            return self.inner(x)


def test_lines_within_modules_and_closures_are_those_that_traceback_tells() -> None:
    model, x = _Lines(100), torch.ones(7, 100)
    with _Traced() as traced:
        model(x)
    trace, _ = profiled(lambda: model(x))
    stacks = [
        [f"{name}:{place.rpartition(':')[2]}" for name, _, place in (text.partition(" ") for text in stack)]
        for *_, stack in allocations(trace)
    ]
    own = [[text for text in stack if text.startswith(("forward", "attend"))] for stack in stacks]
    assert own == traced.stacks
    assert list(map(len, own)) == [1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5]


def test_without_stacks_none_is_recorded() -> None:
    (cycle,) = train(Transformer())
    assert cycle.trace.stacks == ()
    assert set(cycle.trace.events.stack) == set(cycle.trace.events.forward) == {-1}


def test_functions_that_are_gone_when_torch_makes_their_names_cost_no_recording(tmp_path: Path) -> None:
    """torch keeps no copy of a name: other bytes lie there by then, and these are seldom text."""
    kept: list[list[bytes]] = []
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        with_stack=True,
        on_trace_ready=memory_trace_handler(tmp_path, "w"),
    ):
        for number in range(20):
            function = f"made_{number}_{'x' * 40}"
            names: dict[str, Any] = {}
            exec(
                compile(
                    f"import torch\ndef {function}():\n    return torch.ones(10)\n",
                    f"g{number}.py",
                    "exec",
                ),
                names,
            )
            names[function]()
            names.clear()
        gc.collect()
        kept.extend([b"\xff" * size for _ in range(200)] for size in range(20, 200))
    trace = load_window(str(*tmp_path.rglob("*.mem")))
    assert trace.events.bytes[trace.events.kind == Kind.ALLOC].tolist() == [40] * 20


def test_what_was_alive_at_the_start_has_no_stack() -> None:
    (cycle,) = train(Transformer(), with_stack=True)
    assert set(cycle.trace.allocations.stack[: len(cycle.trace.start)]) == {-1}


def test_the_stacks_of_a_file_are_few_and_none_tells_an_address() -> None:
    (cycle,) = train(Transformer(), with_stack=True)
    assert len(cycle.trace.stacks) == len(set(cycle.trace.stacks)) < 60
    assert not any("0x" in frame for stack in cycle.trace.stacks for frame in stack)


def double(x: Tensor) -> Tensor:
    return x * 2


def squash(x: Tensor) -> Tensor:
    return torch.tanh(x)


def test_in_backward_the_forward_frames_are_those_of_the_line_that_made_the_node() -> None:
    def work() -> None:
        x = torch.ones(64, requires_grad=True)
        squash(double(x)).sum().backward()

    trace, _ = profiled(work)
    assert forward_functions(trace, "MulBackward0") == {"double"}
    assert forward_functions(trace, "TanhBackward0") == {"squash"}
    backward = trace.events.forward >= 0
    assert set(trace.events.phase[backward]) == {Phase.BACKWARD}
    around = {frame for row in trace.events.stack[backward] for frame in trace.stacks[row]}
    assert any("run_backward" in frame for frame in around)


@pytest.mark.parametrize("name", ["transformer", "lstm", "reentrant", "twice"])
def test_forward_frames_are_in_the_module_that_owns_the_node(name: str) -> None:
    """The hooks say by sequence number which call made a node: the operator that made it ran in that call."""
    model = ALL[name]()
    (cycle,) = train(model, with_stack=True)
    trace = cycle.trace
    checked = 0
    for row in allocs(trace):
        owner, forward = trace.modules[trace.events.module[row]], trace.events.forward[row]
        if forward >= 0 and not runs_again(trace, row):
            stack = trace.stacks[forward]
            calls = [frame.rpartition(":")[0] for frame in stack if frame.startswith("forward ")]
            assert calls[:1] == (calling(model.get_submodule(owner.key)) if owner.is_module else [])
            checked += 1
    assert checked > 20


def test_what_a_thread_without_python_allocates_in_backward_goes_by_its_forwards_stack() -> None:
    """As on a GPU: the node (number 7) runs on thread 2, what made it in `step` on thread 1."""
    tree = ProfilerTree()
    step = tree.frames.add("train.py(5): step", tree.frames.add("train.py(1): main", -1))
    tree.makers += [pack_maker(10, 6, -1), pack_maker(20, 7, step), pack_maker(30, 8, -1)]
    tree.threads.append((1, 0, 0, 3))
    tree.memory.append(pack_memory(55, 0x1000, 64, 64, 0))
    tree.positions.append(pack_position(-1, 0, -1))
    tree.node_names.append("MulBackward0")
    tree.node_rows.append(pack_node(50, 60, -1, 7, 2))
    tree.threads.append((2, 1, 0, 3))
    found = stacks_of(tree, read_memory_events(tree), main=1)
    assert found.stacks == (("step train.py:5", "main train.py:1"),)
    assert (found.stack.tolist(), found.forward.tolist()) == ([0], [0])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_function_of_ones_own_has_its_backwards_frames_and_its_callers_as_forward() -> None:
    def work() -> None:
        Doubled.apply(torch.ones(64, requires_grad=True)).sum().backward()

    trace, chrome = profiled(work)
    assert without_lines(trace) == without_lines(trace_from_kineto(chrome, "x"))
    row = next(row for row in allocs(trace) if runs(trace.stacks[trace.events.stack[row]], "backward"))
    assert runs(trace.stacks[trace.events.forward[row]], "work")


class Eager(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        torch.empty(1000)
        return func(*args, **(kwargs or {}))


def test_python_inside_an_operator_is_in_the_stack() -> None:
    def work() -> None:
        with Eager():
            torch.add(torch.ones(64), 1)

    trace, chrome = profiled(work)
    assert without_lines(trace) == without_lines(trace_from_kineto(chrome, "x"))
    inner = next(row for row in allocs(trace) if trace.events.bytes[row] == 4000)
    assert "__torch_dispatch__" in stack_text(trace, inner)
    assert runs(trace.stacks[trace.events.stack[inner]], "work")


def test_a_range_that_a_function_opened_does_not_keep_it_in_later_stacks() -> None:
    def work() -> None:
        with torch.profiler.record_function("range"):
            torch.ones(1000)

    trace, chrome = profiled(work)
    for one in (trace, trace_from_kineto(chrome, "x")):
        (stack,) = (frames for _, size, frames in allocations(one) if size == 4000)
        assert not any("__enter__" in frame for frame in stack)
        assert any(frame.startswith("work ") for frame in stack)


def test_stacks_are_cut_where_they_are_too_deep() -> None:
    def sink(depth: int) -> None:
        torch.ones(1000) if depth == 0 else sink(depth - 1)

    trace, chrome = profiled(lambda: sink(300))
    assert without_lines(trace) == without_lines(trace_from_kineto(chrome, "x"))
    assert max(map(len, trace.stacks)) == MOST_FRAMES
    assert any("1 call stacks have more than 256 frames" in note for note in trace.notes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of a small training with stacks."""
    folder = tmp_path_factory.mktemp("run")
    handler = memory_trace_handler(folder, "rank0")
    loop(handler, plan=None, steps=30, step_the_profiler=False, with_stack=True)
    return folder


def test_stacks_come_back_from_the_side_file_which_stays_small(run: Path) -> None:
    (side_file,) = run.rglob("*.mem")
    trace = load_window(str(side_file))
    assert all(stack for _, _, stack in allocations(trace))
    assert side_file.stat().st_size < 10 * len(trace.events)


@pytest.mark.parametrize("by", ["line", "stack"])
def test_the_command_divides_a_recorded_peak_by_lines_and_stacks(run: Path, by: str) -> None:
    result = CliRunner().invoke(main, ["peak", str(run), "--by", by, "--top", "0", "--json"])
    (device,) = json.loads(result.stdout)["devices"]
    sizes = {part["key"]: part["bytes"] for part in device["breakdown"]}
    assert sum(sizes.values()) == device["peak_bytes"]
    assert sum(size for key, size in sizes.items() if key.startswith("(no stack)")) <= device["start_bytes"]
    assert any("training.py" in key and "forward" in key for key in sizes)


def test_a_frame_reads_as_function_and_line_and_a_builtin_without_its_address() -> None:
    assert frame_text("a(b)/train.py(12): step") == "step a(b)/train.py:12"
    assert (
        frame_text("<built-in method mul of Tensor object at 0x7f00a0>")
        == "<built-in method mul of Tensor object>"
    )
    assert frame_text("<built-in function len>") == "<built-in function len>"


def test_a_chain_of_frames_has_one_key_however_often_it_is_met() -> None:
    frames = CallTree()
    main = frames.add("train.py(1): main", -1)
    step = frames.add("train.py(5): step", main)
    assert frames.add("train.py(5): step", main) == step
    rows, stacks, cut = frames.stacks(np.array([step, -1, main, step]))
    assert rows.tolist() == [1, -1, 0, 1]
    assert stacks == (("main train.py:1",), ("step train.py:5", "main train.py:1"))
    assert cut == 0


def profiled(work: Callable[[], object]) -> tuple[MemoryTrace, dict[str, Any]]:
    """Run something under the profiler, with no model given; the trace, and what the profiler exports."""
    recorder = WindowRecorder({}, [])
    watch(recorder)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as prof:
        work()
    window = recorder.take()
    assert window is not None
    return trace_from_profile(prof, window), exported(prof)


def exported(prof: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        prof.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def allocs(trace: MemoryTrace) -> list[int]:
    return np.flatnonzero(trace.events.kind == Kind.ALLOC).tolist()


def allocations(trace: MemoryTrace) -> list[Told]:
    """Address, bytes and stack of every alloc, in time order."""
    events = trace.events
    stacks = (*trace.stacks, ())
    return [
        (int(events.address[row]), int(events.bytes[row]), stacks[events.stack[row]]) for row in allocs(trace)
    ]


def without_lines(trace: MemoryTrace) -> list[Told]:
    """The same without the lines of frames, and without the folders that the exported trace leaves out."""
    beyond = r"(?<= )(site-packages|lib/python[\d.]+)/|:\d+$"
    return [
        (address, size, tuple(re.sub(beyond, "", frame) for frame in stack))
        for address, size, stack in allocations(trace)
    ]


def runs(stack: tuple[str, ...], function: str) -> bool:
    """Whether a function of this file is in a stack."""
    return any(frame.startswith(f"{function} ") and HERE in frame for frame in stack)


def calling(module: nn.Module) -> list[str]:
    """The frame of a module's own `forward`."""
    code = type(module).forward.__code__
    place = (
        code.co_filename.partition("site-packages/")[2] or f"tests/{code.co_filename.partition('tests/')[2]}"
    )
    return [f"forward {place}"]


def runs_again(trace: MemoryTrace, row: int) -> bool:
    """Whether it was born in a forward that checkpointing runs once more during backward."""
    return any(frame.startswith("forward ") for frame in trace.stacks[trace.events.stack[row]])


def stack_text(trace: MemoryTrace, row: int) -> str:
    return " | ".join(trace.stacks[trace.events.stack[row]])


def forward_functions(trace: MemoryTrace, node: str) -> set[str]:
    """This file's innermost functions in the forward frames of what a node allocated."""
    events = trace.events
    rows = [row for row in allocs(trace) if trace.operators[events.operator[row]] == node]
    stacks = [trace.stacks[row] for row in events.forward[rows].tolist()]
    return {next(frame for frame in stack if HERE in frame).partition(" ")[0] for stack in stacks}


def test_the_frames_in_which_we_call_watched_modules_are_in_no_stack(tmp_path):
    """They would stand between a module's call and its forward, in every stack of a recorded window."""

    def frames(**given):
        handler = memory_trace_handler(tmp_path / str(len(given)), **given)
        with profile(profile_memory=True, with_stack=True, on_trace_ready=handler):
            model(torch.ones(2, 3))
        (window,) = (tmp_path / str(len(given))).rglob("*.mem")
        functions = {
            tuple(frame.rpartition("/")[2].rpartition(":")[0] for frame in stack)
            for stack in load_window(str(window)).stacks
        }
        return {stack for stack in functions if any("linear.py" in frame for frame in stack)}

    model = nn.Sequential(nn.Linear(3, 3))
    watched = frames(model=model)
    assert watched == frames()
    assert not any("module_calls" in frame for stack in watched for frame in stack)
