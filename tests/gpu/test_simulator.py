"""The simulator beside PyTorch's own allocator: the same addresses, and the same reserved memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin import load
from tb_memplugin.simulator import AllocatorSettings, replay
from tb_memplugin.trace import MemoryTrace
from tests.simulator.devices import reserved_misses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]

DEFAULTS = (
    "max_split_size_mb:1048576,roundup_power2_divisions:1,expandable_segments:False,"
    "garbage_collection_threshold:0.999"
)
SETTINGS = ("", "max_split_size_mb:32", "roundup_power2_divisions:4")
COLLECTS = "garbage_collection_threshold:0.01"
"""Frees unused memory above 1 % of the device, once the process is limited to a share of it."""


def train() -> None:
    """Train on batches of several sizes, so that memory fragments; empty the cache once."""
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (1000, 3200, 600, 2100, 4800, 1500):
        model(torch.zeros(rows, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rows == 600:
            torch.cuda.empty_cache()


def request_at_random(chance: random.Random | None = None, tensors: list[torch.Tensor] | None = None) -> None:
    """Make 1,000 requests of any size on three streams, and free them and `tensors` in any order."""
    chance, live = chance or random.Random(7), [] if tensors is None else tensors
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(2000):
        if chance.random() < len(live) / 120:
            live.pop(chance.randrange(len(live)))
        else:
            size = chance.randint(1, chance.choice((5_000, 1 << 20, 12 << 20, 90 << 20)))
            with torch.cuda.stream(chance.choice(streams)):
                live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set PyTorch's allocator up for a test, with an empty cache, and back to its defaults."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if request.param:
        torch.cuda.memory._set_allocator_settings(request.param)
    yield request.param
    torch.cuda.memory._set_allocator_settings(DEFAULTS)


def recorded(folder: Path, program: Any = train) -> tuple[MemoryTrace, int]:
    """Record a program's memory; return the trace and the highest reserved bytes that PyTorch counted."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history("all", max_entries=1_000_000)
    try:
        program()
        torch.cuda.memory._dump_snapshot(str(folder / "recorded.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(None)
    return load(folder / "recorded.pickle"), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("settings", SETTINGS, indirect=True)
def test_every_address_is_pytorchs(settings: str, tmp_path: Path) -> None:
    trace, reserved = recorded(tmp_path)
    done = replay(trace, 0, AllocatorSettings.from_conf(settings), recorded=True)
    assert done.first_miss is None
    assert done.exact_addresses == done.allocs > 300
    assert (done.reserved_peak, reserved_misses(done)) == (reserved, [])


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, "expandable_segments:True", COLLECTS, f"max_split_size_mb:32,{COLLECTS}"],
    indirect=True,
)
def test_every_address_of_requests_at_random_is_pytorchs(settings: str, tmp_path: Path) -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)
    trace, reserved = recorded(tmp_path, request_at_random)
    done = replay(trace, 0, AllocatorSettings.from_conf(settings), recorded=True)
    assert done.first_miss is None
    assert done.exact_addresses == done.allocs > 900
    assert (done.reserved_peak, reserved_misses(done)) == (reserved, [])


@pytest.mark.parametrize("settings", [""], indirect=True)
def test_a_recording_that_begins_late_replays_too(settings: str, tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    train()
    trace, _ = recorded(tmp_path)
    done = replay(trace, 0)
    assert done.exact_addresses == done.allocs > 300
    del model


@pytest.mark.parametrize("settings", SETTINGS, indirect=True)
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_that_begins_between_requests_at_random_replays_too(
    settings: str, seed: int, tmp_path: Path
) -> None:
    """Rests that were too small for blocks of their own are where PyTorch has them."""
    chance, live = random.Random(seed), list[torch.Tensor]()
    request_at_random(chance, live)
    trace, _ = recorded(tmp_path, lambda: request_at_random(chance, live))
    done = replay(trace, 0, AllocatorSettings.from_conf(settings), recorded=True)
    assert len(trace.start) > 30
    assert done.exact_addresses == done.allocs > 900


@pytest.mark.parametrize("settings", SETTINGS[1:], indirect=True)
def test_what_other_settings_would_have_reserved_is_what_they_reserve(settings: str, tmp_path: Path) -> None:
    """The program is recorded with the settings; from that, the reserve with the defaults is predicted."""
    trace, _ = recorded(tmp_path)
    predicted = replay(trace, 0, AllocatorSettings(), recorded=False).reserved_peak
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(DEFAULTS)
    assert recorded(tmp_path)[1] == predicted
