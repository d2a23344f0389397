"""A small valid file of each kind that is read, damaged copies of it, and what must hold of what is read."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import zstandard

from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.moments import peak
from tb_memplugin.errors import MemPluginError
from tb_memplugin.loading import load
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.store.blob import check_summary
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.store.windows import write_window
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tb_memplugin.trace import MemoryTrace
from tests.mutations.damage import bytes_damaged, story_damaged, tree_damaged
from tests.mutations.own_formats import descriptions_damaged, event_file_damaged, side_file_damaged
from tests.mutations.stories import story
from tests.step_figures import figures
from tests.traces import EPOCH, trace

Content = dict[str, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file. `name` is its file name; `whole` and `damaged` return its bytes."""

    name: str
    whole: Callable[[Random], bytes]
    damaged: Callable[[Random], bytes]
    read: Callable[[Path], str]


def read_trace(path: Path) -> str:
    """Load a file as commands and the import do; return what does not hold."""
    return sums_wrong(load(path))


def sums_wrong(found: MemoryTrace) -> str:
    """Return which parts of a trace do not sum to the whole, or which peak is not its curve's; "" if none."""
    for device in range(len(found.devices)):
        top = peak(found, found.devices[device].name)
        if top.bytes != sum(part.bytes for part in top.parts("category")):
            return "categories do not sum to the peak"
        parts = breakdown(found, device, len(found.events) - 1, "module")
        if sum(part.bytes for part in parts) != int(found.live(device)[-1]):
            return "modules do not sum to the end"
    summaries = WindowSummaries(found, Window("w", "0", 1, "window-000001-00000000.mem"))
    for row in range(min(len(found.steps), 3)):
        try:
            check_summary(summaries.summary(row))
        except ValueError as error:
            return f"step {row}: {error}"
    write_window(io.BytesIO(), found)
    return ""


def read_events(path: Path) -> str:
    """Read the event file of a run; return what does not hold."""
    read = read_recordings(str(path.parent))
    for step in read.steps:
        for of in step.metadata.devices:
            if not 0 <= of.stats.end_bytes <= of.stats.peak_bytes:
                return "more is alive at the end than at the peak"
        try:
            summary = step.summary()
        except MemPluginError:
            continue
        for device in summary.devices:
            if sum(device.peak.by_category.bytes) != device.stats.peak_bytes:
                return "categories do not sum to the peak"
            highest = max(np.cumsum(device.curve.high, dtype=object), default=device.stats.peak_bytes)
            if highest != device.stats.peak_bytes:
                return "the peak is not its curve's"
    for watched in read.watched:
        steps = watched.figures.steps
        if len(steps) > 1 and not bool((np.diff(steps) > 0).all()):
            return "the numbers of steps do not increase"
        for one in watched.figures.devices:
            if len(one.peak) != len(steps):
                return "a device has other steps"
    return ""


def kineto() -> dict[str, Any]:
    """Three blocks of a step on two devices, with an operator around them."""
    rows = [(10, 1, 100, 100), (20, 2, 50, 150), (30, 1, -100, 50), (40, 2, -50, 0)]
    memory = [
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "ts": at,
            "pid": 1,
            "tid": 1,
            "args": {
                "Addr": address,
                "Bytes": size,
                "Total Allocated": total,
                "Total Reserved": 200,
                "Device Type": 1,
                "Device Id": 0,
                "Ev Idx": row,
            },
        }
        for row, (at, address, size, total) in enumerate(rows)
    ]
    ranges = [
        {"ph": "X", "cat": cat, "name": name, "ts": 5, "dur": 50, "pid": 1, "tid": 1, "args": {"Ev Idx": 9}}
        for cat, name in (("user_annotation", "ProfilerStep#3"), ("cpu_op", "aten::empty"))
    ]
    return {
        "schemaVersion": 1,
        "traceEvents": memory + ranges,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    }


def timeline() -> list[list[int]]:
    return [[-1, 1, 10, 0], [5, 2, 20, 3], [7, 3, 20, 3], [7, 3, -20, 4], [9, 4, -20, 4], [12, 2, 5, 7]]


def from_content(
    name: str,
    content: Callable[[Random], Content],
    pack: Callable[[Content], bytes],
    changed: Callable[[Any, Random], Content] = tree_damaged,
) -> FileKind:
    """A foreign file: half of its damaged copies have other bytes, half say something else."""

    def damaged(random: Random) -> bytes:
        if random.random() < 0.5:
            return bytes_damaged(pack(content(random)), random)
        return pack(changed(content(random), random))

    return FileKind(name, lambda random: pack(content(random)), damaged, read_trace)


def as_json(content: Content) -> bytes:
    return json.dumps(content, default=repr).encode()


def as_gzip(content: Content) -> bytes:
    return gzip.compress(as_json(content), 1, mtime=0)


def as_zstd(content: Content) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(as_json(content))


def as_zip(content: Content) -> bytes:
    """An archive as torch.save writes it: a pickle that is not compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", as_pickle(content))
    return stream.getvalue()


def as_pickle(content: Content) -> bytes:
    return pickle.dumps(content, protocol=len(content) % 2 * 2 + 2)


def snapshot_damaged(content: Any, random: Random) -> Content:
    return story_damaged(content, random) if random.random() < 0.5 else tree_damaged(content, random)


def side_file(random: Random) -> bytes:
    stream = io.BytesIO()
    write_window(stream, trace_from_snapshot(story(random), "x"))
    return stream.getvalue()


@cache
def windows_events() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(folder, "w")
        lines = ("step 5", "alloc 100 a module=layer", "free a", "step 6", "alloc 50 b")
        window = trace("start 400 w category=parameter module=layer", *lines)
        writer.write(window)
        return Path(writer.write(window).event_file).read_bytes()


@cache
def steps_events() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writer = StepsWriter(folder, "w", EPOCH)
        writer.write(figures([5, 9, 2], phases={"forward": [5, 0, 2]}, notes=["text"]))
        return Path(writer.write(figures([7, 8], first=3, phases={"forward": [1, 2]}))).read_bytes()


def event_files(
    whole: Callable[[], bytes], damaged: Callable[[bytes, Random], bytes] = event_file_damaged
) -> FileKind:
    name = "events.out.tfevents.1.tb_memplugin"
    return FileKind(name, lambda _: whole(), lambda random: damaged(whole(), random), read_events)


def own_kinds() -> Iterator[tuple[str, FileKind]]:
    """Yield the kinds of files that this package writes."""
    yield (
        "side file",
        FileKind(
            "window-000001-00000000.mem",
            side_file,
            lambda random: side_file_damaged(side_file(random), random),
            read_trace,
        ),
    )
    yield "event file of windows", event_files(windows_events)
    yield "event file of steps", event_files(steps_events)
    yield "protobuf", event_files(windows_events, descriptions_damaged)


KINDS: dict[str, FileKind] = {
    "snapshot pickle": from_content("a.pickle", story, as_pickle, snapshot_damaged),
    "snapshot json": from_content("a.json", story, as_json, snapshot_damaged),
    "kineto json": from_content("k.json", lambda _: kineto(), as_json),
    "kineto json.gz": from_content("k.json.gz", lambda _: kineto(), as_gzip),
    "zstd": from_content("k.json.zst", lambda _: kineto(), as_zstd),
    "zip": from_content("a.pt", story, as_zip, snapshot_damaged),
    "timeline": from_content("t.raw.json", lambda _: timeline(), as_json),
    **dict(own_kinds()),
}

NOT_READ = ("zstd",)
"""Kinds that are refused by their first bytes; what remains of a damaged one may still be readable."""
