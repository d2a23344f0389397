"""Frameworks copy and pickle callbacks: copies of a handler are the handler, and an unpickled one works."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizers
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import MemoryMonitor, combine_handlers, load, memory_trace_handler
from tb_memplugin.callbacks.recorder import StepRecorder
from tb_memplugin.callbacks.recorder import Training as LibraryTraining
from tb_memplugin.store.reader import read_recordings


def record(handler: Callable[[profile], object], model: nn.Module) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, on_trace_ready=handler):
        model(torch.ones(2, 4)).sum().backward()


def steps_in(folder: Path) -> int:
    return len(read_recordings(str(folder)).steps)


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_handler_and_the_original_write_windows_in_turn(tmp_path, copied, caplog):
    model = nn.Linear(4, 3)
    original = memory_trace_handler(tmp_path, "w", model=model)
    (held,) = copied([original]) if copied is copy.deepcopy else [copied(original)]
    for handler in (original, held, original):
        record(handler, model)
    assert steps_in(tmp_path) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
    assert caplog.text == ""


@pytest.mark.parametrize("had_model", [True, False])
def test_a_note_says_what_an_unpickled_handler_lacks(tmp_path, caplog, had_model):
    model = nn.Linear(4, 3)
    handler = through_pickle(memory_trace_handler(tmp_path, "w", model=model if had_model else None))
    for _ in range(2):
        record(handler, model)
    side_files = [step.side_file or "" for step in read_recordings(str(tmp_path)).steps]
    notes = [[note for note in load(path).notes if note.code == "unpickled"] for path in side_files]
    assert [len(each) for each in notes] == [had_model] * 2
    assert all("without the model that it had" in note for each in notes for note in each)
    assert caplog.text == ""


def test_an_unpickled_handler_and_its_original_write_into_two_folders_with_one_warning(tmp_path, caplog):
    model = nn.Linear(4, 3)
    original = memory_trace_handler(tmp_path, "w", model=model)
    unpickled = through_pickle(original)
    for handler in (original, unpickled, original):
        record(handler, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "w.2"]
    assert steps_in(tmp_path) == 3
    (warning,) = caplog.messages
    assert "another writer, so this one writes to" in warning


def test_combined_handlers_can_be_pickled_and_copied(tmp_path):
    model = nn.Linear(4, 3)
    both = combine_handlers(
        memory_trace_handler(tmp_path / "a", "w"), memory_trace_handler(tmp_path / "b", "w")
    )
    record(through_pickle(both), model)
    record(copy.deepcopy(both), model)
    assert [steps_in(tmp_path / name) for name in ("a", "b")] == [2, 2]


def test_a_copy_of_a_monitor_counts_the_same_steps(tmp_path):
    monitor = MemoryMonitor(tmp_path, "w", flush_seconds=1000)
    held = copy.deepcopy({"callbacks": [monitor]})["callbacks"][0]
    steps = [one.step() for one in (monitor, held, monitor)]
    monitor.close()
    assert [step.step for step in steps if step is not None] == [0, 1, 2]


def test_an_unpickled_monitor_begins_anew_with_the_same_arguments(tmp_path):
    with MemoryMonitor(tmp_path, "w", flush_seconds=1000) as monitor, through_pickle(monitor) as unpickled:
        monitor.step()
        monitor.flush()
        unpickled.step()
    (first, second) = sorted(path.name for path in tmp_path.iterdir())
    assert (first, second) == ("w.2.steps", "w.steps")
    assert "tb_memplugin monitor" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_callbacks_recorder_in_a_window_has_no_window(tmp_path, copied):
    model = nn.Linear(4, 3)
    recorder = StepRecorder([0], worker_name="w")
    recorder.begin_training(LibraryTraining(lambda: str(tmp_path / "a"), lambda: model, list), 0)
    recorder.begin_step(0)
    held = copied(recorder)
    model(torch.ones(2, 4)).sum().backward()
    recorder.end_step()
    recorder.end_training()
    held.begin_training(LibraryTraining(lambda: str(tmp_path / "b"), lambda: model, list), 0)
    held.begin_step(0)
    model(torch.ones(2, 4)).sum().backward()
    held.end_step()
    held.end_training()
    assert [steps_in(tmp_path / name) for name in ("a", "b")] == [1, 1]
    assert not torch_optimizers._global_optimizer_pre_hooks
