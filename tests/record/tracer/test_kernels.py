"""What kernels take and give back within operators is in the tracer's numbers, to the profiler's byte."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from tb_memplugin import MemoryTracer
from tb_memplugin.record.tracer import kernels
from tb_memplugin.record.tracer.kernels import AllocatorLog, KernelMemory, Reported
from tb_memplugin.record.tracer.results import ROOT
from tb_memplugin.trace import Category, Kind
from tests.record.agreement import UNTUNED
from tests.record.tracer.truth import Both, both, train_step
from tests.training import MODELS, reported_events

CPU = 0
_LOG = AllocatorLog
SWITCHES = {f.__code__ for f in (_LOG.begin, _LOG.end, _LOG.stop, _LOG._disable, KernelMemory._end)}
profiler_enabled = torch._C._autograd._profiler_enabled


def in_bfloat16(kind):
    """A model whose forward runs under autocast."""

    def forward(self, *given):
        with torch.autocast("cpu", torch.bfloat16):
            return kind.forward(self, *given).float()

    return type(kind.__name__, (kind,), {"forward": forward})


AUTOCAST = {"cnn in bfloat16": in_bfloat16(MODELS["cnn"]), "mlp in bfloat16": in_bfloat16(UNTUNED["mlp"])}
"""Autocast drops its casts of weights in a hash table's order of addresses: 4 profiled runs, 4 orders."""

ALL = {**MODELS, **UNTUNED, **AUTOCAST}
SCALAR = 8
"""Bytes of a Python number as a tensor: a dispatch mode makes torch wrap each twice; alone, it is once."""


def signed(trace) -> np.ndarray:
    events = trace.events
    return np.where(events.kind == Kind.ALLOC, events.bytes, -events.bytes)


def frees_by_size(sizes: np.ndarray) -> np.ndarray:
    """Frees that follow one another, the largest first: whatever their order, levels between them agree."""
    turn = np.flatnonzero(np.diff(sizes < 0, prepend=False))
    return np.concatenate([np.sort(part) if (part < 0).any() else part for part in np.split(sizes, turn)])


def fresh(name):
    torch.manual_seed(0)
    model = ALL[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, optimizer)
    optimizer.zero_grad()
    gc.collect()
    return model, optimizer


def traced(name) -> MemoryTracer:
    model, optimizer = fresh(name)
    tracer = MemoryTracer()
    with tracer.trace(model, optimizer):
        for _ in range(2):
            train_step(model, optimizer)
    return tracer


def profiled(name) -> np.ndarray:
    """The profiler's running sum of the same steps, nothing of ours near."""
    model, optimizer = fresh(name)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for _ in range(2):
            train_step(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        reported, _ = reported_events(path)
    return np.cumsum([event[2] for event in reported])


@dataclass
class Run:
    """One model: the tracer alone, the profiler alone, and both at once (then the tracer steps aside)."""

    tracer: MemoryTracer
    curve: np.ndarray
    beside: Both
    in_any_order: bool


@pytest.fixture(
    scope="module",
    params=[
        *((name, threads) for threads in (1, 2) for name in (MODELS | UNTUNED)),
        *((name, 1) for name in AUTOCAST),
    ],
    ids=str,
)
def run(request) -> Run:
    name, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = Run(traced(name), profiled(name), both(ALL[name]), in_any_order=name in AUTOCAST)
    finally:
        torch.set_num_threads(before)
    if found.in_any_order:
        found.beside.bytes = frees_by_size(found.beside.bytes)
    return found


def test_the_peak_and_the_end_are_the_profilers_own(run):
    window = run.tracer.trace_result().window(CPU)
    assert int(window.max()) == int(run.curve.max())
    assert int(window[-1]) == int(run.curve[-1])


def without_second_scalars(run: Run) -> np.ndarray:
    """Mask of the profiler's events, beside the tracer, that the tracer alone has, too, in the same order."""
    sizes, found = signed(run.tracer.trace_result()), []
    ours = (frees_by_size(sizes) if run.in_any_order else sizes).tolist()
    place = 0
    for size in run.beside.bytes.tolist():
        found.append(place < len(ours) and ours[place] == size)
        place += found[-1]
    assert place == len(ours)
    return np.array(found)


def test_every_event_is_the_profilers_but_for_second_wraps_of_numbers(run):
    same = without_second_scalars(run)
    assert set(np.abs(run.beside.bytes[~same]).tolist()) <= {SCALAR}


def test_every_layers_peak_is_the_profilers_own(run):
    same, beside = without_second_scalars(run), run.beside
    calls, modules = beside.trace.calls, beside.trace.modules
    curve = np.concatenate(([0], np.cumsum(np.where(same, beside.bytes, 0))))
    expected: dict[str, int] = {}
    for began, ended, row in zip(calls.start_ns, calls.end_ns, calls.name, strict=True):
        low = int(np.searchsorted(beside.time_ns, began, side="left"))
        high = int(np.searchsorted(beside.time_ns, ended, side="right"))
        top = int(curve[low : high + 1].max())
        while row >= 0:
            key = modules[row].key or ROOT
            expected[key] = max(expected.get(key, top), top)
            row = modules[row].parent
    start = int(run.tracer.trace_result().live(CPU)[0])
    found = {name: peak - start for name, peak in run.tracer.get_peak_memory_per_layer().items()}
    assert found == expected


def test_nothing_is_left_unseen_and_nothing_unpaired(run):
    trace = run.tracer.trace_result()
    assert trace.notes == ()
    assert len(trace.allocations.unmatched_frees) == 0
    assert trace.allocations.unseen_frees == 0
    assert int(trace.live(CPU).max()) == run.tracer.result.peak_allocated


def test_a_kernels_buffer_is_a_temporary_of_its_operator_and_layer():
    layer, tracer = nn.Linear(4, 2), MemoryTracer()
    with tracer.trace(layer):
        out = layer(torch.ones(3, 4))
        out.sum().backward()  # the gradient is expanded: mm makes it whole, 3 x 2 floats
    trace = tracer.trace_result()
    blocks = trace.allocations
    mine = [
        row
        for row in range(len(blocks))
        if blocks.operator[row] >= 0 and trace.operators[blocks.operator[row]] == "aten::mm"
    ]
    buffer = min(mine, key=lambda row: int(blocks.bytes[row]))
    assert int(blocks.bytes[buffer]) == 24
    assert blocks.category[buffer] == Category.TEMPORARY
    assert trace.modules[blocks.module[buffer]].key == ""
    assert int(blocks.address[buffer]) == 1  # no storage is there: a number of ours


def test_beside_a_profiler_it_steps_aside_and_says_so():
    layer, tracer = nn.Linear(4, 2), MemoryTracer()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True), tracer.trace(layer):
        layer(torch.ones(3, 4))
    (note,) = tracer.trace_result().notes
    assert (
        "2 operators, with results of 72 bytes, ran while another profiler recorded" in note
    )  # 12 + 6 floats


def test_a_profiler_that_starts_and_stops_inside_sees_what_it_sees_without_the_tracer():
    layer, tracer = nn.Linear(4, 2), MemoryTracer()
    windows: list[list[str]] = []

    def steps():
        windows.clear()
        plan = schedule(wait=1, warmup=1, active=2, repeat=2)
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=plan,
            on_trace_ready=lambda prof: windows.append(
                [event.name for event in prof.events() if event.name == "aten::addmm"]
            ),
        ) as prof:
            for _ in range(8):
                layer(torch.ones(3, 4))
                prof.step()

    with tracer.trace(layer):
        steps()
    assert [len(names) for names in windows] == [4, 4]  # each call and, below our mode, again
    steps()
    assert [len(names) for names in windows] == [2, 2]
    assert not profiler_enabled()


def test_a_profiler_that_starts_inside_an_operator_in_python_works():
    script = """
import torch
from torch.profiler import profile, ProfilerActivity
from tb_memplugin import MemoryTracer

@torch.library.custom_op("tb_memplugin_test::profiles", mutates_args=())
def profiles(x: torch.Tensor) -> torch.Tensor:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        out = x * 2
    assert any(event.name == "aten::mul" for event in prof.events())
    return out

tracer = MemoryTracer()
with tracer.trace(torch.nn.Identity()):
    profiles(torch.ones(10))
assert not torch.autograd._profiler_enabled()
with profile(activities=[ProfilerActivity.CPU]) as prof:
    torch.ones(10) * 2
assert any(event.name == "aten::mul" for event in prof.events())
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "done", ended.stderr
    assert "Exception in RecordFunction" not in ended.stderr


def test_an_operator_that_fails_leaves_no_profiler_and_no_bytes():
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert not profiler_enabled()
    trace = tracer.trace_result()
    assert int(trace.live(CPU)[-1]) == int(trace.live(CPU)[0])


def interrupted(after: int) -> bool:
    """Trace an operator, with Ctrl-C after so many lines of `SWITCHES`, if there are more."""
    x, lines = torch.randn(4), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code in SWITCHES and event == "line":
            lines += 1
            if lines > after:
                raise KeyboardInterrupt  # ends that tracing, too
        return trace

    before = sys.gettrace()
    try:
        with MemoryTracer().trace(nn.Identity()):
            sys.settrace(trace)
            x + 1
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupt_after_each_line() -> None:
    after = 0
    while interrupted(after):
        assert not profiler_enabled(), f"after {after} lines"
        after += 1
    assert after > 20


def test_ctrl_c_between_any_two_lines_leaves_no_profiler():
    code = "from tests.record.tracer import test_kernels; test_kernels.interrupt_after_each_line()"
    subprocess.run([sys.executable, "-c", code], check=True)  # what it interrupts would meet later tests


def test_what_an_operator_took_before_it_failed_is_in_the_peak():
    matrix = -torch.eye(64)
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()), pytest.raises(RuntimeError, match="not positive-definite"):
        torch.linalg.cholesky(matrix)
    assert tracer.result.peak_allocated - int(tracer.trace_result().live(CPU)[0]) >= matrix.nbytes


def test_nested_tracers_both_see_a_kernels_buffers():
    layer, outer, inner = nn.Linear(4, 2), MemoryTracer(), MemoryTracer()
    with outer.trace(layer), inner.trace(layer):
        layer(torch.ones(3, 4)).sum().backward()
    sizes = [signed(one.trace_result()).tolist() for one in (outer, inner)]
    assert sizes[0] == sizes[1]
    assert sizes[0].count(24) >= 2


def test_nested_tracers_leave_nothing_unseen_where_numbers_become_tensors():
    one, outer, inner = torch.ones(10), MemoryTracer(), MemoryTracer()
    with outer.trace(nn.Identity()), inner.trace(nn.Identity()):
        one.mul_(0.5)
        one.div(3)
    for tracer in (outer, inner):
        assert tracer.trace_result().notes == ()
        signs = np.sign(signed(tracer.trace_result()))
        assert signs.sum() == 0  # what `div` gave went, too


def test_states_of_random_generators_count_and_torchs_function_comes_back():
    before, tracer = torch.get_rng_state, MemoryTracer()
    state = before()
    with tracer.trace(nn.Identity()):
        kept = torch.get_rng_state()
        assert torch.equal(kept, state)
    assert torch.get_rng_state is before
    assert torch.random.get_rng_state is before
    assert signed(tracer.trace_result()).tolist() == [state.nbytes]


def test_a_function_of_torch_that_is_pickled_in_a_trace_is_torchs():
    before = pickle.dumps(torch.get_rng_state)
    with MemoryTracer().trace(nn.Identity()):
        assert pickle.dumps(torch.get_rng_state) == before
        assert torch.UntypedStorage.resize_.__qualname__ == "StorageBase.resize_"


def test_a_function_that_wraps_ours_and_stays_is_called_once_in_the_next_trace(monkeypatch):
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        ours = torch.get_rng_state
        monkeypatch.setattr(torch, "get_rng_state", lambda: ours())
        monkeypatch.setattr(torch.random, "get_rng_state", torch.get_rng_state)
    with tracer.trace(nn.Identity()):
        state = torch.get_rng_state()
    assert signed(tracer.trace_result()).tolist() == [state.nbytes]


def test_a_thread_looks_at_its_own_allocator_alone():
    layer, tracer = nn.Linear(4, 2), MemoryTracer()

    def call():
        for _ in range(20):
            layer(torch.ones(3, 4))

    with tracer.trace(layer):
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tracer.get_layer_stats()[ROOT].allocated_bytes == 4 * 20 * 24


def test_no_report_is_earlier_than_its_operator_where_the_thread_had_to_wait(monkeypatch):
    """Its time is that of the end less what the profiler's clock tells: a thread may wait between the two."""

    def asked_and_waited() -> int:
        now = time.time_ns()
        time.sleep(0.01)
        return now

    log, reports = AllocatorLog(), deque[Reported]()
    before = time.time_ns()
    assert log.begin(reports)
    kept = torch.empty(100)
    monkeypatch.setattr(kernels, "time_ns", asked_and_waited)
    log.end(reports)
    ((when, size),) = reports
    assert size == kept.nbytes
    assert when >= before
