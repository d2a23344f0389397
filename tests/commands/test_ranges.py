"""`--start`, `--end`, `--until`: a part of a recording, with 300, 390, 390 and 300 bytes after its events."""

from __future__ import annotations

import pytest

from tb_memplugin import load
from tb_memplugin.analysis import events_between, peak
from tb_memplugin.coming_from import mosaic
from tb_memplugin.errors import NotRecordedError
from tests.commands.files import refused, run, step_snapshot, told, write

START_US = 1_000_000
"""When the first event happened; the others follow 250 µs apart."""


@pytest.fixture
def step(tmp_path):
    content = step_snapshot()
    for number, entry in enumerate(content["device_traces"][0]):
        entry["time_us"] = START_US + 250 * number
    return write(tmp_path / "step.pickle", content)


def peak_of(path, *options):
    (device,) = told("peak", path, *options)["devices"]
    return [device[field] for field in ("peak_bytes", "peak_event", "start_bytes", "end_bytes")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--end", START_US), [300, 0, 0, 300]),
        (("--end", START_US + 249), [300, 0, 0, 300]),
        (("--end", "0.00025s"), [390, 1, 0, 390]),
        (("--start", START_US + 500), [390, 1, 390, 300]),  # the moment before the first event counts
        (("--start", START_US + 750, "--end", "0.00075s"), [390, 2, 390, 300]),
        (("--until", "0x1000"), [300, 0, 0, 300]),
        (("--until", "1200_0", "--action", "alloc"), [390, 1, 0, 390]),
        (("--until", "1200_0", "--action", "free", "--start", "0.0004s"), [390, 1, 390, 300]),
    ],
)
def test_the_peak_of_a_range(step, options, expected):
    assert peak_of(step, *options) == expected


def test_the_parts_are_those_of_that_moment(step):
    shown = run("peak", step, "--end", START_US, "--by", "line").stdout
    assert "model.py:7" in shown
    assert "optim.py:3" not in shown
    assert "start of the range" in shown


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--start", START_US + 751), "Nothing was recorded in this range"),
        (("--end", START_US - 1), "from 1000000 to 1000750 microseconds"),
        (("--start", START_US + 500, "--end", START_US + 100), "Nothing was recorded"),
        (("--start", "soon"), "'soon' is not a time"),
        (("--until", "0x1000", "--start", START_US + 100), "before the start of the range"),
        (("--until", "0x9999"), "no allocation 0x9999_0"),
        (("--end", START_US, "--step", 0), "in all of its steps"),
    ],
)
def test_a_range_of_nothing(step, options, why):
    assert why in refused("peak", step, *options)


def test_a_page_of_a_range(step, tmp_path):
    page = tmp_path / "page.html"
    done = run("profile", step, "--by", "categories", "--end", START_US, "--filter-freed", "-o", page)
    assert done.exit_code == 0
    assert "events 0 to 0 of 4; blocks that were not freed by the last event" in page.read_text("utf-8")


def test_the_same_in_python(step):
    trace = load(step)
    assert peak(trace, within=events_between(trace, None, START_US * 1000)).bytes == 300
    assert peak(trace, within=(3, 3)).bytes == 390
    with pytest.raises(NotRecordedError):
        events_between(trace, (START_US + 751) * 1000, None)


def test_a_recording_without_times_has_no_range_of_times(tmp_path):
    content = step_snapshot()
    for entry in content["device_traces"][0]:
        entry.pop("time_us", None)
    path = write(tmp_path / "old.pickle", content)
    assert "has no times" in refused("peak", path, "--start", "0s")
    assert peak_of(path, "--until", "0x1000") == [300, 0, 0, 300]
    with pytest.raises(NotRecordedError, match="no times"):
        mosaic.get_memory_usage_peak(path, end_time=5)
