"""The HTML report: one file, its data exact, and nothing in it that a name could break out of."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis import advice
from tb_memplugin.analysis.divisions import ALL_DIVISIONS
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.analysis.steps import HighestStep, highest_step
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import html
from tb_memplugin.exports.html import (
    OTHERS,
    SHOWN_KEYS,
    Division,
    Plot,
    pack,
    pack_steps,
    page_with,
    report_data,
)
from tb_memplugin.trace import MemoryTrace, Note
from tests.analysis.histories import allocator_trace
from tests.traces import trace

SMALL = trace(
    "start 400 w category=parameter module=net",
    "start 11 v device=cuda:0",
    "alloc 100 a category=activation module=net.a phase=forward",
    "alloc 60 b category=gradient module=net.b phase=backward",
    "alloc 5 c device=cuda:0 reserved=2048",
    "free a phase=backward",
    "free c reserved=1024",
)
CATEGORY = Division("category", "Category")
HOSTILE = '</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>&amp;\u2028"'


def unpacked(column):
    """Integers from byte planes, as the page reads them."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(column["data"])), np.uint8)
    planes = planes.reshape(column["width"], column["count"]).astype(object)
    planes[-1] = np.where(planes[-1] > 127, planes[-1] - 256, planes[-1])
    return [int(value) for value in sum(plane * 256**place for place, plane in enumerate(planes))]


def steps(column):
    return np.cumsum(unpacked(column)).tolist()


def test_the_page_says_what_advice_says():
    lines = [
        line
        for step in range(4)
        for line in (
            f"step {step}",
            f"alloc 100 loss{step} module={{}} operator=add",
            f"alloc 8 x{step} device=cuda:0",
        )
    ]
    growing = trace("start 70 w", *(line.format("<b>&") for line in lines))
    cpu, cuda = report_data(growing, [CATEGORY], "t")["devices"]
    judged = advice(growing)
    for device, name in ((cpu, "cpu"), (cuda, "cuda:0")):
        found = [finding for finding in judged.findings if finding.device == name]
        shown = [
            {key: one[key] for key in ("kind", "title", "bytes")} for one in device["advice"]["findings"]
        ]
        assert shown == [{"kind": one.kind, "title": one.title, "bytes": one.bytes} for one in found]
    (finding,) = (one for one in cpu["advice"]["findings"] if one["kind"] == "growth")
    assert (finding["bytes"], finding["subject"], finding["level"]) == (100, "<b>& · add", "problem")
    assert cpu["advice"]["heading"].startswith("1 problem, no options; ")
    page = page_with(report_data(growing, [CATEGORY], "t"))
    assert "<b>&" not in page


def test_each_device_is_judged_once(monkeypatch):
    history = trace(*(f"alloc {9 + number} a device=cuda:{number}" for number in range(5)))
    judged: list[int] = []

    def counted(of: MemoryTrace, device: int) -> HighestStep:
        judged.append(device)
        return highest_step(of, device)

    monkeypatch.setattr("tb_memplugin.analysis.block_origins.highest_step", counted)
    report_data(history, [CATEGORY], "t")
    per_device = Counter(judged)
    assert set(per_device) == set(range(5))
    judged.clear()
    advice(history)
    assert Counter(judged) == per_device


@pytest.mark.parametrize(
    "values",
    [[], [0], [127, -128], [128], [-129, 5], [2**31, -(2**31)], [2**62, -(2**63), 2**63 - 1], [255] * 5],
    ids=str,
)
def test_packed_integers_come_back(values):
    assert unpacked(pack(values)) == values if values else pack(values)["count"] == 0


def test_packed_steps_come_back():
    assert steps(pack_steps([5, 5, 1000, -3])) == [5, 5, 1000, -3]


@pytest.mark.parametrize("by", ALL_DIVISIONS)
def test_every_division_sums_to_the_live_bytes_after_each_event(by):
    for row, device in enumerate(report_data(SMALL, [Division(by, by)], "t")["devices"]):
        (division,) = device["divisions"]
        level = list(division["start"])
        assert sum(level) == device["start_bytes"] == SMALL.live(row)[0]
        columns = (steps(device["event"]), unpacked(device["change"]), unpacked(division["code"]))
        for event, change, code in zip(*columns, strict=True):
            level[code] += change
            assert sum(level) == SMALL.live(row)[event + 1]
        parts = sum(bytes_ for _, bytes_, _ in division["peak"])
        assert parts == device["peak"]["bytes"] == SMALL.live(row).max()


def test_the_peak_and_the_reserve_are_told():
    cpu, cuda = report_data(SMALL, [CATEGORY], "t")["devices"]
    assert (cpu["peak"]["bytes"], cpu["peak"]["event"], cpu["reserved"]) == (560, 1, None)
    assert cpu["divisions"][0]["peak"] == [["parameter", 400, 1], ["activation", 100, 1], ["gradient", 60, 1]]
    assert cuda["reserved"]["start_bytes"] == 2048
    assert (steps(cuda["reserved"]["event"]), steps(cuda["reserved"]["bytes"])) == ([4], [1024])


def test_failed_requests_are_told_on_their_own_device():
    history = allocator_trace("alloc 16M 8", "alloc 32M 8 device=1", "oom 3M 90M device=1")
    first, second = report_data(history, [CATEGORY], "t")["devices"]
    assert (first["failed"], second["failed"]) == ([], [[2, 2000, 90 << 20]])


def test_many_keys_share_one_exact_band():
    many = trace(*(f"alloc {n} a{n} module=m{n}" for n in range(1, 31)))
    (device,) = report_data(many, [Division("module", "Module")], "t")["devices"]
    keys = device["divisions"][0]["keys"]
    assert keys == [*(f"m{n}" for n in range(30, 30 - SHOWN_KEYS, -1)), OTHERS]
    code = unpacked(device["divisions"][0]["code"])
    others = sum(
        change for change, at in zip(unpacked(device["change"]), code, strict=True) if at == SHOWN_KEYS
    )
    assert others == sum(range(1, 31 - SHOWN_KEYS))


def test_a_key_that_is_large_before_the_peak_has_a_band_of_its_own():
    early = trace(
        "alloc 500 a module=early", "free a", *(f"alloc {60 + n} b{n} module=m{n}" for n in range(20))
    )
    (device,) = report_data(early, [Division("module", "Module")], "t")["devices"]
    assert device["divisions"][0]["keys"][0] == "early"


def test_rules_divide_too():
    ruled = replace(
        SMALL,
        stacks=(("forward a.py:1",),),
        events=replace(SMALL.events, stack=np.array([0, -1, -1, 0, -1], np.int32)),
    )
    division = Division(read_rules(["Forward=forward"]), "Rules")
    cpu, _ = report_data(ruled, [division], "t")["devices"]
    assert cpu["divisions"][0]["peak"] == [["unknown", 460, 2], ["Forward", 100, 1]]


def test_what_no_time_is_known_of_is_shown_by_events():
    assert report_data(SMALL, [CATEGORY], "t")["timed"] is True
    untimed = replace(SMALL, events=replace(SMALL.events, time_ns=np.array([0, 1000, 0, 2000, 1000])))
    assert report_data(untimed, [CATEGORY], "t")["timed"] is False


def test_times_of_every_device_count_from_the_start_of_the_step():
    cpu, cuda = report_data(trace("alloc 1 a", "free a", "alloc 5 c device=cuda:0"), [CATEGORY], "t")[
        "devices"
    ]
    assert (cpu["peak"]["time_ns"], cuda["peak"]["time_ns"]) == (500, 2_500)
    for device in (cpu, cuda):
        assert device["lanes"] == {
            "t0": 0,
            "t1": 3_000,
            "steps": [],
            "phases": [],
            "modules": [],
            "omitted": 0,
        }


def written(tmp_path, report, title="t"):
    html.write(report, tmp_path / "out.html", [CATEGORY, Division("module", "Module")], title)
    return (tmp_path / "out.html").read_text("utf-8")


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_page_is_one_file_that_names_no_other(tmp_path):
    page = written(tmp_path, SMALL)
    head, _, rest = page.partition("<body>")
    assert "default-src 'none'" in head
    assert not re.search(r"<(link|img|iframe)|\ssrc=", head + rest.partition("report-data")[0])
    assert page.count("<script") == page.count("</script>") == 2
    assert data_of(page)["devices"][0]["peak"]["bytes"] == 560


def test_only_the_pages_own_program_may_run(tmp_path):
    page = written(tmp_path, SMALL)
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in page


def test_hostile_names_stay_text(tmp_path):
    hostile = replace(SMALL, notes=(Note(HOSTILE),), properties={HOSTILE: HOSTILE}, source=HOSTILE)
    page = written(tmp_path, hostile, title=HOSTILE)
    assert "alert(1)</script>" not in page
    assert "<img src=x" not in page
    assert page.count("<script") == 2
    assert data_of(page)["notes"] == [HOSTILE]


def test_without_the_bundle_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "SCRIPT", tmp_path / "report.js")
    with pytest.raises(MemPluginError, match="not built") as told:
        written(tmp_path, SMALL)
    assert "make bundle" in told.value.fix
    assert not (tmp_path / "out.html").exists()


def test_a_long_recording_is_a_small_file(tmp_path):
    lines = [line for n in range(20_000) for line in (f"alloc {512 * (n % 9 + 1)} a{n}", f"free a{n}")]
    page = written(tmp_path, trace(*lines))
    assert len(page) < 70_000 + 8 * 40_000


HISTORY = (
    "start 400 w category=parameter",
    *("alloc 100 a category=activation", "alloc 60 b category=gradient", "free b"),
    *("alloc 7 c category=temporary", "free c", "alloc 50 d category=gradient", "free a"),
)
"""Live bytes before and after each event: 400, 500, 560, 500, 507, 500, 550, 450."""


def levels(plot, by="category"):
    """The level after each event that changes it, and the start; and the page's whole document."""
    document = report_data(trace(*HISTORY), [Division(by, by)], "t", plot)
    (device,) = document["devices"]
    level, after = device["start_bytes"], {}
    for event, change in zip(steps(device["event"]), unpacked(device["change"]), strict=True):
        level = after[event] = level + change
    assert sum(device["divisions"][0]["start"]) == device["start_bytes"]
    assert sum(size for _, size, _ in device["divisions"][0]["peak"]) == device["peak"]["bytes"]
    assert level == device["end_bytes"]
    return device["start_bytes"], after, document


def test_a_range_begins_with_what_was_alive_and_has_a_peak_of_its_own():
    start, after, document = levels(Plot(first=2, last=4))
    assert (start, after) == (560, {2: 500, 3: 507, 4: 500})
    assert document["devices"][0]["peak"]["bytes"] == 560
    assert document["devices"][0]["peak"]["event"] == 1
    assert (document["first_event"], document["events"]) == (2, 5)
    assert document["notes"][0] == "This page shows only: events 2 to 4 of 7."


def test_samples_have_the_true_level_and_the_peak_is_one_of_them():
    start, after, _ = levels(Plot(sampling_rate=3))
    assert (start, after) == (400, {1: 560, 2: 500, 5: 550, 6: 450})


def test_freed_blocks_are_left_out():
    start, after, document = levels(Plot(filter_freed=True))
    assert (start, after) == (400, {5: 450})
    assert document["devices"][0]["divisions"][0]["peak"] == [["parameter", 400, 1], ["gradient", 50, 1]]


def test_parts_in_the_order_of_their_first_allocation():
    history = ("alloc 10 a module=late", "alloc 500 b module=large", "alloc 90 c module=last")
    for plot, keys in (
        (Plot(), ["large", "last", "late"]),
        (Plot(allocation_order=True), ["late", "large", "last"]),
    ):
        (device,) = report_data(trace(*history), [Division("module", "Module")], "t", plot)["devices"]
        assert [key for key in device["divisions"][0]["keys"] if key in keys] == keys


@pytest.mark.parametrize("wrong", [{"sampling_rate": 0}, {"first": 5, "last": 3}, {"first": -1}])
def test_a_plot_of_nothing_is_refused(wrong):
    with pytest.raises(MemPluginError):
        Plot(**wrong)
