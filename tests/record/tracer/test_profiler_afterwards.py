"""What torch.profiler and our handler tell in a process that traced before is what a fresh one tells.

While a profiler listens, torch notes the sizes of blocks; the tracer listens during operators. What is left
of that moves the profiler's `Total Allocated` from its first event on, as an earlier session of it does, and
now and then it reports the free of an older block with a size that an earlier one had there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import itertools, json, sys
from pathlib import Path
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tb_memplugin import MemoryTracer, memory_trace_handler
from tb_memplugin.store.reader import load_window

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters())

def step():
    loss = model(torch.ones(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

step()
if sys.argv[1] == "traced":
    with MemoryTracer().trace(model, optimizer):
        step()
        step()
for _ in range(5):
    step()  # what the tracer's operators allocated goes, while nobody listens
folder = Path(sys.argv[2])
handler = memory_trace_handler(folder, "w", model=model, optimizer=optimizer)
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
    step()
    step()
prof.export_chrome_trace(str(folder / "trace.json"))
handler(prof)
found = json.loads((folder / "trace.json").read_text())["traceEvents"]
memory = sorted((e for e in found if e["name"] == "[memory]"), key=lambda e: e["ts"])
window = load_window(str(next(folder.rglob("*.mem"))))
print(json.dumps({
    "bytes": [e["args"]["Bytes"] for e in memory],
    "total": [e["args"]["Total Allocated"] for e in memory],
    "levels": [level for level, _ in itertools.groupby(window.live(0).tolist())],
    "notes": [str(note) for note in window.notes],
}))
"""


def told(how: str, folder: Path) -> dict:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, how, str(folder)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert not list(folder.glob("tmp*"))  # the prefix of temporary folders
    found: dict = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict, dict]:
    return told("fresh", tmp_path_factory.mktemp("fresh")), told("traced", tmp_path_factory.mktemp("traced"))


def allocated(found: dict) -> list[int]:
    return [size for size in found["bytes"] if size > 0]


def test_torchs_allocations_are_the_same(both):
    fresh, traced = both
    assert allocated(traced) == allocated(fresh)


def test_frees_of_older_blocks_move_torchs_total_and_no_figure_of_ours(both):
    """They are gradients of the step before, which the start state has with their true sizes."""
    fresh, traced = both
    older = len(traced["bytes"]) - len(fresh["bytes"])
    stale = sum(fresh["bytes"]) - sum(traced["bytes"])
    assert older >= 0
    assert (stale == 0) == (older == 0)
    assert traced["notes"] == fresh["notes"]
    totals = [
        [total for total, size in zip(one["total"], one["bytes"], strict=True) if size > 0] for one in both
    ]
    assert len({after - before for before, after in zip(*totals, strict=True)}) <= older + 1


def test_our_curve_is_the_same_to_the_byte(both):
    fresh, traced = both
    assert traced["levels"] == fresh["levels"]
