"""`LineTracer` as people use it: the lines of the true peak, to the byte, and nothing left behind."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tb_memplugin import LineTracer, MemPluginError
from tb_memplugin.analysis.lines import line_table
from tests.record.agreement import UNTUNED
from tests.traced_lines import line_of, made_now, nothing_is_left, traced, two_lines  # noqa: F401
from tests.training import MODELS, reported_events

HERE = __file__
ALL = {**MODELS, **UNTUNED}


def test_a_line_has_the_bytes_that_it_allocated():
    tracer = traced(two_lines)
    assert made_now(tracer) == {
        line_of(two_lines, "zeros(1000)"): (4_000, 1, 4_000.0),
        line_of(two_lines, "parts ="): (12_000, 3, 4_000.0),
    }


def test_the_largest_comes_first_and_the_last_cumulative_is_the_peak():
    tracer = traced(two_lines)
    report = tracer.report()
    trace = tracer.trace_result()
    sizes = [use.bytes for use in report.lines]
    assert sizes == sorted(sizes, reverse=True)
    assert [use.cumulative_bytes for use in report.lines] == np.cumsum(sizes).tolist()
    assert report.lines[-1].cumulative_bytes == report.max_bytes == int(trace.live(0).max())
    assert report.max_bytes - report.untraced_bytes == report.total_allocated_bytes == 16_000


def test_the_median_is_of_the_sizes_of_a_line():
    def sizes():
        return list(map(torch.zeros, (1, 10, 100, 25)))

    assert list(made_now(traced(sizes)).values()) == [(4 * 136, 4, 4 * (10 + 25) / 2)]


def test_a_peak_that_a_free_follows_is_not_missed():
    def work():
        small = torch.zeros(10)
        large = torch.zeros(100_000)
        del large
        return small, torch.zeros(20)

    assert made_now(traced(work)) == {
        line_of(work, "large = "): (400_000, 1, 400_000.0),
        line_of(work, "small = "): (40, 1, 40.0),
    }


def test_what_was_alive_before_is_untraced():
    before = torch.zeros(5_000_000)
    tracer = traced(lambda: torch.zeros(10))
    assert before.nbytes <= tracer.report().untraced_bytes < tracer.report().max_bytes
    assert tracer.report().lines[0].location == "untraced"


def test_what_died_before_the_peak_is_not_in_it():
    def work():
        old = torch.zeros(1_000_000)
        del old
        return [torch.zeros(600_000), torch.zeros(600_000)]

    tracer = traced(work)
    assert made_now(tracer) == {line_of(work, "600_000"): (4_800_000, 2, 2_400_000.0)}
    assert tracer.report().total_allocated_bytes == 8_800_000


def test_an_exception_inside_ends_it():
    def work():
        kept = torch.zeros(1000)
        raise ZeroDivisionError(kept.shape)

    tracer = LineTracer()
    with pytest.raises(ZeroDivisionError), tracer:
        work()
    assert [value[0] for value in made_now(tracer).values()] == [4_000]


def test_a_function_that_allocates_and_fails_leaves_its_line_at_the_peak():
    def fails():
        large = torch.zeros(50_000)
        raise ValueError(large.shape)

    def work():
        with pytest.raises(ValueError, match="50000"):
            fails()
        gc.collect()
        return torch.zeros(10)

    assert line_of(fails, "large = ") in made_now(traced(work))


def test_generators_keep_their_own_lines():
    def batches():
        for size in (100, 200):
            yield torch.zeros(size)

    def work():
        return list(batches())

    assert made_now(traced(work)) == {line_of(batches, "yield"): (1_200, 2, 600.0)}


def test_a_generator_may_begin_tracing_and_another_place_may_end_it():
    def tracing(tracer):
        with tracer:
            yield torch.zeros(1000)

    tracer = LineTracer()
    running = tracing(tracer)
    kept = next(running), torch.zeros(500)
    running.close()
    assert sum(size for size, *_ in made_now(tracer).values()) == 6_000
    del kept


def test_a_backward_goes_by_the_line_of_its_forward_call():
    x = torch.ones(1000, requires_grad=True)

    def work():
        y = x.exp()
        z = y.sin()
        z.sum().backward()

    tracer = traced(work)
    made = {use.key: (use.bytes, use.calls) for use in line_table(tracer.trace_result(), 0)}
    # The gradients of sin and of exp, each a cosine or a product beside: at the line of what they are of.
    assert made[line_of(work, "x.exp")] == (8_000, 2)
    assert made[line_of(work, "y.sin")] == (12_000, 3)
    assert set(made) == {line_of(work, name) for name in ("x.exp", "y.sin", "z.sum")}


def test_a_backward_of_what_is_older_goes_by_the_backwards_line():
    y = torch.ones(1000, requires_grad=True).exp()

    def work():
        y.backward(torch.ones(1000))

    assert set(made_now(traced(work))) == {line_of(work, "backward")}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat([gradient] * 3)[:1000]


def test_the_users_own_backward_is_named():
    x = torch.ones(1000, requires_grad=True)
    tracer = traced(lambda: Twice.apply(x).sum().backward())
    own = f"{HERE}:{Twice.backward.__code__.co_firstlineno + 2} (backward)"
    assert made_now(tracer)[own][0] == 12_000


def test_what_is_computed_anew_goes_by_the_line_that_computes_it():
    x = torch.ones(1000, requires_grad=True)

    def block(x):
        return x.exp().sin()

    def work():
        checkpoint(block, x, use_reentrant=False).sum().backward()

    tracer = traced(work)
    table = {use.key: use.calls for use in line_table(tracer.trace_result(), 0)}
    assert table[line_of(block, "exp")] >= 4 + 2  # twice forward, and once backward


@pytest.mark.parametrize("name", ALL)
def test_the_peak_is_torch_profilers(name, tmp_path):
    """Of models whose kernels take no memory beside their results at the peak."""
    torch.manual_seed(0)
    model = ALL[name]()
    batch = model.batch()

    def step():
        model.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    step()
    model.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    with tempfile.TemporaryDirectory() as folder:
        prof.export_chrome_trace(str(Path(folder) / "trace.json"))
        reported, _ = reported_events(Path(folder) / "trace.json")
    model.zero_grad()
    gc.collect()
    tracer = traced(step)
    report = tracer.report()
    start = int(tracer.trace_result().live(0)[0])
    assert report.max_bytes - start == int(np.cumsum([size for _, _, size, _ in reported]).max())
    assert report.lines[-1].cumulative_bytes == report.max_bytes


def long_work():
    small = torch.zeros(100)
    large = torch.zeros(1_000_000)
    del large
    for _ in range(500):
        torch.zeros(10)
    return small


@pytest.mark.parametrize("max_events", [1, 2, 10, 100, 100_000])
def test_the_peak_is_right_however_few_events_are_kept(max_events):
    gc.collect()
    tracer = traced(long_work, max_events=max_events)
    assert made_now(tracer) == {
        line_of(long_work, "large = "): (4_000_000, 1, 4_000_000.0),
        line_of(long_work, "small = "): (400, 1, 400.0),
    }
    assert tracer.report().total_allocated_bytes == 4_000_400 + 500 * 40
    assert len(tracer.trace_result().events) <= max_events
    assert int(tracer.trace_result().live(0)[-1]) == tracer.report().untraced_bytes + 400


def test_a_later_higher_peak_replaces_one_that_is_gone():
    def work():
        long_work()
        return torch.zeros(2_000_000)

    assert made_now(traced(work, max_events=50)) == {line_of(work, "2_000_000"): (8_000_000, 1, 8_000_000.0)}


def test_tracers_may_be_nested():
    outer, inner = LineTracer(), LineTracer()
    with outer:
        first = torch.zeros(1000)
        with inner:
            second = torch.zeros(500)
        third = torch.zeros(100)
    assert sum(size for size, *_ in made_now(outer).values()) == 4 * 1600
    assert sum(size for size, *_ in made_now(inner).values()) == 4 * 500
    del first, second, third


def test_wrong_use_is_told():
    tracer = LineTracer()
    with pytest.raises(MemPluginError, match="Nothing has been traced yet"):
        tracer.report_stats()
    with tracer:
        with pytest.raises(MemPluginError, match="already tracing"):
            tracer.start_tracing()
        with pytest.raises(MemPluginError, match="still being traced"):
            tracer.trace_result()
    tracer.stop_tracing()
    with pytest.raises(MemPluginError, match="has no events here"):
        tracer.report(device="cuda:7")
    with pytest.raises(MemPluginError, match="no device 'mtia'"):
        LineTracer(device="mtia").start_tracing()
    with pytest.raises(MemPluginError, match="max_events is 0"):
        LineTracer(max_events=0)


def test_training_is_the_same_to_the_bit():
    def losses():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    plain = list(losses())
    with LineTracer():
        assert list(losses()) == plain
