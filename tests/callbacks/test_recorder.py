"""Recording inside a loop that somebody else runs, without any of the libraries."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import profile

from tb_memplugin.callbacks.recorder import StepRecorder, Training, is_profiling
from tb_memplugin.store.disk_sync import DiskSync
from tb_memplugin.store.reader import load_window
from tests.callbacks.plain import PlainProfiler, counted_peaks, recorded, stats_in, steps_in
from tests.watched import is_watched


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


def step(model, optimizer):
    """1,024 bytes of its own: a batch of 64 and what follows from it."""
    model(torch.ones(64, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def loop(recorder, folder, model, *, first=0, steps=5, evaluate_after=(), evaluate=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder.begin_training(Training(lambda: str(folder), lambda: model, lambda: [optimizer]), first)
    recorder.expect(first)
    for number in range(first, first + steps):
        recorder.begin_step(number)
        step(model, optimizer)
        recorder.end_step(pause=number in evaluate_after)
        if number in evaluate_after:
            evaluate()
            recorder.resume()
    recorder.end_training()


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_steps_and_peaks_are_those_of_a_plain_profiler(tmp_path, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = PlainProfiler(steps=3)
    with plain.profile:
        for _ in range(5):
            step(model, optimizer)
            plain.profile.step()
    torch.manual_seed(0)
    loop(StepRecorder([0, 1, 2]), tmp_path, torch.nn.Linear(4, 4))
    assert counted_peaks(tmp_path) == plain.peaks
    assert list(plain.peaks) == [0, 1, 2]


def test_parts_of_a_step_have_the_models_names(tmp_path, model):
    loop(StepRecorder([2]), tmp_path, torch.nn.Sequential(model))
    (only,) = recorded(tmp_path)
    assert only.side_file is not None
    trace = load_window(only.side_file)
    mine = trace.allocations.bytes[[trace.modules[row].key == "0" for row in trace.allocations.module]]
    assert 64 * 4 * 4 in mine.tolist()


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_recorder_waits_for_the_disk_at_the_end_of_each_window(
    tmp_path, model, monkeypatch, durable
):
    waits = []
    monkeypatch.setattr(DiskSync, "wait", lambda _, seconds=1.0: waits.append(seconds))
    loop(StepRecorder([0, 2], durable=durable), tmp_path, model)
    assert waits == [None, None] * durable


def test_an_evaluation_between_two_steps_is_in_neither(tmp_path, model):
    held = []
    loop(
        StepRecorder([1, 2]),
        tmp_path / "with",
        model,
        evaluate_after={1},
        evaluate=lambda: held.append(torch.ones(1 << 20)),
    )
    loop(StepRecorder([1, 2]), tmp_path / "without", model)
    assert len(held) == 1
    assert counted_peaks(tmp_path / "with") == counted_peaks(tmp_path / "without")
    assert [one.metadata.side_file for one in recorded(tmp_path / "with")] == [
        "window-000000.mem",
        "window-000001.mem",
    ]


def test_a_window_that_a_pause_left_empty_is_not_written(tmp_path, model):
    recorder = StepRecorder([0])
    recorder.begin_training(Training(lambda: str(tmp_path), lambda: model, list), 0)
    recorder.expect(0)
    assert is_profiling()
    recorder.pause()
    assert not is_profiling()
    recorder.end_training()
    assert steps_in(tmp_path) == []


def test_a_step_that_was_not_finished_is_written_as_it_is(tmp_path, model):
    recorder = StepRecorder([0, 1])
    recorder.begin_training(Training(lambda: str(tmp_path), lambda: model, list), 0)
    recorder.begin_step(0)
    model(torch.ones(64, 4))
    recorder.end_training()
    assert steps_in(tmp_path) == [0]
    assert stats_in(tmp_path)[0].window_peak_bytes == 2 * 64 * 4 * 4
    assert not is_profiling()
    gc.collect()
    assert not is_watched(model)


def test_none_of_the_chosen_steps_ran(tmp_path, model, caplog):
    loop(StepRecorder([70, 71]), tmp_path, model)
    assert "the training ran steps 0 to 4, and steps= selects none of them" in caplog.text


def test_a_second_training_in_the_same_folder_is_a_worker_of_its_own(tmp_path, model, caplog):
    recorder = StepRecorder([1], worker_name="w")
    for _ in range(2):
        loop(recorder, tmp_path, model)
    assert [(one.metadata.worker, one.metadata.step) for one in recorded(tmp_path)] == [
        ("w", 1),
        ("w_training2", 1),
    ]
    assert caplog.text == ""


def test_beside_another_profiler_it_warns_once_and_leaves_the_other_alone(tmp_path, model, caplog):
    with profile(profile_memory=True) as other:
        loop(StepRecorder([1, 3]), tmp_path, model)
    assert caplog.text.count("Another torch profiler is on") == 1
    assert steps_in(tmp_path) == []
    assert sum(event.key == "aten::addmm" for event in other.key_averages()) == 1


def test_a_profiler_that_ends_ours_is_a_warning(tmp_path, model, caplog):
    def steal():
        with profile():
            pass

    recorder = StepRecorder([0])
    recorder.begin_training(Training(lambda: str(tmp_path), lambda: model, list), 0)
    recorder.begin_step(0)
    steal()
    recorder.end_step()
    recorder.end_training()
    assert caplog.text.count("WARNING") == 1
    assert not is_profiling()


def test_what_fails_on_our_side_is_told_once_and_nothing_is_raised(tmp_path, model, caplog):
    def no_folder():
        raise RuntimeError("no folder today")

    recorder = StepRecorder([0, 3])
    recorder.begin_training(Training(no_folder, lambda: model, list), 0)
    for number in range(5):
        recorder.begin_step(number)
        recorder.end_step()
    recorder.end_training()
    assert caplog.text.count("no folder today") == 1
    assert "The training continues without it" in caplog.text
    assert not is_profiling()


def test_torch_still_tells_whether_a_profiler_is_on():
    assert autograd_profiler._is_profiler_enabled is False
    with profile():
        assert is_profiling()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu")
def test_on_cuda_the_peak_is_the_allocators(tmp_path):
    model = torch.nn.Linear(256, 256, device="cuda")
    recorder = StepRecorder([0])
    recorder.begin_training(Training(lambda: str(tmp_path), lambda: model, list), 0)
    torch.cuda.reset_peak_memory_stats()
    recorder.begin_step(0)
    model(torch.ones(64, 256, device="cuda")).sum().backward()
    recorder.end_training()
    (only,) = recorded(tmp_path)
    (device,) = [one for one in only.summary().devices if one.name == "cuda:0"]
    assert device.stats.peak_bytes == torch.cuda.max_memory_allocated()
