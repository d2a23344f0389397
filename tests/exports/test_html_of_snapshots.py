"""The report's own figures, read back out of the page, against a plain loop over a snapshot's raw entries."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from tb_memplugin.exports.html import Division, page_with, report_data
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace.tables import MODULE_MARK, NOT_NAMED
from tests.exports.test_html import steps, unpacked
from tests.snapshots import block, entries, segment, snapshot

MODULES = ["", "net", "net.a", "net.b", "head"]
SLOTS = range(0x1000, 0x1000 + 512 * 24, 512)


def recorded(rng, count):
    """A device's snapshot of which the first entries are lost, each alloc marked with a module."""
    live: dict[int, int] = {}
    lines: list[str] = []
    marks: list[str] = []
    for _ in range(count):
        free = [slot for slot in SLOTS if slot not in live]
        if free and rng.random() < 0.6:
            slot = rng.choice(free)
            live[slot] = rng.randint(1, 512)
            lines.append(f"alloc {slot} {live[slot]}")
        elif live:
            slot = rng.choice(list(live))
            lines += [f"{action} {slot} {live[slot]}" for action in ("free_requested", "free_completed")]
            del live[slot]
        marks += [rng.choice(["", "a note", *(MODULE_MARK + key for key in MODULES)])] * (
            len(lines) - len(marks)
        )
    written = entries(*lines)
    for entry, mark in zip(written, marks, strict=True):
        entry["user_metadata"] = mark
    blocks = [
        block(slot, live.get(slot, 0), "active_allocated" if slot in live else "inactive") for slot in SLOTS
    ]
    return snapshot([segment(*blocks, total=512 * 24)], written[rng.randrange(len(written)) :])


def levels(content):
    """Live bytes of each module before the first entry and after each, by dictionaries alone."""
    (trace,) = content["device_traces"]
    alive = {
        one["address"]: one["requested_size"]
        for one in content["segments"][0]["blocks"]
        if one["requested_size"]
    }
    for entry in reversed(trace):
        if entry["action"] == "alloc":
            del alive[entry["addr"]]
        elif entry["action"] == "free_completed":
            alive[entry["addr"]] = entry["size"]
    owner = dict.fromkeys(alive, NOT_NAMED)
    found = [Counter({NOT_NAMED: sum(alive.values())})]
    for entry in trace:
        now = Counter(found[-1])
        if entry["action"] == "alloc":
            mark = entry["user_metadata"]
            is_module = mark.startswith(MODULE_MARK)
            owner[entry["addr"]] = mark.removeprefix(MODULE_MARK) if is_module else NOT_NAMED
            now[owner[entry["addr"]]] += entry["size"]
        elif entry["action"] == "free_completed":
            now[owner.pop(entry["addr"])] -= entry["size"]
        found.append(now)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_page_tells_each_modules_bytes_after_every_entry(seed):
    content = recorded(random.Random(seed), 60)
    page = page_with(report_data(trace_from_snapshot(content, "x"), [Division("module", "Module")], "t"))
    (told,) = re.findall(r'id="report-data">(.*?)</script>', page)
    (device,) = json.loads(told)["devices"]
    (division,) = device["divisions"]
    truth = levels(content)
    level = Counter(dict(zip(division["keys"], division["start"], strict=True)))
    changes = dict.fromkeys(range(len(truth) - 1), ("", 0))
    columns = (steps(device["event"]), unpacked(division["code"]), unpacked(device["change"]))
    changes |= {event: (division["keys"][code], change) for event, code, change in zip(*columns, strict=True)}
    assert +level == +truth[0]
    for event, (key, change) in sorted(changes.items()):
        level[key] += change
        assert +level == +truth[event + 1]
    highest = max(sum(one.values()) for one in truth)
    assert (device["peak"]["bytes"], device["start_bytes"]) == (highest, sum(truth[0].values()))
    parts = {key: size for key, size, _ in division["peak"]}
    assert parts == +truth[device["peak"]["event"] + 1]
