"""On CUDA every number equals the caching allocator's own counters. Needs an NVIDIA GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, schedule

from tb_memplugin.analysis.breakdown import DIVISIONS
from tb_memplugin.analysis.moment import moment
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.sources.profiler.trace import trace_from_profile
from tb_memplugin.sources.profiler.window import WindowRecorder, watch
from tb_memplugin.trace import MemoryTrace, Phase
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: run on a machine with an NVIDIA GPU"
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


def record(name: str, *, amp: bool = False, fused: bool = False, stack: bool = False) -> Recorded:
    """Train on the GPU with the allocator's own peak counters read at every step's end."""
    torch.manual_seed(0)
    model = MODELS[name]().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    recorder = WindowRecorder({"": model}, [optimizer])
    watch(recorder)
    seen = Recorded(parameters=sum((p.nbytes + 511) // 512 * 512 for p in model.parameters()))

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
        assert parts.get("unknown", 0) <= named // 100, (step.step, parts, trace.notes)


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
