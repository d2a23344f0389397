"""What counting the calls of the CPU's allocator costs: an allocation and its free, and a training step.

Counting stays on once it has begun, so each round is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.figures import Figure

ROUNDS = 5

PAIR = """
import time, torch
{begin}
def pairs(count):
    begin = time.perf_counter_ns()
    for _ in range(count): torch.empty(1000)
    return (time.perf_counter_ns() - begin) / count
pairs(20_000)
print(min(pairs(20_000) for _ in range(20)))
"""

STEP = """
import time, torch
{begin}
torch.set_num_threads(1)
model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(8, 32, 64)
def step():
    begin = time.perf_counter_ns()
    model(data).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    return (time.perf_counter_ns() - begin) / 1e6
for _ in range(20): step()
print(sorted(step() for _ in range(200))[100])
"""

BEGIN = "from tb_memplugin.record.exact_cpu.counting import start_counting; start_counting()"


def measure() -> list[Figure]:
    """Measure nanoseconds per allocated and freed tensor, and milliseconds per training step."""
    return [_figure(PAIR, "a tensor allocated and freed", "ns"), _figure(STEP, "a training step", "ms")]


def _figure(program: str, what: str, unit: str) -> Figure:
    counted: list[float] = []
    plain: list[float] = []
    for _ in range(ROUNDS):
        counted.append(_run(program.format(begin=BEGIN)))
        plain.append(_run(program.format(begin="")))
    return Figure(f"exact_cpu: {what}", unit, counted, None, plain, "not counting")


def _run(program: str) -> float:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(ran.stdout)
