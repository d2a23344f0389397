"""An iteration's figures are those of torch.profiler's recording of such an iteration, to the byte."""

from __future__ import annotations

import gc
import io

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import IterationReport
from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import Window, WindowRecorder, watch
from tb_memplugin.store.reader import load_window
from tb_memplugin.trace import Category
from tests.record.tracer.truth import train_step
from tests.training import MODELS

CPU = 0


def seen(name, folder):
    """An iteration's figures and trace, and the profiler's trace of the next one, which is the same."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    optimizer.zero_grad()
    gc.collect()
    with IterationReport(
        model, console=Console(file=io.StringIO()), optimizer=optimizer, logdir=folder
    ) as report:
        train_step(model, optimizer)
        memory = report.record_stats()
    (side_file,) = folder.rglob("*.mem")
    optimizer.zero_grad()
    recorder, profiled = WindowRecorder({"": model}, [optimizer]), []
    watch(recorder)
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        on_trace_ready=lambda prof: profiled.append(trace_from_profile(prof, taken(recorder), 0)),
    ):
        train_step(model, optimizer)
    return memory, load_window(str(side_file)), profiled[0]


def taken(recorder: WindowRecorder) -> Window:
    window = recorder.take()
    assert window is not None
    return window


@pytest.fixture(scope="module", params=["transformer", "cnn", "checkpointed", "lstm"])
def both(request, tmp_path_factory):
    return seen(request.param, tmp_path_factory.mktemp("runs"))


def test_the_peak_is_as_far_above_the_start_as_the_profilers(both):
    memory, trace, profiled = both
    assert memory.peak_cached_bytes - int(trace.live(CPU)[0]) == int(profiled.window(CPU).max())


def test_feature_maps_are_the_profilers_activations(both):
    memory, _, profiled = both
    mine = np.isin(profiled.allocations.category, (Category.ACTIVATION, Category.RECOMPUTED))
    assert memory.feature_map_bytes == highest(profiled, mine & ~loss_gradient(profiled))


def test_intermediate_gradients_are_what_a_backward_gives_back_and_the_losss_own(both):
    memory, _, profiled = both
    mine = profiled.allocations.category == Category.AUTOGRAD_DETAIL
    assert memory.intermediate_gradient_bytes == highest(profiled, mine | loss_gradient(profiled))


def test_parts_sum_to_the_peak_and_are_the_breakdowns(both):
    memory, trace, _ = both
    peak = int(np.argmax(trace.live(CPU))) - 1
    parts = {part.key: part.bytes for part in breakdown(trace, CPU, peak, "category")}
    at_peak = memory.traced.at_peak
    assert sum(at_peak.values()) == sum(parts.values()) == memory.traced.peak_bytes
    assert at_peak["weights"] == parts["parameter"] == memory.weight_bytes
    assert at_peak["optimizer state"] == parts["optimizer_state"]
    assert at_peak["inputs"] == parts["input"]


def loss_gradient(trace) -> np.ndarray:
    """The gradient of the loss, which `backward()` makes before autograd starts."""
    ones = trace.operators.index("aten::ones_like")
    mine: np.ndarray = (trace.allocations.operator == ones) & (trace.allocations.bytes == 4)
    assert mine.sum() == 1
    return mine


def highest(trace, chosen) -> int:
    """The highest live bytes of some blocks."""
    blocks = trace.allocations
    change = np.zeros(len(trace.events) + 2, np.int64)
    np.add.at(change, blocks.born[chosen] + 1, blocks.bytes[chosen])
    np.add.at(change, blocks.freed[chosen] + 1, -blocks.bytes[chosen])
    return int(np.cumsum(change).max())
