"""Steps and phases: which peak belongs to which, and what is known where nothing may be reset."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tb_memplugin.record.steps.counters import (
    AllocatorCounters,
    HighWater,
    ProcessCounters,
    SharedPeaks,
    UntouchedCounters,
    resident_memory,
)
from tb_memplugin.record.steps.recording import (
    MOST_PHASES,
    OTHER_PHASES,
    Allowance,
    StepRecording,
    figures_of,
)
from tb_memplugin.trace.notes import Note
from tests.counting_allocator import CountingAllocator, Handle


def begun(counters):
    recording = StepRecording([counters])
    recording.begin()
    return recording


@pytest.fixture
def allocator():
    return CountingAllocator()


@pytest.fixture
def recording(allocator):
    peaks = SharedPeaks(allocator.doors)
    return begun(AllocatorCounters(Handle(), lambda: peaks))


@pytest.fixture
def untouched(allocator):
    return begun(UntouchedCounters(Handle(), allocator.stats))


def peaks_of(step):
    return {phase.name: phase.peak_bytes[0] for phase in step.phases}


def test_each_step_has_its_own_peak_and_what_it_leaves(recording, allocator):
    allocator.allocate(100)
    allocator.briefly(50)
    first = recording.end_step()
    allocator.briefly(20)
    second = recording.end_step()
    assert (first.devices[0].peak_allocated, first.devices[0].allocated) == (150, 100)
    assert (second.devices[0].peak_allocated, second.devices[0].allocated) == (120, 100)
    assert (second.devices[0].peak_reserved, second.devices[0].reserved) == (150, 150)
    assert second.devices[0].fragmentation == pytest.approx(50 / 150)
    assert [first.step, second.step] == [0, 1]


def test_a_joined_step_counts_to_the_next_one(recording, allocator):
    allocator.allocate(700)
    allocator.allocate(-700)
    recording.join_step()
    allocator.allocate(300)
    step = recording.end_step()
    assert (step.step, step.devices[0].peak_allocated, step.devices[0].allocations) == (1, 700, 2)
    assert recording.end_step().devices[0].peak_allocated == 300


def test_after_ten_readings_the_next_waits_until_they_are_a_small_enough_share(monkeypatch):
    """A reading of 2 ms at most every 200 ms is 1 %."""
    now = 0
    monkeypatch.setattr("time.perf_counter_ns", lambda: now)
    allowance = Allowance(0.01)
    for _ in range(10):
        assert allowance.is_due()
        allowance.spent(2_000_000)
    assert not allowance.is_due()
    now = 199_999_999
    assert not allowance.is_due()
    now = 200_000_000
    assert allowance.is_due()
    always = Allowance(None)
    for _ in range(11):
        always.spent(10**15)
    assert always.is_due()


def test_counts_are_those_of_the_step_even_where_the_user_set_them_back(recording, allocator):
    allocator.briefly(10)
    allocator.retries, allocator.ooms = 2, 1
    first = recording.end_step().devices[0]
    assert (first.num_alloc_retries, first.num_ooms, first.allocations, first.allocated_bytes) == (
        2,
        1,
        1,
        10,
    )
    allocator.retries = 0  # torch.cuda.reset_accumulated_memory_stats
    allocator.retries = 1
    assert recording.end_step().devices[0].num_alloc_retries == 1


def test_phases_nest_repeat_and_end_out_of_turn(recording, allocator):
    outer = recording.begin_phase("forward")
    allocator.briefly(10)
    inner = recording.begin_phase("attention")
    allocator.briefly(70)
    recording.end_phase(outer)
    allocator.briefly(90)
    recording.end_phase(inner)
    again = recording.begin_phase("forward")
    allocator.allocate(5)
    recording.end_phase(again)
    step = recording.end_step()
    assert peaks_of(step) == {"forward": 70, "attention": 90}
    forward = step.phases[0]
    assert (forward.count, forward.end_bytes) == (2, (5,))
    assert step.devices[0].peak_allocated == 90
    assert recording.end_step().phases == ()


def test_a_phase_that_spans_steps_counts_to_the_one_in_which_it_ends(recording, allocator):
    phase = recording.begin_phase("epoch")
    allocator.briefly(80)
    recording.end_step()
    allocator.briefly(30)
    recording.end_phase(phase)
    assert peaks_of(recording.end_step()) == {"epoch": 80}


def test_more_names_than_a_person_reads_are_one(recording):
    for number in range(MOST_PHASES + 5):
        recording.end_phase(recording.begin_phase(f"phase {number}"))
    step = recording.end_step()
    assert len(step.phases) == MOST_PHASES + 1
    assert (step.phases[-1].name, step.phases[-1].count) == (OTHER_PHASES, 5)


def test_ten_threads_with_phases_of_their_own(recording, allocator):
    lock = threading.Lock()

    def work(number):
        for _ in range(50):
            phase = recording.begin_phase(f"thread {number}")
            with lock:
                allocator.briefly(10)
            recording.end_phase(phase)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step = recording.end_step()
    assert {phase.count for phase in step.phases} == {50}
    assert set(peaks_of(step).values()) == {10}
    assert step.devices[0].peak_allocated == 10


def test_a_device_that_is_not_in_use_yet_is_not_brought_into_use(allocator):
    handle, peaks = Handle(), SharedPeaks(allocator.doors)
    handle.used = False
    allocator.broken = True  # nobody may ask
    recording = begun(AllocatorCounters(handle, lambda: peaks))
    assert recording.end_step().devices[0].peak_allocated == 0
    assert not recording.counters[0].in_use
    handle.used, allocator.broken = True, False
    allocator.briefly(60)
    assert recording.end_step().devices[0].peak_allocated == 60
    assert (recording.counters[0].product, recording.counters[0].capacity) == ("A Card", 1000)


def test_what_is_free_is_asked_of_a_device_on_which_something_is_reserved(recording, allocator):
    """A device without a reserve may have no context, and asking would create one."""
    (first,) = recording.end_step().devices
    assert (first.whole_free, first.whole_total) == (None, None)
    allocator.allocate(10)
    (second,) = recording.end_step().devices
    assert (second.whole_free, second.whole_total) == (60_000, 100_000)
    (device,) = figures_of(recording.waiting(), recording.counters).devices
    assert device.whole_free is not None
    assert device.whole_free.tolist() == [-1, 60_000]


def test_without_resets_a_peak_is_exact_where_the_counter_rose_else_a_lower_bound(untouched, allocator):
    allocator.briefly(100)
    rose = untouched.end_step().devices[0]
    allocator.allocate(40)
    allocator.briefly(30)
    below = untouched.end_step().devices[0]
    allocator.allocate(60)
    reached = untouched.end_step().devices[0]
    assert (rose.peak_allocated, rose.exact) == (100, True)
    assert (below.peak_allocated, below.exact) == (40, False)
    assert (reached.peak_allocated, reached.exact) == (100, True)
    assert allocator.resets == 0


def test_without_resets_what_came_before_is_no_peak_of_the_first_step(allocator):
    allocator.briefly(500)
    untouched = begun(UntouchedCounters(Handle(), allocator.stats))
    allocator.briefly(10)
    step = untouched.end_step().devices[0]
    assert (step.peak_allocated, step.exact) == (0, False)


def test_a_counter_that_somebody_set_back_tells_nothing_of_the_time_before():
    high = HighWater()
    assert high.since(10, 50) == (50, True)
    assert high.since(20, 25) == (20, False)
    assert high.since(20, 30) == (30, True)


def test_the_process_has_memory_and_more_after_a_megabyte_is_touched():
    recording = begun(ProcessCounters(resident_memory(), reset_peaks=False))
    kept = np.ones(8 << 20, np.uint8)
    step = recording.end_step().devices[0]
    grown = begun(ProcessCounters(resident_memory(), reset_peaks=False)).end_step().devices[0]
    assert step.device == "process"
    assert step.peak_allocated >= step.allocated > len(kept)
    assert step.reserved is None
    assert step.fragmentation is None
    assert (step.num_alloc_retries, step.num_ooms, step.allocations, step.allocated_bytes) == (None,) * 4
    assert grown.allocated > len(kept)


def test_steps_become_columns_and_a_phase_that_did_not_run_is_zero(recording, allocator):
    recording.end_step(10)
    allocator.briefly(5)
    recording.end_phase(recording.begin_phase("validation"))
    recording.end_step(20)
    steps = recording.waiting()
    figures = figures_of(steps, recording.counters, [Note("a note")])
    assert figures.steps.tolist() == [10, 20]
    assert figures.devices[0].peak.tolist() == [0, 5]
    assert figures.phases[0].counts.tolist() == [0, 1]
    assert figures.notes == ("a note",)
    recording.forget(steps[:1])
    assert recording.waiting() == steps[1:]
