"""The resident memory of a process: each step's own peak, the true one for others, and what else is known."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.steps import counters
from tb_memplugin.record.steps.counters import ProcessCounters, ResidentMemory, resident_memory
from tb_memplugin.record.steps.recording import StepRecording

MIB = 1 << 20
KERNEL_LAG = 4 * MIB
"""The kernel adds up its page counters per CPU in batches (lib/percpu_counter.c): a few hundred pages, and
more while the processes of a busy machine change their CPU. Blocks in the tests differ by 8 MiB and more."""

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux resets the mark")


class Mark:
    """A process whose memory the test sets; its mark obeys like Linux's, or what `obeys` says."""

    def __init__(self, obeys: bool = True) -> None:
        self.current = self.mark = 100 * MIB
        self.obeys = obeys
        self.error: OSError | None = None
        self.memory = ResidentMemory(lambda: (self.current, self.mark), self.reset)

    def reset(self):
        if self.error is not None:
            raise self.error
        if self.obeys:
            self.mark = self.current

    def briefly(self, mebibytes):
        self.mark = max(self.mark, self.current + mebibytes * MIB)

    def recording(self, *, reset_peaks=True):
        recording = StepRecording([ProcessCounters(self.memory, reset_peaks=reset_peaks)])
        recording.begin()
        return recording


def peak(recording):
    """The peak of the step that ends now in MiB, and whether it is exact."""
    device = recording.end_step().devices[0]
    return device.peak_allocated // MIB, device.exact


def test_every_step_has_its_own_peak_after_a_higher_step_too():
    process = Mark()
    process.briefly(900)  # before the first step
    recording = process.recording()
    peaks = []
    for mebibytes in (50, 300, 20, 0, 40):
        process.briefly(mebibytes)
        peaks.append(peak(recording))
    assert peaks == [(150, True), (400, True), (120, True), (100, True), (140, True)]


def test_nested_phases_and_two_recordings_keep_their_own_peaks():
    process = Mark()
    often, seldom = process.recording(), process.recording()
    outer = often.begin_phase("outer")
    process.briefly(70)
    inner = often.begin_phase("inner")
    process.briefly(10)
    often.end_phase(inner)
    process.briefly(30)
    often.end_phase(outer)
    process.briefly(5)
    step = often.end_step()
    assert {phase.name: phase.peak_bytes[0] // MIB for phase in step.phases} == {"outer": 170, "inner": 110}
    process.briefly(40)
    assert [peak(often), peak(seldom)] == [(140, True), (170, True)]
    process.briefly(1)
    assert [peak(often), peak(seldom)] == [(101, True), (101, True)]


def test_a_recording_without_resets_sees_the_highest_ever_whatever_another_resets():
    process = Mark()
    process.briefly(500)
    resetting, untouched = process.recording(), process.recording(reset_peaks=False)
    process.briefly(80)
    assert [peak(resetting), peak(untouched)] == [(180, True), (100, False)]
    process.briefly(90)  # above the mark since the reset, but not above the highest ever
    assert peak(untouched) == (100, False)
    process.briefly(501)
    assert [peak(untouched), peak(resetting)] == [(601, True), (601, True)]


def test_where_resets_have_no_effect_peaks_are_lower_bounds_as_without_resets():
    process = Mark(obeys=False)
    process.briefly(300)
    recording = process.recording()
    process.briefly(50)
    below = peak(recording)
    process.briefly(400)
    assert [below, peak(recording)] == [(100, False), (500, True)]


def test_where_resets_begin_to_fail_peaks_are_lower_bounds_from_then_on():
    process = Mark()
    process.briefly(900)
    recording = process.recording()
    process.briefly(60)
    process.error = PermissionError("this process gave up its rights")
    last_exact = peak(recording)
    process.briefly(30)
    below = peak(recording)
    process.briefly(70)
    assert [last_exact, below, peak(recording)] == [(160, True), (100, False), (170, True)]


def test_elsewhere_the_mark_is_what_the_system_calls_the_highest(monkeypatch):
    info = SimpleNamespace(rss=100)
    monkeypatch.setattr(counters, "_STATUS", "/proc/absent")
    monkeypatch.setitem(
        sys.modules, "psutil", SimpleNamespace(Process=lambda: SimpleNamespace(memory_info=lambda: info))
    )
    memory = resident_memory.__wrapped__()
    assert memory.peaks is None
    monkeypatch.setattr(counters, "_highest_on_unix", lambda: 700)  # macOS
    assert memory.since_start() == (100, 700)
    info.peak_wset = 900  # Windows
    assert memory.since_start() == (100, 900)


def test_where_psutil_cannot_read_the_process_the_error_says_what_to_do(monkeypatch):
    def without_proc():
        raise LookupError("process PID not found")

    monkeypatch.setattr(counters, "_STATUS", "/proc/absent")
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=without_proc))
    with pytest.raises(MemPluginError, match="mount /proc"):
        resident_memory.__wrapped__()


@on_linux
@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), RuntimeError("no file may be opened in an event loop")],
    ids=["the system", "a patched function"],
)
def test_where_a_file_cannot_be_opened_for_the_moment_the_memory_can_be_read_later(monkeypatch, error):
    with monkeypatch.context() as patched:
        patched.setattr(counters, "_read", Mock(side_effect=error))
        memory = resident_memory.__wrapped__()
    assert memory.peaks is not None
    assert 0 < memory.read()[0] <= memory.read()[1]


SCRIPT_OF_BLOCKS = """
import json, mmap, os, re, resource, sys
from tb_memplugin import MemoryMonitor

def resident():
    return int(re.search("VmRSS:\\\\s+([0-9]+)", open("/proc/self/status").read())[1]) << 10

def touch(mebibytes):
    block = mmap.mmap(-1, mebibytes << 20)
    for offset in range(0, len(block), mmap.PAGESIZE):
        block[offset] = 1
    return block

def own(reading, mebibytes, before):
    \"\"\"Bytes by which a peak differs from the resident memory before and the block.\"\"\"
    return reading - before - (mebibytes << 20)
"""


def run(code, *arguments):
    """Run a program below a shell: what exec replaces is in getrusage's maximum, and a test run is large."""
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", SCRIPT_OF_BLOCKS + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@on_linux
def test_a_step_and_its_phases_have_the_peaks_of_blocks_of_known_size(tmp_path):
    rows = run(
        """
with MemoryMonitor(sys.argv[1], "w", device="process", flush_seconds=600) as monitor:
    for first, second in ((96, 32), (24, 64), (16, 8), (48, 8)):
        before = resident()
        with monitor.phase("both"):
            with monitor.phase("first"):
                touch(first).close()
            touch(second).close()
        step = monitor.step()
        inner, outer = step.phases
        peaks = step.devices[0].peak_allocated, outer.peak_bytes[0], inner.peak_bytes[0]
        sizes = max(first, second), max(first, second), first
        exact = step.devices[0].exact, *outer.exact, *inner.exact
        print(json.dumps([*map(own, peaks, sizes, [before] * 3), all(exact)]))
""",
        str(tmp_path),
    )
    assert len(rows) == 4
    for *differences, exact in rows:
        assert exact
        assert all(abs(one) < KERNEL_LAG for one in differences)


@on_linux
def test_getrusage_tells_the_highest_since_the_process_began_but_not_the_parents_to_a_child(tmp_path):
    (own_peak, while_watched, after, thread, children, child) = run(
        """
before = resident()
touch(128).close()
with MemoryMonitor(sys.argv[1], "w", device="process", flush_seconds=600) as monitor:
    monitor.step()  # starts the thread that writes
    with_monitor = resident()
    touch(8).close()
    own_peak = own(monitor.step().devices[0].peak_allocated, 8, with_monitor)
    while_watched = resource.getrusage(resource.RUSAGE_SELF)
    assert while_watched.ru_utime > 0
monitor.close()
maximum = lambda who=resource.RUSAGE_SELF: own(resource.getrusage(who).ru_maxrss << 10, 128, before)
print(own_peak)
print(own(while_watched.ru_maxrss << 10, 128, before))
print(maximum())
print(maximum(resource.RUSAGE_THREAD))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.stdout.flush()
child = os.fork()
if child == 0:
    touch(16).close()
    with MemoryMonitor(sys.argv[1] + "/child", "w", device="process", flush_seconds=600) as monitor:
        touch(4).close()
        in_child = monitor.step().devices[0]
    assert in_child.exact, in_child
    of_parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > (before >> 10) + (64 << 10)
    print(json.dumps(of_parent), flush=True)
    os._exit(0)
os.waitpid(child, 0)
""",
        str(tmp_path),
    )
    assert [one for one in (own_peak, while_watched, after, thread) if abs(one) >= KERNEL_LAG] == []
    assert children == 0
    assert not child


@on_linux
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="no such file here")  # noqa: PTH110
def test_without_resets_nothing_is_wrapped_and_the_systems_mark_stays(tmp_path):
    (difference, wrapped) = run(
        """
before, getrusage = resident(), resource.getrusage
touch(64).close()
with MemoryMonitor(sys.argv[1], "w", device="process", flush_seconds=600, reset_peaks=False) as monitor:
    monitor.step()
mark = int(re.search("VmHWM:\\\\s+([0-9]+)", open("/proc/self/status").read())[1]) << 10
print(own(mark, 64, before))
print(json.dumps(resource.getrusage is not getrusage))
""",
        str(tmp_path),
    )
    assert abs(difference) < KERNEL_LAG
    assert not wrapped
