"""What torch.profiler and our handler tell in a process that traced before is what a fresh one tells.

While a profiler listens, torch notes the sizes of blocks; the tracer listens during operators. What is left
of that moves the profiler's `Total Allocated` by one number, from its first event on, as an earlier session
of torch.profiler does; nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys, tempfile
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
folder = Path(tempfile.mkdtemp())
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
    "operators": sorted((one.key, one.self_cpu_memory_usage) for one in prof.key_averages()),
    "levels": window.window(0).tolist(),
    "notes": [str(note) for note in window.notes],
}))
"""


def told(how: str) -> dict:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    found: dict = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def both() -> tuple[dict, dict]:
    return told("fresh"), told("traced")


def test_torchs_events_and_sums_by_operator_are_the_same(both):
    fresh, traced = both
    assert traced["bytes"] == fresh["bytes"]
    assert traced["operators"] == fresh["operators"]


def test_torchs_total_is_moved_by_one_number(both):
    fresh, traced = both
    moved = {after - before for before, after in zip(fresh["total"], traced["total"], strict=True)}
    assert len(moved) == 1


def test_our_curve_is_the_same_to_the_byte(both):
    fresh, traced = both
    assert traced["levels"] == fresh["levels"]
    assert traced["notes"] == fresh["notes"]
