"""`memory_trace_handler(..., snapshot=True)`: the allocator's history comes into the same window."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from tb_memplugin import memory_trace_handler
from tb_memplugin.record import handler as handler_module
from tb_memplugin.record.history.merge import SOURCE
from tb_memplugin.store.reader import load_window
from tests.allocators import StandIn
from tests.test_handler import loop, notes_of, recorded_steps
from tests.training import CNN
from tests.watched import is_watched


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="tb_memplugin")

    def told():
        """All but that the loop's optimizer was not given."""
        messages = [record.getMessage() for record in caplog.records if record.name == "tb_memplugin"]
        return [message for message in messages if "was not given to memory_trace_handler" not in message]

    return told


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for the allocator of a GPU; the training itself is on the CPU."""
    gc.collect()  # handlers of earlier tests would record with theirs
    made = StandIn()
    monkeypatch.setattr(handler_module, "allocators", lambda: (made.as_allocator(),))
    return made


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CNN()


def written(folder):
    (side_file,) = folder.rglob("*.mem")
    return load_window(str(side_file))


def test_without_a_gpu_it_warns_once_and_records_all_else(tmp_path, model, warnings):
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("there is a GPU here")
    handler = memory_trace_handler(tmp_path, model=model, snapshot=True)
    plan = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    loop(handler, model=model, plan=plan)
    (warning,) = warnings()
    assert "no CUDA or XPU device" in warning
    assert recorded_steps(tmp_path) == [1, 3]


def test_without_snapshot_no_history_is_touched(tmp_path, model, gpu):
    loop(memory_trace_handler(tmp_path, model=model), model=model)
    assert gpu.settings == {}


def test_the_history_is_on_in_profiled_steps_alone(tmp_path, model, gpu):
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(gpu.recording))
    loop(memory_trace_handler(tmp_path, model=model, snapshot=True), model=model)
    assert seen == [False, False, True, False]
    assert not gpu.recording


def test_the_modules_mark_their_allocations_and_no_hook_stays(tmp_path, model, gpu):
    seen = []
    handle = model.head.register_forward_hook(lambda *_: seen.append(gpu.mark))
    loop(memory_trace_handler(tmp_path, model=model, snapshot=True), model=model)
    assert seen == ["", "", "tb_memplugin.module=head", ""]
    handle.remove()
    assert not is_watched(model)


def test_the_window_has_the_devices_history_beside_the_profile(tmp_path, model, gpu):
    def forward(*_):
        gpu.note("alloc", 0x2000, 900, 1_900_000_000_000_000)

    gpu.segments[0]["blocks"].append(
        {"address": 0x2000, "size": 1024, "requested_size": 900, "state": "active_allocated", "frames": []}
    )
    model.head.register_forward_hook(forward)
    loop(memory_trace_handler(tmp_path, model=model, snapshot=True), model=model)
    trace = written(tmp_path)
    assert [device.name for device in trace.devices] == ["cpu", "cuda:0"]
    assert trace.live(1)[[0, -1]].tolist() == [400, 1300]
    assert trace.source == SOURCE


@pytest.mark.parametrize("broken", ["record", "snapshot"])
def test_an_allocator_that_fails_costs_its_history_and_nothing_else(tmp_path, model, gpu, broken, warnings):
    gpu.broken = broken
    assert len(loop(memory_trace_handler(tmp_path, model=model, snapshot=True), model=model)) == 4
    assert recorded_steps(tmp_path) == [2]
    assert len(warnings()) == 1
    assert any("history of cuda" in note for note in notes_of(tmp_path))


def test_a_history_that_cannot_be_read_is_told_and_the_window_is_written(tmp_path, model, gpu, warnings):
    gpu.segments = [{"device": "not a number"}]
    loop(memory_trace_handler(tmp_path, model=model, snapshot=True), model=model)
    (warning,) = warnings()
    assert "written without it" in warning
    assert recorded_steps(tmp_path) == [2]


def test_the_training_is_bit_for_bit_the_same(tmp_path, gpu):
    def run(handler_of):
        torch.manual_seed(3)
        model = CNN()
        return loop(handler_of(model), model=model), [p.detach().clone() for p in model.parameters()]

    losses, weights = run(lambda model: lambda prof: None)
    ours, our_weights = run(lambda model: memory_trace_handler(tmp_path, model=model, snapshot=True))
    assert ours == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, our_weights, strict=True))
