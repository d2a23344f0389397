"""A profile with the counted calls of the CPU's allocator: made-up events, then programs with known bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tb_memplugin.record.compiling import CACHE_VARIABLE
from tb_memplugin.record.exact_cpu.counting import CALL
from tb_memplugin.record.profiler.memory_events import MemoryEvents, with_counted_calls

BEHIND = 1_000_000
"""How much later than the calls the made-up profiler's clock is, in nanoseconds."""


def profile(*events, devices=("cpu",)):
    """Events of a profile: (time, address, bytes); the operator is the event's number."""
    time, address, size = (np.array(column, np.int64) for column in zip(*events, strict=True))
    number = np.arange(len(events))
    return MemoryEvents(
        time_ns=time + BEHIND,
        address=address.astype(np.uint64),
        bytes=size,
        total=np.cumsum(size),
        reserved=np.full(len(events), -1),
        device=np.zeros(len(events), np.uint8),
        operator=number,
        node=number,
        frame=number,
        thread=np.zeros(len(events), np.int64),
        devices=devices,
    )


def completed(memory, *calls):
    joined = with_counted_calls(memory, np.array([(*call, 0) for call in calls], CALL))
    columns = (joined.time_ns - BEHIND, joined.address, joined.bytes, joined.operator)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_events_keep_their_time_and_operator():
    events = ((10, 64, 500), (20, 128, 700), (30, 64, -500))
    assert completed(profile(*events), *events) == [
        (10, 64, 500, 0),
        (20, 128, 700, 1),
        (30, 64, -500, 2),
    ]


def test_calls_that_no_profiler_saw_are_added_at_their_time_on_the_profilers_clock():
    assert completed(
        profile((10, 64, 500), (50, 64, -500)),
        *((10, 64, 500), (20, 128, 700), (30, 192, -40), (50, 64, -500)),
    ) == [(10, 64, 500, 0), (20, 128, 700, -1), (30, 192, -40, -1), (50, 64, -500, 1)]


def test_of_several_calls_at_one_address_the_nearest_in_time_is_the_events():
    """Another thread used the address in between."""
    assert completed(
        profile((10, 128, 1), (11, 64, 500), (50, 64, 900), (60, 128, -1)),
        *((10, 128, 1), (10, 64, 500), (20, 64, -500), (30, 64, 600), (35, 64, -600), (51, 64, 900)),
        (60, 128, -1),
    ) == [
        (10, 128, 1, 0),
        (11, 64, 500, 1),
        (20, 64, -500, -1),
        (30, 64, 600, -1),
        (35, 64, -600, -1),
        (50, 64, 900, 2),
        (60, 128, -1, 3),
    ]


def test_a_size_that_the_profiler_remembers_from_earlier_is_replaced():
    assert completed(profile((10, 64, -500)), (10, 64, -80)) == [(10, 64, -80, 0)]


def test_calls_at_one_address_stay_in_their_order_whatever_the_clocks_say():
    """The second allocation is reported before the free that another thread made first."""
    found = completed(
        profile((10, 64, 500), (20, 64, 600), (90, 128, 1)),
        *((10, 64, 500), (25, 64, -500), (26, 64, 600), (90, 128, 1)),
    )
    assert [(address, size) for _, address, size, _ in found] == [(64, 500), (64, -500), (64, 600), (128, 1)]
    assert [time for time, *_ in found] == sorted(time for time, *_ in found)


def test_events_of_other_devices_and_those_without_a_call_stay():
    memory = profile((10, 64, 500), (20, 128, 700), devices=("cuda:0",))
    assert completed(memory, (15 + BEHIND, 64, 8)) == [(10, 64, 500, 0), (15, 64, 8, -1), (20, 128, 700, 1)]
    assert completed(profile((10, 64, 500), (20, 128, 700)), (10, 64, 500)) == [
        (10, 64, 500, 0),
        (20, 128, 700, 1),
    ]


PROGRAM = """
import sys, threading, torch
from tb_memplugin import memory_trace_handler, load
from tb_memplugin.analysis.account import account_line, accounts
from tb_memplugin.trace import Category
from pathlib import Path
model = torch.nn.Linear(64, 64, bias=False)
data = torch.zeros(1000, 64)          # in no model
buffer = [torch.zeros(100_000)]       # freed by another thread in the window
folder = sys.argv[1]
handler = memory_trace_handler(folder, model=model, exact_cpu=True)
def elsewhere():
    buffer.clear()
    kept.append(torch.zeros(50_000))
kept = []
for window in range(2):
    with torch.profiler.profile(profile_memory=True, on_trace_ready=handler):
        model(data[:10])
        thread = threading.Thread(target=elsewhere); thread.start(); thread.join()
        torch.ones(200_000)
for path in sorted(Path(folder).rglob("*.mem")):
    trace = load(str(path))
    live = trace.live(0)
    print(live[0], live.max(), live[-1], account_line(accounts(trace, 0)).text)
    named = trace.start.category == Category.PARAMETER
    sizes = [int(trace.start.bytes[rows].sum()) for rows in (named, ~named)]
    print(sizes, *(note for note in trace.notes if "no steps" not in note))
"""


counts = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and cc"
)


def run(program: str, folder, early: bool) -> list[str]:
    """Run a program that gets a folder for its recordings, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "runs")],
        env={**os.environ, CACHE_VARIABLE: str(folder), "TB_MEMPLUGIN_EXACT_CPU": str(int(early))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@counts
@pytest.mark.parametrize("early", [True, False])
def test_a_window_has_every_byte_of_all_threads(early, tmp_path):
    """Weights 16,384, data 256,000, and 400,000 of a buffer that another thread frees; it keeps 200,000 more.

    The first window's peak is the 800,000 of `ones` beside the rest; the second begins with what was kept.
    """
    first, rows, second, later_rows = run(PROGRAM, tmp_path, early)
    weights, data, buffer, kept, ones = 16_384, 256_000, 400_000, 200_000, 800_000
    told = "accounts for 100.00 % of the allocator's bytes" if early else "not known: the counter began"
    start, rest = weights + data + buffer, weights + data + kept
    assert first.startswith(f"{start} {rest + ones} {rest} {told}")
    assert rows == f"[{weights}, {data + buffer}]"
    assert second.startswith(f"{rest} {rest + kept + ones} {rest + kept} {told}")
    assert later_rows == f"[{weights}, {data + kept}]"


ELSEWHERE = """
import sys, threading, torch
from tb_memplugin import memory_trace_handler, load
model = torch.nn.Linear(64, 64, bias=False)
handler = memory_trace_handler(sys.argv[1], model=model, exact_cpu=True)
with torch.profiler.profile(profile_memory=True, on_trace_ready=handler):
    model(torch.ones(10, 64))
    thread = threading.Thread(target=lambda: model(torch.ones(1000, 64))); thread.start(); thread.join()
print(*(note for note in load(sys.argv[1]).notes if note.code == "unseen_calls"))
"""


@counts
def test_what_is_counted_of_calls_that_the_profiler_does_not_see_is_told(tmp_path):
    """1,000 x 64 floats go into the call, and as many come out."""
    (note,) = run(ELSEWHERE, tmp_path, early=True)
    assert note == (
        "1 module call ran on threads that the profiler does not see: what they allocated, at most 512,000 "
        "bytes, is in the curve without a module."
    )
