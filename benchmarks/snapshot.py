"""The CPU time to analyse snapshots, compared with a bare `pickle.load` of them."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from tb_memplugin.analysis.comparison import compare
from tb_memplugin.analysis.curves import curve
from tb_memplugin.analysis.moments import peak
from tb_memplugin.analysis.stacks import stack_table
from tb_memplugin.loading import load
from tb_memplugin.read.snapshot.safe_pickle import read_pickle
from tb_memplugin.trace import MemoryTrace

EVENTS, STACKS, DEPTH, FRAMES = 1_000_000, 400, 30, 900
FEW = 24_000
ROUNDS = 5
STRANGERS = Path(__file__).parents[2] / "shared" / "data" / "snapshots"
SHARE = 20
"""The loop that copies sums is timed on 1/SHARE of the events and scaled up: its time is proportional."""


def measure() -> list[Figure]:
    """Measure loading and analysis, a comparison, and a profile by category, each with its peer or goal."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        for what, goal, content in _inputs():
            path.write_bytes(pickle.dumps(content, protocol=4))
            del content
            figures.append(_beside_pickle(path, f"{what}: load, peak, stacks, categories", goal))
            if what.startswith(f"{FEW:,}"):
                figures.append(_command(path, what))
        path.write_bytes(pickle.dumps(synthetic(), protocol=4))
        base, other = load(path), load(path)
    difference, profile, loop = [], [], []
    for _ in range(ROUNDS):
        difference.append(_lap(partial(compare, base, other, by="stack")))
        profile.append(_lap(partial(_profile, base)))
        loop.append(_lap(partial(_loop, base)) * SHARE)
    return [
        *figures,
        Figure("1M events each: compare two by stack", "ms", difference, 1000),
        Figure("1M events: profile by category", "ms", profile, 0.1, loop, "a loop that copies sums"),
    ]


def _inputs() -> Iterator[tuple[str, float, object]]:
    """Yield snapshots of several shapes, each with its goal. A stranger's is one where there is one."""
    yield "1M events, stacks of their own", 0.55, synthetic()
    yield "1M events, lists shared as by PyTorch", 0.55, synthetic(shares=True)
    yield f"{FEW:,} events, lists shared as by PyTorch", 1.5, synthetic(FEW, shares=True)
    for path in sorted(STRANGERS.glob("07_*")):
        content = read_pickle(path.read_bytes(), path.name)[0]
        yield "20,128 events of a stranger's training", 1.5, content
        yield "the same, repeated to 1M events", 0.55, _repeated(content)


def _repeated(content: Any) -> Any:
    """Return a snapshot whose entries are repeated as PyTorch would write them: only frames are shared."""
    written = content["device_traces"][0]
    lasts = written[-1]["time_us"] - written[0]["time_us"] + 1
    entries: list[dict[str, Any]] = []
    for tile in range(-(-EVENTS // len(written))):
        lists: dict[int, list[Any]] = {}
        for entry in written:
            frames = lists.setdefault(id(entry["frames"]), list(entry["frames"]))
            entries.append({**entry, "time_us": entry["time_us"] + tile * lasts, "frames": frames})
    return {**content, "device_traces": [entries[:EVENTS]]}


def _beside_pickle(path: Path, what: str, goal: float) -> Figure:
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare.append(_lap(partial(_bare, path)))
        ours.append(_lap(partial(_analyse, path)))
    return Figure(what, "ms", ours, goal, bare, "pickle.load")


def _command(path: Path, what: str) -> Figure:
    """Measure `tb-memplugin peak` from its start to its end, beside a process that only loads the file."""
    load_alone = "import sys; from tb_memplugin.loading import load; load(sys.argv[1])"
    cache = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(path.parent / "pycache")}
    environment = {**os.environ, **cache}  # modules are compiled once, as where we are installed
    laps = []
    for _ in range(3 * ROUNDS):
        whole = _child_lap((sys.executable, "-m", "tb_memplugin", "peak", str(path)), environment)
        laps.append(whole - _child_lap((sys.executable, "-c", load_alone, str(path)), environment))
    return Figure(f"{what}: the command peak, above loading", "ms", laps, 30)


def _child_lap(command: Sequence[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def _bare(path: Path) -> object:
    with path.open("rb") as stream:
        return pickle.load(stream)  # noqa: S301  # made above


def _analyse(path: Path) -> object:
    trace = load(path)
    top = peak(trace)
    return stack_table(trace, 0, top.event), top.parts("category")


def _profile(trace: MemoryTrace) -> object:
    return curve(trace, 0, int(trace.events.time_ns[0]), int(trace.events.time_ns[-1]), 1000)


def _loop(trace: MemoryTrace) -> object:
    """Copy the sums at every event, as earlier tools did, for 1/SHARE of the events."""
    sums: Counter[int] = Counter()
    live: dict[int, tuple[int, int]] = {}
    copies = []
    part = slice(0, len(trace.events) // SHARE)
    columns = (trace.events.kind, trace.events.address, trace.events.bytes, trace.events.category)
    for kind, address, size, category in zip(*(column[part].tolist() for column in columns), strict=True):
        if kind == 0:
            live[address] = (category, size)
            sums[category] += size
        elif address in live:
            category, size = live.pop(address)
            sums[category] -= size
        copies.append(sums.copy())
    return copies


def _lap(call: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1e3


def synthetic(events: int = EVENTS, *, shares: bool = False) -> dict[str, Any]:
    """Return a snapshot as PyTorch 2.10 writes it: lists of shared frames.

    Args:
        events: about how many entries it has.
        shares: whether the two entries of a free share their list, and each entry has its own text, as in
            files that PyTorch wrote. Else each entry has a list of its own.
    """
    random = np.random.default_rng(0)
    frames = [
        {"name": f"function_{row}", "filename": f"/site-packages/torch/nn/part_{row % 50}.py", "line": row}
        for row in range(FRAMES)
    ]
    stacks = random.integers(0, FRAMES, (STACKS, DEPTH)).tolist()
    entries: list[dict[str, Any]] = []
    live: list[tuple[int, int, int]] = []
    for row in range(events // 3):
        stack, size = int(random.integers(STACKS)), 512 * int(random.integers(1, 4096))
        block = ((1 << 40) + row * (1 << 22), size, stack)
        live.append(block)
        entries.append(_entry("alloc", block, len(entries), frames, stacks))
        if len(live) > 1000:
            gone = live.pop(int(random.integers(len(live))))
            entries.append(_entry("free_requested", gone, len(entries), frames, stacks))
            entries.append(_entry("free_completed", gone, len(entries), frames, stacks))
            if shares:
                entries[-1]["frames"] = entries[-2]["frames"]
    if shares:
        for entry in entries:
            entry["compile_context"] = "".join(["N", "/", "A"])
    return {"segments": [_segment(block) for block in live], "device_traces": [entries]}


def _entry(
    action: str, block: tuple[int, int, int], row: int, frames: list[Any], stacks: list[list[int]]
) -> dict[str, Any]:
    address, size, stack = block
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1_700_000_000_000_000 + 7 * row,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": [frames[frame] for frame in stacks[stack]],
    }


def _segment(block: tuple[int, int, int]) -> dict[str, Any]:
    address, size, _ = block
    held = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": [],
    }
    return {
        "device": 0,
        "address": address,
        "total_size": 1 << 22,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [held],
    }
