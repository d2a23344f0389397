"""Every thread's allocations have that thread's own line."""

from __future__ import annotations

import io
import sys
import threading

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tb_memplugin import LineTracer
from tests.traced_lines import nothing_is_left, traced  # noqa: F401

HERE = __file__


def together(works):
    """Each work on a thread of its own; what they hand out is held until all have it."""
    everybody = threading.Barrier(len(works))

    def run(work):
        kept = work()
        everybody.wait(30)
        return kept

    threads = [threading.Thread(target=run, args=(work,), name=f"w{n}") for n, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ten_threads_have_each_their_own_line():
    works = [
        lambda: torch.zeros(10_000),
        lambda: torch.zeros(20_000),
        lambda: torch.zeros(30_000),
        lambda: torch.zeros(40_000),
        lambda: torch.zeros(50_000),
        lambda: torch.zeros(60_000),
        lambda: torch.zeros(70_000),
        lambda: torch.zeros(80_000),
        lambda: torch.zeros(90_000),
        lambda: torch.zeros(100_000),
    ]
    tracer = traced(lambda: together(works))
    threads = {thread.name: thread for thread in tracer.report().threads if thread.name != "untraced"}
    first = works[0].__code__.co_firstlineno
    found = {name: [(use.line, use.bytes, use.count) for use in one.lines] for name, one in threads.items()}
    assert found == {f"w{n}": [(first + n, 40_000 * (n + 1), 1)] for n in range(10)}
    assert sum(thread.bytes for thread in tracer.report().threads) == tracer.report().max_bytes


def test_threads_have_their_own_backward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self):
            return self.weight.exp().sum()

    forwards_done = threading.Barrier(10)

    def work(model):
        loss = model()
        forwards_done.wait(30)  # so that at the peak, which comes later, every thread holds something
        loss.backward()
        return model.weight.grad

    models = [Model() for _ in range(10)]
    tracer = traced(lambda: together([lambda model=model: work(model) for model in models]))
    forward = f"{HERE}:{Model.forward.__code__.co_firstlineno + 1} (forward)"
    named = {
        thread.name: {use.location: use.bytes for use in thread.lines} for thread in tracer.report().threads
    }
    assert all(named[f"w{n}"][forward] >= 4_000 for n in range(10))  # what exp() saved, or the gradient
    backward = [stack for stack in tracer.trace_result().stacks if "(backward of ExpBackward0)" in stack]
    assert sorted(stack[-1] for stack in backward) == [f"(thread w{n})" for n in range(10)]


def test_a_thread_that_ran_before_is_seen_from_its_first_layer_on():
    go, done = threading.Event(), threading.Event()
    layer, kept = nn.Linear(10, 1000), []

    def work():
        go.wait(30)
        kept.append(layer(torch.ones(5, 10)))
        done.set()

    thread = threading.Thread(target=work, name="old")
    thread.start()
    others = threading.active_count() - 1  # what other tests started may still end
    tracer = LineTracer()
    with tracer:
        go.set()
        done.wait(30)
    thread.join()
    (old,) = [one for one in tracer.report().threads if one.name == "old"]
    assert old.bytes == 4 * 5 * 1000
    told = {f"{n} other threads were running when tracing began" for n in range(1, others + 1)}
    assert any(begin in note for begin in told for note in tracer.report().notes)


def test_a_profile_function_for_new_threads_goes_on():
    seen = []

    def mine(*_):
        seen.append(threading.current_thread().name)

    threading.setprofile(mine)
    try:
        tracer = traced(lambda: together([lambda: torch.zeros(1000)]))
        assert threading.getprofile() is mine
    finally:
        threading.setprofile(None)
    assert seen.count("w0") > 5
    assert "w0" in {thread.name for thread in tracer.report().threads}


def test_threads_have_tables_of_their_own_where_asked():
    tracer = traced(lambda: together([lambda: torch.zeros(1000)]))
    text = io.StringIO()
    tracer.report_stats(text, by_thread=True)
    (told,) = [line for line in text.getvalue().splitlines() if line.startswith("Thread w0: ")]
    assert told.endswith("(4,000 bytes)")


def test_tracers_that_end_out_of_turn_leave_no_profile_function():
    outer, inner = LineTracer(), LineTracer()
    outer.start_tracing()
    inner.start_tracing()
    outer.stop_tracing()
    kept: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: kept.append(torch.zeros(10_000)))
    thread.start()
    thread.join()
    inner.stop_tracing()
    assert threading.getprofile() is None
    assert [use.bytes for use in inner.report().lines if use.location != "untraced"] == [40_000]


def test_a_thread_that_outlives_the_tracing_of_another_is_rid_of_the_mode_with_its_next_operator():
    began, over = threading.Event(), threading.Event()

    def trace():
        with LineTracer():
            began.set()
            over.wait(60)

    other = threading.Thread(target=trace)
    other.start()
    assert began.wait(60)
    nn.Linear(2, 2)(torch.ones(1, 2))
    over.set()
    other.join(60)
    assert len(_get_current_dispatch_mode_stack()) == 1
    torch.ones(1)
    assert (_get_current_dispatch_mode_stack(), sys.getprofile()) == ([], None)
