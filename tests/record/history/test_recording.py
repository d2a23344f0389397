"""Histories are switched on for us and left as they were found; allocations carry their module's name."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.record.history.allocators import (
    HistorySwitch,
    _allocator,
    _settings,
    allocators,
    reaches,
    since,
)
from tb_memplugin.record.history.recording import HistoryWindowRecorder, ModuleMarks
from tb_memplugin.trace.tables import MODULE_MARK
from tests.allocators import StandIn
from tests.snapshots import block, entries, segment, snapshot
from tests.watched import is_watched


def test_on_a_machine_without_gpu_no_allocator_keeps_a_history():
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("there is a GPU here")
    assert allocators() == ()


@pytest.mark.parametrize(("name", "annotations"), [("cuda", True), ("xpu", False)])
def test_torch_has_what_we_ask_its_allocators_for(name, annotations):
    """Names and arguments are torch's own business, GPU or not: notice if they go."""
    allocator = _allocator(name, getattr(torch, name))
    asked = _settings(allocator, 10, "python")
    assert {"enabled", "context", "stacks", "max_entries"} <= asked.keys()
    assert ("global_record_annotations" in asked) == annotations
    assert (allocator.set_mark is not None) == (name == "cuda")
    assert not allocator.is_in_use()
    queued = len(getattr(torch, name)._queued_calls)
    allocator.when_in_use(lambda: None)
    assert len(getattr(torch, name)._queued_calls) == queued + 1
    getattr(torch, name)._queued_calls.pop()


class TestTheSwitch:
    def test_a_history_is_on_while_it_is_used_and_off_after(self):
        gpu, switch = StandIn(), HistorySwitch()
        assert switch.on(gpu.as_allocator(), max_entries=10)
        assert gpu.recording
        assert gpu.settings == {"max_entries": 10, "stacks": "python"}
        switch.off(gpu.as_allocator())
        assert not gpu.recording

    def test_one_that_the_user_switched_on_stays_as_it_is(self):
        gpu, switch = StandIn(recording=True, settings={"max_entries": 7}), HistorySwitch()
        gpu.note("alloc", 0x1000, 400, 1)
        assert not switch.on(gpu.as_allocator(), max_entries=10)
        switch.off(gpu.as_allocator())
        assert gpu.recording
        assert gpu.settings == {"max_entries": 7}
        assert len(gpu.entries) == 1

    def test_the_last_of_several_users_switches_it_off(self):
        gpu, switch = StandIn(), HistorySwitch()
        assert [switch.on(gpu.as_allocator(), max_entries=10) for _ in range(2)] == [True, False]
        switch.off(gpu.as_allocator())
        assert gpu.recording
        switch.off(gpu.as_allocator())
        assert not gpu.recording

    def test_what_this_torch_does_not_know_is_not_asked_for(self):
        gpu = StandIn()
        HistorySwitch().on(gpu.as_allocator(), max_entries=10)  # StandIn.record takes no annotations
        assert gpu.recording


def test_the_time_before_a_window_is_cut_off_and_what_it_left_alive_is_known():
    told = snapshot(
        [segment(block(0x1000, 400), block(0x2000, 500), total=0x2000)],
        entries("alloc 4096 400 10", "alloc 8192 500 20"),
    )
    told["external_annotations"] = [{"name": "a", "stage": "START", "device": 0, "time_us": 5}]
    cut = since(told, 15_000)
    assert [entry["time_us"] for entry in cut["device_traces"][0]] == [20]
    assert cut["external_annotations"] == []
    assert trace_from_snapshot(cut, "test").start.bytes.tolist() == [400]
    assert len(told["device_traces"][0]) == 2


class Net(nn.Module):
    def __init__(self, seen, gpu) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_forward_hook(lambda *_: seen.append(gpu.mark))
        self.seen, self.gpu = seen, gpu

    def forward(self, x):
        self.seen.append(self.gpu.mark)
        y = self.inner(x)
        self.seen.append(self.gpu.mark)
        return y


class TestMarks:
    @pytest.fixture
    def gpu(self):
        return StandIn(mark="the user's")

    @pytest.fixture
    def net(self, gpu):
        return Net([], gpu)

    def test_each_module_marks_what_runs_in_it_and_gives_the_mark_back(self, gpu, net):
        marks = ModuleMarks()
        marks.start(gpu.as_allocator(), {"": net})
        net(torch.ones(1, 2))
        assert net.seen == [MODULE_MARK, MODULE_MARK + "inner", MODULE_MARK]
        assert gpu.mark == "the user's"
        marks.stop()

    def test_several_models_are_told_apart(self, gpu, net):
        marks = ModuleMarks()
        marks.start(gpu.as_allocator(), {"teacher": net})
        net(torch.ones(1, 2))
        marks.stop()
        assert net.seen[1] == MODULE_MARK + "teacher.inner"

    def test_the_mark_is_given_back_when_the_module_raises(self, gpu, net):
        marks = ModuleMarks()
        marks.start(gpu.as_allocator(), {"": net})
        with pytest.raises(RuntimeError, match="shapes"):
            net(torch.ones(1, 3))
        assert gpu.mark == "the user's"
        marks.stop()

    def test_a_window_that_ends_inside_a_module_gives_the_mark_back(self, gpu, net):
        marks = ModuleMarks()
        marks.start(gpu.as_allocator(), {"": net})
        net.inner.register_forward_hook(lambda *_: marks.stop())
        net(torch.ones(1, 2))
        assert gpu.mark == "the user's"

    def test_afterwards_no_hook_is_there(self, gpu, net):
        marks = ModuleMarks()
        marks.start(gpu.as_allocator(), {"": net})
        assert is_watched()
        marks.stop()
        assert not is_watched()

    def test_nothing_is_watched_in_what_is_compiled(self, gpu, net):
        net._compiled_call_impl = net._call_impl  # as Module.compile() leaves it
        marks = ModuleMarks()
        marks.start(gpu.as_allocator(), {"": net})
        net(torch.ones(1, 2))
        assert net.seen[1] == MODULE_MARK
        marks.stop()

    def test_an_allocator_that_takes_no_marks_gets_no_hooks(self, gpu, net):
        allocator = gpu.as_allocator()
        marks = ModuleMarks()
        marks.start(
            type(allocator)(**{f: getattr(allocator, f) for f in allocator.__slots__} | {"mark": None}),
            {"": net},
        )
        assert not is_watched()


class TestAWindow:
    def test_has_the_history_of_its_time_and_leaves_nothing_on(self):
        gpu = StandIn()
        recorder = HistoryWindowRecorder({}, [], [gpu.as_allocator()], HistorySwitch())
        recorder.start()
        gpu.note("alloc", 0x1000, 400, 1)
        recorder.stop()
        ((device_type, taken),) = recorder.take_snapshots()
        assert (device_type, len(taken["device_traces"][0])) == ("cuda", 1)
        assert not gpu.recording
        assert recorder.take_snapshots() == []
        assert recorder.take() is not None

    def test_of_a_users_history_has_what_is_younger_than_itself(self):
        gpu = StandIn(recording=True)
        gpu.note("alloc", 0x1000, 400, 1)
        recorder = HistoryWindowRecorder({}, [], [gpu.as_allocator()], HistorySwitch())
        recorder.start()
        gpu.note("alloc", 0x2000, 500, 1 << 52)
        recorder.stop()
        ((_, taken),) = recorder.take_snapshots()
        assert [entry["size"] for entry in taken["device_traces"][0]] == [500]
        assert gpu.recording
        assert len(gpu.entries) == 2

    @pytest.mark.parametrize("broken", ["record", "snapshot"])
    def test_an_allocator_that_fails_is_told_and_the_window_is_recorded(self, broken):
        gpu = StandIn(broken=broken)
        recorder = HistoryWindowRecorder({}, [], [gpu.as_allocator()], HistorySwitch())
        recorder.start()
        recorder.stop()
        window = recorder.take()
        assert window is not None
        assert any("history of cuda" in one for one in (*window.problems, *window.open_problems))
        assert recorder.take_snapshots() == []
        assert not gpu.recording

    def test_a_device_that_is_not_in_use_is_told(self):
        gpu = StandIn(in_use=False)
        recorder = HistoryWindowRecorder({}, [], [gpu.as_allocator()], HistorySwitch())
        recorder.start()
        recorder.stop()
        window = recorder.take()
        assert window is not None
        assert any("No cuda device was in use" in problem for problem in window.problems)

    def test_begun_twice_uses_the_history_once(self):
        gpu, switch = StandIn(), HistorySwitch()
        recorder = HistoryWindowRecorder({}, [], [gpu.as_allocator()], switch)
        recorder.start()
        recorder.start()
        recorder.stop()
        assert not gpu.recording

    def test_another_threads_modules_are_marked_too(self):
        gpu = StandIn()
        net = Net([], gpu)
        recorder = HistoryWindowRecorder({"": net}, [], [gpu.as_allocator()], HistorySwitch())
        recorder.start()
        thread = threading.Thread(target=net, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
        recorder.stop()
        assert net.seen[1] == MODULE_MARK + "inner"
        assert gpu.mark == ""


def test_a_history_reaches_back_where_its_oldest_entry_is_older_or_it_has_none():
    taken = {"device_traces": [[], [{"time_us": 5}, {"time_us": 9}]]}
    assert reaches(taken, 5_000, device=1)
    assert not reaches(taken, 4_000, device=1)
    assert reaches(taken, 4_000, device=0)


def test_a_snapshot_with_our_marks_names_the_modules():
    marked = entries("alloc 4096 400")
    marked[0]["user_metadata"] = MODULE_MARK + "net.fc"
    told = trace_from_snapshot(snapshot([segment(block(0x1000, 400))], marked), "test")
    assert told.modules[told.events.module[0]].key == "net.fc"
