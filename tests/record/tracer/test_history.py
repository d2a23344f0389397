"""Layers' figures from an allocator's history: a stand-in keeps it, the model itself runs on the CPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.read.cublas import WORKSPACE
from tb_memplugin.read.phases import phase_at
from tb_memplugin.record.history.allocators import HistorySwitch
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.tracer.history import HistoryRecording
from tb_memplugin.record.tracer.layer_clock import LayerClock
from tb_memplugin.trace import Category, Phase
from tests.record.tracer.asking_layers import Gpu, Layer, ThreadsGpu
from tests.snapshots import block, segment
from tests.watched import is_watched

KIB = 1024


@pytest.fixture
def gpu():
    return Gpu(segments=[segment(block(0x1000, 400), total=64 * KIB)])


def recording(gpu, max_events=1000, peaks=(0, 0)):
    found = iter(peaks)
    return HistoryRecording(
        torch.device("cuda", 0),
        max_events,
        allocator=gpu.as_allocator(),
        levels=lambda: (0, next(found)),
        switch=HistorySwitch(),
    )


def traced(gpu, model, run, **options):
    made = recording(gpu, **options)
    made.start({"": model}, [])
    phase = made.begin_phase("all")
    run()
    made.end_phase(phase)
    return made.stop({}, [])


def train(model):
    model(torch.ones(1, requires_grad=True)).sum().backward()


def test_layers_own_what_their_forward_and_their_backward_ask_for(gpu):
    model = nn.Sequential(Layer(gpu, 1000, 10), Layer(gpu, 2000, 20))
    result = traced(gpu, model, lambda: train(model))
    stats = result.layers
    assert list(stats) == ["(root)", "0", "1"]
    assert {name: one.allocated_bytes for name, one in stats.items()} == {
        "(root)": 3030,
        "0": 1010,
        "1": 2020,
    }
    assert {name: one.total_allocations for name, one in stats.items()} == {"(root)": 4, "0": 2, "1": 2}
    assert {name: one.total_deallocations for name, one in stats.items()} == {"(root)": 4, "0": 2, "1": 2}
    assert all(one.calls == 1 for one in stats.values())
    # 400 alive before; at the peak both forwards and the second backward
    assert stats["1"].peak_allocated == 400 + 3000 + 20
    assert stats["0"].peak_allocated == 400 + 1000 + 10
    assert stats["(root)"].peak_allocated == result.peak_allocated == 3420
    assert stats["1"].backward_ms > 0.1
    (phase,) = result.phases
    assert (phase.before_bytes, phase.peak_bytes, phase.after_bytes) == (400, 3420, 400)


def test_reserve_and_fragmentation_are_the_allocators(gpu):
    model = nn.Sequential(Layer(gpu, 1000, 10))
    result = traced(gpu, model, lambda: train(model))
    assert result.peak_reserved == result.layers["0"].peak_reserved == 64 * KIB
    reserve = 64 * KIB
    # forward: 400 when it begins and 1400 when it ends; backward: 1400 and 400
    expected = ((reserve - 400) + (reserve - 1400) + (reserve - 1400) + (reserve - 400)) / 4 / reserve
    assert result.layers["0"].avg_fragmentation == pytest.approx(expected)


def test_events_carry_the_layer_that_ran(gpu):
    model = nn.Sequential(Layer(gpu, 1000, 10), Layer(gpu, 2000, 20))
    events = list(traced(gpu, model, lambda: train(model)).events())
    asked = [(one.layer_name, one.size_bytes) for one in events if one.event_type == "alloc"]
    assert asked == [("0", 1000), ("1", 2000), ("1", 20), ("0", 10)]
    entered = [one.layer_name for one in events if one.event_type == "layer_enter"]
    assert entered == ["(root)", "0", "1", "1", "0"]


def test_the_trace_has_calls_modules_and_sums_to_the_history(gpu):
    model = nn.Sequential(Layer(gpu, 1000, 10))
    trace = traced(gpu, model, lambda: train(model)).trace
    assert trace.live(0).max() == 1410
    assert {trace.modules[row].key for row in trace.calls.name} == {"", "0"}
    assert {trace.modules[row].key for row in trace.events.module} == {"0"}


def test_the_trace_has_phases_and_the_users_own_as_annotations(gpu):
    model = nn.Sequential(Layer(gpu, 1000, 10))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def two_steps():
        for _ in range(2):
            model(weight).sum().backward()
            optimizer.step()

    trace = traced(gpu, model, two_steps).trace
    assert trace.phases.phase.tolist() == 2 * [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    named = [(trace.annotation_names[row], ends) for row, ends in zip(*annotated(trace), strict=True)]
    assert named == [("all", 0), ("all", 1)]
    optimizer.step()  # no hook is left
    assert len(trace.phases) == 6


def test_a_step_within_a_step_does_not_move_its_start(gpu):
    layer = Layer(gpu, 1000, 10)

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(0.0002)  # the history's clock counts microseconds
            layer.ask(100)
            torch.optim.SGD(self.param_groups, lr=0.1).step()

    trace = traced(gpu, layer, Outer([nn.Parameter(torch.ones(1))]).step).trace
    asked = trace.events.time_ns[trace.events.bytes == 100]
    assert phase_at(trace.phases, asked).tolist() == [Phase.OPTIMIZER]


@pytest.mark.parametrize(
    ("inputs", "category"), [(4, Category.WORKSPACE), (WORKSPACE // 4, Category.GRADIENT)]
)
def test_what_backward_leaves_of_a_workspaces_size_is_one_unless_a_parameter_has_that_size(inputs, category):
    gpu, model = ThreadsGpu(), nn.Linear(inputs, 1, bias=False)
    made = recording(gpu)
    made.start({"": model}, [])
    gpu.set_mark("gradient")
    for address, size in ((0x10000, 32), (0x20000, WORKSPACE)):
        gpu.note("alloc", address, size, time.time_ns() // 1000)
    gpu.set_mark("")
    blocks = made.stop({"": model}, []).trace.allocations
    found = {int(size): Category(kind) for size, kind in zip(blocks.bytes, blocks.category, strict=True)}
    assert (found[32], found[WORKSPACE]) == (Category.GRADIENT, category)


def annotated(trace):
    return trace.annotations.name.tolist(), trace.annotations.ends.tolist()


def test_what_the_history_overwrote_is_told_and_the_peak_is_the_counters(gpu):
    model = nn.Sequential(Layer(gpu, 1000, 10))
    counted = traced(gpu, model, lambda: train(model), max_events=6, peaks=(500, 9999))
    assert counted.peak_allocated == 9999
    told = "which reach 1,410 live bytes. The peak of 9,999 bytes comes from the allocator's own counter."
    assert told in counted.trace.notes[-1]
    gpu.entries.clear()
    unknown = traced(gpu, model, lambda: train(model), max_events=6, peaks=(9999, 9999))
    assert unknown.peak_allocated == 1410
    assert "The peak of 1,410 bytes is that of the entries that were kept" in unknown.trace.notes[-1]


def test_history_and_hooks_are_as_they_were_when_it_ends():
    gpu = ThreadsGpu()
    model = nn.Sequential(Layer(gpu, 1000, 10))
    kept = []
    traced(gpu, model, lambda: kept.append(model(torch.ones(1, requires_grad=True))))
    assert not gpu.recording
    assert gpu.mark_here() == ""
    assert not is_watched(model)
    kept[0].sum().backward()  # the graph of the block lives on, without hooks


def test_a_device_that_is_not_in_use_is_told(gpu):
    gpu.in_use = False
    with pytest.raises(MemPluginError, match="No cuda device is in use yet"):
        recording(gpu).start({}, [])
    assert not gpu.recording


def test_a_node_that_several_layers_meet_is_the_innermost_ones():
    """The node of the linear layer's result is also that of the next layer's input, within the root."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    clock, names = LayerClock(most=100), ModuleNames.of({"": model})
    clock.start({"": model}, names)
    loss = model(torch.ones(1, 2)).sum()
    before = len(clock.crossings)
    loss.backward()
    clock.stop()
    rows = [row for _, row, *_ in list(clock.crossings)[before:]]
    assert rows == [names.row_of[id(model[1])], names.row_of[id(model[0])], -1]


def test_hooks_on_nodes_that_are_gone_are_not_kept():
    """Each call makes two nodes with a hook: those of the two results."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    clock = LayerClock(most=100_000)
    clock.start({"": model}, ModuleNames.of({"": model}))
    for _ in range(2_000):
        model(torch.ones(1, 2))
    assert len(clock._nodes) <= 1_001
    clock.stop()


def test_a_layer_marks_what_its_forward_allocates_also_after_an_inner_one():
    gpu, marks = ThreadsGpu(), []

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            x = self.inner(x)
            marks.append(gpu.mark_here())
            return x

    gpu.set_mark("mine")
    model = nn.Sequential(Outer())

    def run():
        model(torch.ones(1))
        marks.append(gpu.mark_here())

    traced(gpu, model, run)
    assert marks == ["tb_memplugin.module=0", "mine"]


def test_a_block_that_ends_within_a_layer_gives_the_mark_back():
    class Ends(nn.Module):
        def forward(self, x):
            made.stop({}, [])
            return x

    gpu = ThreadsGpu()
    gpu.set_mark("mine")
    model = nn.Sequential(Ends())
    made = recording(gpu)
    made.start({"": model}, [])
    model(torch.ones(1))
    assert gpu.mark_here() == "mine"


def test_tracers_of_one_model_give_back_each_others_marks():
    gpu = ThreadsGpu()
    gpu.set_mark("mine")
    model = nn.Sequential(nn.Identity())
    first, second = recording(gpu), recording(gpu)
    for one in (first, second):
        one.start({"": model}, [])
    model(torch.ones(1))
    assert gpu.mark_here() == "mine"
    for one in (first, second):  # both are of this thread
        assert not any("Another tracer" in note for note in one.stop({}, []).trace.notes)


def test_what_layers_allocate_on_two_threads_at_once_is_each_ones_own():
    """Layer 0 asks for 1000 bytes while layer 1, begun later, still runs, and a third thread asks for 50."""
    gpu = ThreadsGpu(segments=[segment(block(0x1000, 400), total=64 * KIB)])
    entered, go_on = threading.Event(), threading.Event()

    class First(Layer):
        def ask(self, size):
            others.append(run(lambda: second(torch.ones(1))))
            assert entered.wait(10)
            super().ask(size)
            run(lambda: gpu.note("alloc", 0x900000, 50, time.time_ns() // 1000)).join()
            go_on.set()

    class Second(Layer):
        def ask(self, size):
            entered.set()
            assert go_on.wait(10)
            super().ask(size)

    def run(target):
        thread = threading.Thread(target=target)
        thread.start()
        return thread

    first, second = First(gpu, 1000, 0), Second(gpu, 2000, 0)
    others: list[threading.Thread] = []

    def both():
        first(torch.ones(1))
        others[0].join()

    result = traced(gpu, nn.Sequential(first, second), both)
    allocated = {name: one.allocated_bytes for name, one in result.layers.items()}
    assert allocated == {"(root)": 3000, "0": 1000, "1": 2000}
    owned = {one.size_bytes: one.layer_name for one in result.events() if one.event_type == "alloc"}
    assert owned == {1000: "0", 50: None, 2000: "1"}


def test_a_tracer_on_another_thread_is_noted(gpu):
    ours, theirs = recording(gpu), recording(gpu)
    ours.start({}, [])
    thread = threading.Thread(target=theirs.start, args=({}, []))
    thread.start()
    thread.join()
    assert all("Another tracer ran" in one.stop({}, []).trace.notes[-1] for one in (theirs, ours))
    alone = traced(gpu, nn.Identity(), lambda: None)
    assert not any("Another tracer" in note for note in alone.trace.notes)


def test_a_backward_beside_layers_on_another_thread_is_noted(gpu):
    model = nn.Linear(2, 2)

    def train():
        model(torch.ones(1, 2)).sum().backward()

    def both():
        thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
        train()

    notes = {run: traced(gpu, model, run).trace.notes for run in (train, both)}
    assert not any("threads" in note for note in notes[train])
    assert any("Layers ran on 2 threads." in note for note in notes[both])


def test_a_module_that_was_compiled_in_place_is_one_layer():
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    clock, names = LayerClock(most=100), ModuleNames.of({"": model})
    clock.start({"": model}, names)
    model(torch.ones(1, 2)).sum().backward()
    clock.stop()
    rows = [row for _, row, *_ in clock.crossings]
    assert rows == [0, -1, 0, -1]  # enters and leaves; its backward begins and ends
    assert clock.unseen == 1  # the linear layer inside
    assert model._compiled_call_impl is compiled


def test_a_layer_whose_result_is_only_differentiated_for_has_no_backward():
    """`grad(loss, [hidden])` ends at the first layer's result: only the second layer's backward runs."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first, second)
    clock, names = LayerClock(most=100), ModuleNames.of({"": model})
    clock.start({"": model}, names)
    hidden = first(torch.ones(1, 2))
    loss = second(hidden).sum()
    before = len(clock.crossings)
    torch.autograd.grad(loss, [hidden])
    clock.stop()
    rows = [row for _, row, *_ in list(clock.crossings)[before:]]
    assert rows == [names.row_of[id(second)], -1]
