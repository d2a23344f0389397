"""What a window's blocks were is known in the next window, if they are the same blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import profile, schedule

from tb_memplugin import load, memory_trace_handler
from tb_memplugin.trace import Category, MemoryTrace

ROWS = 100_003
"""How many rows a step's result has: as no other tensor of the process, and above what is carried at all."""


@pytest.fixture
def windows(tmp_path):
    """Two windows of one step with a step between them; each step makes what `step` returns, and keeps it."""

    def record(step) -> tuple[MemoryTrace, MemoryTrace]:
        model = nn.Linear(8, 1)
        handler = memory_trace_handler(tmp_path, "worker", model=model)
        plan = schedule(wait=1, warmup=0, active=1, repeat=2)
        kept: list[torch.Tensor] = []
        with profile(profile_memory=True, schedule=plan, on_trace_ready=handler) as prof:
            for number in range(4):
                step(number, model, kept)
                prof.step()
        first, second = sorted(tmp_path.rglob("window-*.mem"))
        return load(first), load(second)

    return record


def of_size(trace: MemoryTrace, size: int) -> list[tuple[Category, str]]:
    start = trace.start
    return [
        (Category(category), trace.modules[module].key)
        for category, module, held in zip(start.category, start.module, start.bytes, strict=True)
        if held == size
    ]


def test_a_block_that_stays_is_in_the_next_window_what_it_was(windows):
    def step(number, model, kept):
        rows = torch.ones(ROWS, 8)
        with torch.no_grad():
            result = model(rows)
        if number == 1:  # the first window
            kept.append(result)

    _, second = windows(step)
    assert of_size(second, ROWS * 4) == [(Category.ACTIVATION, "")]


def test_a_block_of_the_step_between_is_not_taken_for_that_of_the_window(windows):
    """Each step's result takes the place of the one before, often at its address."""

    def step(_, model, kept):
        kept.clear()
        with torch.no_grad():
            kept.append(model(torch.ones(ROWS, 8)))

    _, second = windows(step)
    assert [category for category, _ in of_size(second, ROWS * 4)] == [Category.UNKNOWN]


def unreached(trace: MemoryTrace) -> list[int | None]:
    return [note.bytes for note in trace.notes if note.code == "unreached"]


class Keeps(nn.Module):
    """Keeps what it makes where, once it is scripted, only C++ code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.zeros(1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.made = rows + 1
        return rows


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("is_read", [False, True])
def test_what_only_c_plus_plus_code_holds_is_told_by_its_bytes_until_python_has_it(windows, is_read):
    keeps = torch.jit.script(Keeps())

    def step(number, model, kept):
        model(torch.ones(1, 8))
        if number == 1:  # the first window
            keeps(torch.ones(ROWS))
        if number == 2 and is_read:  # between the windows
            kept.append(keeps.made)

    first, second = windows(step)
    assert unreached(first) == []
    assert unreached(second) == ([] if is_read else [ROWS * 4])
    assert len(of_size(second, ROWS * 4)) == is_read
