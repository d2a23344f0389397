"""The numbers equal the profiler's own and the storages' own, to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import schedule

from tb_memplugin.analysis.divisions import DIVISIONS
from tb_memplugin.analysis.moments import moment
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.trace import Category, Kind, Phase
from tests.training import MODELS, Cycle, train

CPU = 0


@pytest.fixture(scope="module", params=MODELS)
def cycle(request) -> Cycle:
    (only,) = train(MODELS[request.param]())
    return only


def reported_peaks(cycle: Cycle) -> list[int]:
    """For each step, the highest Total Allocated above its base at any event inside the step's span."""
    base = cycle.reported[0][3] - cycle.reported[0][2]
    spans = [(step.start_ns, step.end_ns) for step in cycle.trace.steps]
    return [
        max(total - base for time, _, _, total in cycle.reported if low <= time <= high)
        for low, high in spans
    ]


def reported_rows(cycle: Cycle) -> np.ndarray:
    """All but the deaths of start-state storages, which only we see."""
    return np.flatnonzero(cycle.trace.events.kind != Kind.STORAGE_FREE)


def test_window_peak_is_the_profilers_own(cycle):
    stats = step_stats(cycle.trace, CPU)
    assert [step.window_peak_bytes for step in stats] == reported_peaks(cycle)


def test_the_running_sum_is_the_profilers_total_at_every_event(cycle):
    base = cycle.reported[0][3] - cycle.reported[0][2]
    ours = cycle.trace.window(CPU)[1:][reported_rows(cycle)]
    assert ours.tolist() == [total - base for _, _, _, total in cycle.reported]


def test_every_reported_event_is_in_the_trace(cycle):
    rows = reported_rows(cycle)
    ours = zip(
        cycle.trace.events.address[rows].tolist(), cycle.trace.events.bytes[rows].tolist(), strict=True
    )
    assert list(ours) == [(address, abs(size)) for _, address, size, _ in cycle.reported]


def test_the_end_state_is_the_bytes_of_all_storages_alive(cycle):
    end = len(cycle.trace.events) - 1
    rows = cycle.trace.allocations.alive_at(end, CPU)
    ours = {
        int(cycle.trace.allocations.address[row]): int(cycle.trace.allocations.bytes[row]) for row in rows
    }
    assert ours == cycle.alive


def test_the_start_state_is_the_storages_of_model_and_optimizer(cycle):
    assert int(cycle.trace.live(CPU)[0]) == sum(cycle.start.values())
    assert {Category(c) for c in cycle.trace.start.category} <= {
        Category.PARAMETER,
        Category.BUFFER,
        Category.GRADIENT,
        Category.OPTIMIZER_STATE,
    }


def test_parts_sum_to_the_peak(cycle):
    for step in step_stats(cycle.trace, CPU):
        at = moment(cycle.trace, CPU, step.peak_event)
        for by in DIVISIONS:
            assert sum(part.bytes for part in at.parts(by)) == step.peak_bytes
        for part in at.parts("module"):
            assert sum(part.categories.values()) == part.bytes


def test_nothing_is_unknown_at_the_peak(cycle):
    for step in step_stats(cycle.trace, CPU):
        parts = {part.key: part.bytes for part in moment(cycle.trace, CPU, step.peak_event).parts("category")}
        assert parts.get("unknown", 0) <= step.peak_bytes // 100


def test_parameters_gradients_and_state_are_told_apart_exactly():
    model = MODELS["transformer"]()
    (cycle,) = train(model)
    parameters = sum(p.nbytes for p in model.parameters())
    end = moment(cycle.trace, CPU, len(cycle.trace.events) - 1)
    parts = {part.key: part.bytes for part in end.parts("category")}
    steps = 4 * len(list(model.parameters()))  # AdamW counts its steps in one float32 per parameter
    assert parts["parameter"] == parameters
    assert parts["gradient"] == parameters
    assert parts["optimizer_state"] == 2 * parameters + steps


@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_three_cycles_with_gradients_dropped_first(name):
    """Blocks born in one cycle and freed between or in later ones do not pile up."""
    cycles = train(
        MODELS[name](), steps=9, plan=schedule(wait=1, warmup=1, active=1, repeat=3), zero_first=True
    )
    assert len(cycles) == 3
    ends = [int(cycle.trace.live(CPU)[-1]) for cycle in cycles]
    assert ends == [sum(cycle.alive.values()) for cycle in cycles]
    peaks = [step_stats(cycle.trace, CPU)[0].peak_bytes for cycle in cycles]
    assert peaks[1] == peaks[2]
    for cycle in cycles:
        base = cycle.reported[0][3] - cycle.reported[0][2]
        assert cycle.trace.window(CPU)[1:].max() <= max(total - base for _, _, _, total in cycle.reported)


def test_a_gradient_freed_by_zero_grad_stays_a_gradient():
    def step(model, optimizer, batch, _):
        x, y = batch()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = MODELS["cnn"]()
    (cycle,) = train(model, step=step)
    blocks = cycle.trace.allocations
    gradients = blocks.category == Category.GRADIENT
    born = gradients & (blocks.born >= 0) & (blocks.freed < len(cycle.trace.events))
    assert int(blocks.bytes[born].sum()) == 2 * sum(p.nbytes for p in model.parameters())  # two steps


def test_a_temporary_is_freed_inside_its_operator_and_an_activation_lives_until_backward():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x):
            return (x * self.weight).exp()

        @staticmethod
        def batch():
            return torch.ones(1000), torch.tensor(0)

    (cycle,) = train(Twice(), step=lambda model, *_: model(torch.ones(1000)).sum().backward())
    blocks = cycle.trace.allocations
    phases: dict[tuple[str, Category], list[int]] = {}
    for row in np.flatnonzero(blocks.phase == Phase.FORWARD):
        key = cycle.trace.modules[blocks.module[row]].key, Category(blocks.category[row])
        phases.setdefault(key, []).append(int(blocks.bytes[row]))
    assert phases[("", Category.ACTIVATION)] == [4000, 4000] * 2  # the product, and exp: two steps


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, row):
        return torch.ones(3, 16, 16), row % 10


def test_batches_from_worker_processes_are_memory_of_their_own():
    """They come in shared memory, which the profiler reports but counts nowhere: 8 x 3 x 16 x 16 floats."""
    loaded = iter(torch.utils.data.DataLoader(Batches(), batch_size=8, num_workers=1))
    (cycle,) = train(MODELS["cnn"](), batch=lambda: next(loaded))
    assert [device.name for device in cycle.trace.devices] == ["cpu", "shared"]
    images, labels = 8 * 3 * 16 * 16 * 4, 8 * 8
    assert cycle.trace.live(1).max() <= 2 * (images + labels)
    assert {images, labels} >= set(
        cycle.trace.allocations.bytes[cycle.trace.allocations.device == 1].tolist()
    )
    assert cycle.trace.live(1).min() >= 0
    counted = cycle.trace.window(0)[1:][cycle.trace.events.kind != Kind.STORAGE_FREE]
    _, _, size, total = next(event for event in cycle.reported if event[3])
    base = total - size
    for level, (_, _, _, total) in zip(counted.tolist(), cycle.reported, strict=True):
        assert total in (0, level + base)
