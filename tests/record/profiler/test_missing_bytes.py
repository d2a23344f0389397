"""What the curve lacks is told, each byte once."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerAction, profile

from tb_memplugin import memory_trace_handler
from tb_memplugin.analysis.account import accounts
from tb_memplugin.record.profiler.memory_events import read_memory_events
from tb_memplugin.record.profiler.trace import _on_unreported_frees, trace_from_profile
from tb_memplugin.record.profiler.tree import walk
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.trace import Cause, Moment
from tests.record.profiler.test_unusual_loops import batch, line
from tests.training import train


def traced_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: dict[str, nn.Module],
    *,
    finds_all: bool = False,
) -> list[str]:
    """Make a step before the window and one in it; return the window's notes on bytes."""
    model(torch.ones(5, 100)).sum().backward()
    optimizer.step()
    recorder = WindowRecorder(given, [], finds_all=finds_all)
    watch(recorder)
    with profile(profile_memory=True) as prof:
        model(torch.ones(5, 100)).sum()
        optimizer.step()
    window = recorder.take()
    assert window is not None
    return [note for note in trace_from_profile(prof, window).notes if "in the curve" in note]


def test_state_of_an_optimizer_that_was_not_given_is_told_once():
    """Adam keeps two averages of 300 floats and a count of steps."""
    model = nn.Linear(100, 3, bias=False)
    (note,) = traced_step(model, torch.optim.Adam(model.parameters()), {"": model})
    assert "The 2,404 bytes of its state" in note


def test_without_model_and_optimizer_a_note_says_that_they_were_not_given():
    """300 floats and their gradients."""
    model = nn.Linear(100, 3, bias=False)
    (note,) = traced_step(model, torch.optim.SGD(model.parameters()), {})
    assert note.startswith("2,400 bytes")
    assert "their model or optimizer was not given to memory_trace_handler" in note


@pytest.mark.parametrize("named", [False, True])
def test_nothing_is_missing_where_all_is_searched(named):
    model = nn.Linear(100, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    assert traced_step(model, optimizer, {"": model} if named else {}, finds_all=True) == []


def test_gradients_of_the_window_before_are_not_missing():
    """The profiler reports their frees, because it saw their allocs. They are in the start state."""
    _, second = train(
        line(100, 3),
        optimizer=torch.optim.SGD,
        batch=batch,
        zero_first=True,
        steps=2,
        plan=lambda step: ProfilerAction.RECORD_AND_SAVE if step < 2 else ProfilerAction.NONE,
    )
    assert second.trace.live(0)[0] == 1200 + 1200
    assert not [note for note in second.trace.notes if "in the curve" in note]


def test_what_an_allocator_lists_is_not_missing():
    """CUDA's allocator lists its blocks; here the CPU stands for it."""
    model = nn.Linear(100, 3, bias=False)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 100)).sum().backward()
    adam.step()
    recorder = WindowRecorder({"": model}, [])
    recorder.start()
    assert recorder._window is not None
    recorder._window.blocks = [("cpu", 0x1000, 512)]
    adam.step()
    recorder.stop()
    window = recorder.take()
    assert window is not None
    assert window.problems == []


class Own(nn.Module):
    """Returns its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, _: object) -> torch.Tensor:
        return self.weight


def test_calls_on_a_thread_that_the_profiler_does_not_see_are_told_with_the_bytes_of_their_results():
    """Two calls return 5 x 3 floats each. What was given to a call, or was there before, it did not make."""
    model = nn.ModuleList([nn.Linear(100, 3), nn.Identity(), Own()])
    recorder = WindowRecorder({"": model}, [])
    watch(recorder)

    def elsewhere() -> None:
        for _ in range(2):
            model[1](input=model[0](torch.ones(5, 100)))
        model[2](None)

    with profile(profile_memory=True) as prof:
        model[0](torch.ones(5, 100))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    window = recorder.take()
    assert window is not None
    (note,) = (note for note in trace_from_profile(prof, window).notes if "module calls" in note)
    assert note.startswith("5 module calls ran on threads that the profiler does not see")
    assert "Their results alone have 120 bytes: at least these" in note


def test_an_input_that_an_unseen_thread_freed_is_perhaps_still_counted():
    """A thread gets the only reference to 5 x 100 floats, and drops it."""
    model, queue = nn.Linear(100, 3), list[torch.Tensor]()
    recorder = WindowRecorder({"": model}, [])
    watch(recorder)
    with profile(profile_memory=True) as prof:
        queue.append(torch.ones(5, 100))
        thread = threading.Thread(target=lambda: model(queue.pop()))
        thread.start()
        thread.join()
    window = recorder.take()
    assert window is not None
    trace = trace_from_profile(prof, window)
    (account,) = (each for each in accounts(trace, 0) if each.moment is Moment.END)
    assert account.causes == ((Cause.STILL_COUNTED, -2000),)


def test_a_recording_that_fails_says_how_many_bytes_this_leaves_open():
    """Of a window without model, the 1,200 bytes of a result have no module."""
    recorder = WindowRecorder({}, [], finds_all=False)
    watch(recorder)
    with profile(profile_memory=True) as prof:
        kept = torch.ones(300)
    del kept
    window = recorder.take()
    assert window is not None
    window.open_problems["Recording at start failed (ValueError: ours)."] = ""
    assert trace_from_profile(prof, window).notes[0] == (
        "Recording at start failed (ValueError: ours). At most 1,200 bytes, those without a module, lack "
        "a name for it; at least 0 bytes, which were seen in use, are not in the curve."
    )


def test_a_search_that_takes_too_long_is_told_with_what_it_had_before(monkeypatch):
    """A tensor of 1,234,567 bytes is alive, which no model or optimizer holds."""
    kept = torch.zeros(1_234_567, dtype=torch.uint8)
    monkeypatch.setattr("tb_memplugin.record.profiler.window.LONGEST_SEARCH_NS", -1)
    recorder = WindowRecorder({}, [])
    recorder._search_ns = -1
    windows = []
    for _ in range(2):
        recorder.start()
        recorder.stop()
        windows.append(recorder.take())
    first, second = windows
    assert first is not None
    assert second is not None
    found = sum(seen.bytes for seen in first.start)
    assert found >= len(kept)
    assert f"and had {found:,} bytes." in second.problems[0]


@pytest.mark.parametrize(("makes", "lost"), [(torch.ones, ["512"]), (partial(np.ones, dtype=np.float32), [])])
def test_an_input_that_a_thread_made_is_told_and_another_librarys_is_not(makes, lost):
    """A thread that has ended makes 8 x 16 floats for a layer; those of numpy are not torch's."""
    model, made = nn.Linear(16, 4), []
    recorder = WindowRecorder({"": model}, [])
    watch(recorder)
    with profile(profile_memory=True) as prof:
        thread = threading.Thread(target=lambda: made.append(makes((8, 16))))
        thread.start()
        thread.join()
        model(torch.as_tensor(made[0]))
    window = recorder.take()
    assert window is not None
    notes = [note for note in trace_from_profile(prof, window).notes if note.code == "not_in_curve"]
    assert [note.split()[0] for note in notes] == lost


def test_the_profilers_totals_count_the_threads_of_its_events_and_no_others():
    """10 and 20 floats are allocated, and between them a thread makes 1,000, which it has until the end."""
    made, kept = [], []
    with profile(profile_memory=True) as prof:
        kept.append(torch.ones(10))
        thread = threading.Thread(target=lambda: made.append(torch.ones(1000)))
        thread.start()
        thread.join()
        kept.append(torch.ones(20))
    memory = read_memory_events(walk(prof.profiler.kineto_results.experimental_event_tree()))
    assert memory.bytes.tolist() == [40, 80]
    assert np.diff(memory.total).tolist() == [80]


def test_notes_count_only_blocks_with_bytes_and_by_their_number():
    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch)
    assert list(_on_unreported_frees(cycle.trace, [0])) == []
    (note,) = _on_unreported_frees(cycle.trace, [0, 5])
    assert ": 1 block (5 bytes), by" in note


def test_a_profile_within_a_window_is_told(tmp_path, caplog):
    """torch gives the inner one all events, and leaves the outer one empty."""
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler(tmp_path)):
        with profile(profile_memory=True):
            torch.ones(8)
        torch.ones(8)
    assert "Another profiler began within this window" in caplog.text
    assert not list(tmp_path.iterdir())
