"""The account of a recording: what it says of made-up traces whose numbers a person can add up."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis.account import account_line, accounts
from tb_memplugin.trace import Cause, Counter, CounterReading, Moment
from tests.traces import trace

START, PEAK, END = Moment
"""1,000 bytes before the window, a peak of 1,600, and 1,100 at the end."""
LINES = ("start 1000 w", "alloc 600 a", "free a", "alloc 100 b")


def line(*counters, lines=LINES):
    recorded = trace(*lines, counters=counters)
    return account_line(accounts(recorded, 0))


def read(moment, size, counter=Counter.ALLOCATED, **fields):
    return CounterReading(0, moment, counter, size, **fields)


def test_the_three_moments_have_the_recordings_own_bytes_beside_the_counters():
    recorded = trace(*LINES, counters=(read(END, 1100), read(START, 1000), read(PEAK, 1610)))
    assert [(one.moment, one.counted, one.allocator, one.missing) for one in accounts(recorded, 0)] == [
        (START, 1000, 1000, 0),
        (PEAK, 1600, 1610, 10),
        (END, 1100, 1100, 0),
    ]


def test_all_bytes_are_accounted_for():
    told = line(read(START, 1000), read(PEAK, 1600), read(END, 1100))
    assert (told.level, told.text) == ("exact", "accounts for 100.00 % of the allocator's bytes")


def test_what_is_missing_is_shown_at_the_moment_where_most_is_missing_with_its_causes():
    told = line(read(START, 1250, causes=((Cause.NOT_TRACED, 200),)), read(PEAK, 1610), read(END, 1100))
    assert told.level == "different"
    assert told.text == (
        "accounts for 80.00 % of the allocator's bytes: 250 B missing at the window's start "
        "(200 B seen in use, not seen allocated; 50 B for no known reason)"
    )


@pytest.mark.parametrize(
    ("allocator", "level", "percent"), [(1001, "exact", "99.90"), (1002, "different", "99.80")]
)
def test_a_thousandth_may_be_missing_and_never_reads_as_all(allocator, level, percent):
    told = line(read(START, allocator))
    assert (told.level, told.text.split(":")[0]) == (
        level,
        f"accounts for {percent} % of the allocator's bytes",
    )


def test_a_byte_of_a_million_is_not_rounded_away():
    told = line(read(START, 1_000_000), lines=("start 999999 w",))
    assert told.level == "exact"
    assert "99.99 %" in told.text
    assert "1 B missing" in told.text


def test_too_many_bytes_are_a_difference_too():
    told = line(read(END, 1000))
    assert told.level == "different"
    assert told.text == "accounts for 110.00 % of the allocator's bytes: 100 B too much at the window's end"


def test_a_counter_that_is_a_lower_bound_proves_only_what_is_missing():
    assert line(read(PEAK, 1600, at_least=True)).level == "not_known"
    told = line(read(PEAK, 2000, at_least=True))
    assert told.level == "different"
    assert told.text == (
        "accounts for at most 80.00 % of the allocator's bytes: at least 400 B missing at the peak"
    )


def test_a_moment_that_is_not_known_is_named_beside_those_that_are():
    told = line(read(START, 1000), read(PEAK, 900, at_least=True), read(END, 1100))
    assert told.level == "exact"
    assert told.text == "accounts for 100.00 % of the allocator's bytes; its count at the peak is not known"


def test_frees_of_blocks_that_were_never_seen_are_missing_until_they_are_freed():
    """400 bytes that the trace does not have are freed between the peak and the end."""
    seen = [read(moment, None, Counter.SEEN) for moment in Moment]
    recorded = trace("start 1000 w", "start 400 old", "alloc 600 a", "free old", "free a", counters=seen)
    start = recorded.start
    only = {name: getattr(start, name)[:1] for name in start.__slots__}
    without = type(recorded)(
        "test", recorded.events, type(start)(**only), recorded.devices, recorded.steps, counters=tuple(seen)
    )
    assert [one.missing for one in accounts(without, 0)] == [400, 400, None]
    told = account_line(accounts(without, 0))
    assert told.level == "different"
    assert told.text == (
        "accounts for at most 71.42 % of the allocator's bytes: at least 400 B missing at the window's start "
        "(400 B from before the window, freed in it)"
    )


def test_nothing_independent_is_never_everything():
    told = line(*(read(moment, None, Counter.SEEN) for moment in Moment))
    assert told.level == "not_known"
    assert "%" not in told.text


def test_a_block_whose_free_was_not_reported_may_be_counted_too_long():
    """The address of `a` is allocated again after the peak, without a free."""
    recorded = trace(
        "start 1000 w",
        "alloc 600 a",
        "alloc 100 b",
        counters=[read(moment, None, Counter.SEEN) for moment in Moment],
    )
    recorded.events.address[1] = recorded.events.address[0]
    found = accounts(recorded, 0)
    assert [one.causes for one in found] == [(), ((Cause.STILL_COUNTED, -600),), ()]
    assert account_line(found).text == (
        "counts up to 600 B too much at the peak (600 B perhaps freed earlier, without a report)"
    )


def test_a_simulation_and_an_old_recording_have_no_percentage():
    assert line(read(PEAK, None, Counter.SIMULATED)).level == "simulated"
    assert line().level == "not_recorded"
