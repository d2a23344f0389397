"""On CUDA every number equals the caching allocator's own counters. Needs an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from tb_memplugin.analysis.divisions import DIVISIONS
from tb_memplugin.analysis.moments import moment
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.read.categories import WORKSPACE_BYTES
from tb_memplugin.read.cublas import (
    LT_WORKSPACE,
    LtWorkspace,
    keeps_workspaces,
    lt_needs_cublas,
    lt_workspace,
)
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.store.reader import load_window
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tests.gpu.training import train_step
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


@dataclass
class Recorded:
    traces: list[MemoryTrace] = field(default_factory=list)
    start: int = 0
    peaks: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    parameters: int = 0
    others: int = 0
    """Alive before the model was: of other tests in this process."""


def record(name: str, *, amp: bool = False, fused: bool = False, stack: bool = False) -> Recorded:
    """Train on the GPU with the allocator's own peak counters read at every step's end."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = MODELS[name]().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True if fused else None)
    recorder = WindowRecorder({"": model}, [optimizer])
    watch(recorder)
    seen = Recorded(parameters=in_blocks(model), others=others)

    def ready(prof: profile) -> None:
        window = recorder.take()
        assert window is not None
        seen.traces.append(trace_from_profile(prof, window))

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        profile_memory=True,
        with_stack=stack,
        on_trace_ready=ready,
    ) as prof:
        for number in range(5):
            torch.cuda.reset_peak_memory_stats()
            if number == 2:
                seen.start = torch.cuda.memory_allocated()
            x, y = (t.cuda() for t in model.batch())
            with torch.autocast("cuda", torch.bfloat16) if amp else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            if number >= 2:
                seen.peaks.append(torch.cuda.max_memory_allocated())
                seen.reserved.append(torch.cuda.max_memory_reserved())
                seen.ends.append(torch.cuda.memory_allocated())
            prof.step()
    return seen


def in_blocks(model: torch.nn.Module) -> int:
    """Bytes of the parameters' storages (cuDNN keeps an LSTM's in one) in blocks of 512 bytes."""
    behind = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    return sum((size + 511) // 512 * 512 for size in behind.values())


CASES = [
    *((name, {}) for name in MODELS),
    ("transformer", {"amp": True}),
    ("transformer", {"fused": True}),
    ("cnn", {"stack": True}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def seen(request) -> Recorded:
    name, options = request.param
    return record(name, **options)


def test_peak_start_end_and_reserved_are_the_allocators_own(seen):
    (trace,) = seen.traces
    device = trace.device_row("cuda:0")
    stats = step_stats(trace, device)
    assert stats[0].start_bytes == seen.start
    assert [step.peak_bytes for step in stats] == seen.peaks
    assert [step.end_bytes for step in stats] == seen.ends
    assert [step.peak_reserved_bytes for step in stats] == seen.reserved


def test_parts_sum_and_unknown_is_small(seen):
    (trace,) = seen.traces
    device = trace.device_row("cuda:0")
    for step in step_stats(trace, device):
        at = moment(trace, device, step.peak_event)
        for by in DIVISIONS:
            assert sum(part.bytes for part in at.parts(by)) == step.peak_bytes
        parts = {part.key: part.bytes for part in at.parts("category")}
        named = step.peak_bytes - parts.get("workspace", 0)
        assert parts.get("unknown", 0) - seen.others <= named // 100, (step.step, parts, trace.notes)


def test_workspaces_from_before_the_window_are_told_apart(seen):
    """A matrix product has one on the thread of the forward, and one on autograd's; or each has its own."""
    (trace,) = seen.traces
    kept = trace.start.bytes[trace.start.category == Category.WORKSPACE]
    passing = trace.allocations.bytes[trace.allocations.category == Category.WORKSPACE][len(kept) :]
    own = kept == LT_WORKSPACE
    if lt_needs_cublas() or not keeps_workspaces():
        assert np.count_nonzero(~own) == (2 if keeps_workspaces() else 0)
    assert np.count_nonzero(own) <= (2 if lt_workspace() is LtWorkspace.KEPT else 0)
    assert {*kept[~own].tolist(), *passing.tolist()} <= WORKSPACE_BYTES
    assert keeps_workspaces() or len(passing) > 0


def test_nothing_happened_that_the_profiler_did_not_see(seen):
    (trace,) = seen.traces
    assert [note for note in trace.notes if "lacks" in note or "does not see" in note] == []


def test_what_checkpointing_computes_anew_has_its_layers_and_is_told_apart():
    """It runs on autograd's thread for the device."""
    (trace,) = record("checkpointed").traces
    blocks = trace.allocations
    anew = blocks.category == Category.RECOMPUTED
    assert blocks.bytes[anew].sum() > 0
    assert all(trace.modules[row].key.startswith("blocks.") for row in blocks.module[anew])


def test_parameters_are_told_apart_in_rounded_bytes(seen):
    (trace,) = seen.traces
    device = trace.device_row("cuda:0")
    parts = {part.key: part.bytes for part in moment(trace, device, -1).parts("category")}
    assert parts["parameter"] == seen.parameters


def test_backward_has_modules_although_it_runs_on_another_thread(seen):
    (trace,) = seen.traces
    device = trace.device_row("cuda:0")
    blocks = trace.allocations
    mine = (blocks.device == device) & (blocks.phase == Phase.BACKWARD)
    owned = sum(
        int(blocks.bytes[row])
        for row in range(len(blocks))
        if mine[row] and trace.modules[blocks.module[row]].is_module
    )
    assert owned >= 0.5 * int(blocks.bytes[mine].sum())


def recorded(model, optimizer, steps, **options) -> MemoryTrace:
    """The trace of a window around a function of the profiler."""
    recorder = WindowRecorder({"": model}, [optimizer])
    watch(recorder)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, **options) as prof:
        steps(prof)
        torch.cuda.synchronize()
    window = recorder.take()
    assert window is not None
    return trace_from_profile(prof, window)


@pytest.mark.parametrize("name", ["cnn", "transformer", "lstm"])
def test_a_window_without_steps_has_what_is_freed_between_operators(name):
    """The profiler's tree lacks it: tb_memplugin/record/profiler/memory_events.py."""
    model = MODELS[name]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    ends: list[int] = []

    def steps(_: profile) -> None:
        torch.cuda.reset_peak_memory_stats()
        for _number in range(3):
            train_step(model, optimizer)
        ends.extend([torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()])

    trace = recorded(model, optimizer, steps)
    (step,) = step_stats(trace, trace.device_row("cuda:0"))
    assert [step.peak_bytes, step.end_bytes] == ends
    assert [note for note in trace.notes if "profile misses" in note or "without a report" in note] == []


def test_what_is_freed_between_two_ranges_of_steps_is_not_in_the_next():
    """As callbacks record: no range is open while the next batch is loaded."""
    model = MODELS["cnn"]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    peaks: list[int] = []

    def steps(_: profile) -> None:
        for number in range(3):
            torch.cuda.reset_peak_memory_stats()
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                train_step(model, optimizer)
                batch = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
            peaks.append(torch.cuda.max_memory_allocated())
            del batch

    trace = recorded(model, optimizer, steps)
    stats = step_stats(trace, trace.device_row("cuda:0"))
    assert [step.peak_bytes for step in stats] == peaks
    assert len(set(peaks)) == 1


ASYNC = """
import logging, sys, tempfile, torch
from tb_memplugin import memory_trace_handler
layer = torch.nn.Linear(100, 100, bias=False).cuda()
handler = memory_trace_handler(sys.argv[1], "w", model=layer)
with torch.profiler.profile(profile_memory=True, on_trace_ready=handler):
    layer(torch.ones(1, 100).cuda()).sum().backward()
"""


def test_an_allocator_that_reports_nothing_is_named(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", ASYNC, str(tmp_path)],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "The CUDA allocator 'cudaMallocAsync' reports nothing to torch.profiler" in result.stderr
    (side_file,) = tmp_path.rglob("*.mem")
    trace = load_window(str(side_file))
    assert int(trace.live(trace.device_row("cuda:0"))[-1]) == 40_000
    assert not any("blocks alive at the window's start" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("layers", "width", "block", "iterations"), [(1, 1000, 4_000_256, 3), (2, 1200, 5_760_000, 2)]
)
def test_the_buckets_of_ddp_are_communication_of_its_module(layers, width, block, iterations):
    """A weight of 1,000 x 1,000 floats is reduced in a bucket of 4,000,000 bytes: a block of 4,000,256.

    Two weights are in one bucket at first. It was made again in the last iteration before the window.
    """
    distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        weights = [torch.nn.Linear(width, width, bias=False, device="cuda") for _ in range(layers)]
        model = DistributedDataParallel(torch.nn.Sequential(*weights))
        batch = torch.ones(1, width, device="cuda")
        for _ in range(iterations):
            model(batch).sum().backward()
        recorder = WindowRecorder({"": model}, [])
        watch(recorder)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            model(batch).sum().backward()
        window = recorder.take()
    finally:
        distributed.destroy_process_group()
    assert window is not None
    start = trace_from_profile(prof, window).start
    buckets = start.bytes[start.category == Category.COMMUNICATION]
    assert layers <= np.count_nonzero(buckets == block) <= 2  # NCCL may still hold the first ones
    assert set(start.module[start.category == Category.COMMUNICATION].tolist()) == {0}
