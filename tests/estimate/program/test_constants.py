"""Tests that small tensors of the program's own numbers keep their values, as real ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin import MemoryEstimator, MemPluginError
from tests.estimate.fake_runs import allocations, estimated


@pytest.mark.parametrize(
    ("program", "value"),
    [
        (lambda: torch.linspace(0, 1, 3).tolist(), [0.0, 0.5, 1.0]),
        (lambda: torch.tensor([2, 3]).tolist(), [2, 3]),
        (lambda: (torch.arange(4) * 2).flip(0)[1].item(), 4),
        (lambda: torch.full((3,), 5).sum().item(), 15),
        (lambda: torch.zeros(2).log().long().clamp(min=0).tolist(), [0, 0]),  # as T5's buckets of distances
        (lambda: [one.tolist() for one in torch.zeros(4).split([1, 3])], [[0.0], [0.0, 0.0, 0.0]]),
        (lambda: bool((torch.ones(3) > 0).all()), True),
    ],
)
def test_numbers_on_the_cpu_are_known(program: Callable[[], Any], value: Any) -> None:
    read: list[Any] = []
    assert not any("1.0" in note for note in estimated(lambda: read.append(program())).estimate().notes)
    assert read == [value]


def test_what_an_index_without_values_picks_of_them_is_not_known() -> None:
    """Not what was in memory, either: as an index, that would be out of bounds."""

    def run() -> None:
        row = torch.rand(3).mul(5).long()
        read.append(str(torch.arange(9)[row].tolist()))

    read: list[str] = []
    estimated(run)
    assert read == ["[?, ?, ?]"]


def test_what_is_written_into_them_is_known_or_forgotten() -> None:
    def run() -> None:
        known = torch.zeros(3)
        known += 2
        read.append(known.tolist())
        known += torch.randn(3)
        read.append(known.tolist())

    read: list[Any] = []
    estimated(run)
    assert read == [[2.0] * 3, [1.0] * 3]  # unknown numbers are assumed to be 1.0


def test_large_ones_are_not() -> None:
    with pytest.raises(MemPluginError, match="a whole number"):
        estimated(lambda: int(torch.arange(1_100_000).sum()))


def test_those_on_the_gpu_are_calculated_with() -> None:
    read: list[Any] = []

    def run() -> None:
        lengths = torch.tensor([3, 5, 2], device="cuda")
        read.append((lengths.max().item(), lengths[lengths > 2].tolist(), torch.bincount(lengths).tolist()))
        counter = torch.zeros(3, device="cuda")
        counter[:2] += 1  # a view shares its values
        read.append(counter.sum().item())
        counter += torch.randn(3, device="cuda")  # from here on they are not known
        read.append(counter.sum().item())

    estimated(run)
    assert read == [(5, [3, 5], [0, 0, 1, 1, 0, 1]), 2.0, 1.0]


def test_one_input_that_decides_is_enough() -> None:
    def run() -> None:
        unknown = torch.randn(4, device="cuda") > 0
        assert not (unknown & torch.zeros(4, dtype=torch.bool, device="cuda")).any()
        assert (torch.ones(4, dtype=torch.bool, device="cuda") | unknown).all()

    estimated(run)


@pytest.mark.parametrize("move", [torch.Tensor.cuda, lambda one: one.to("cuda", torch.float64)])
def test_they_move_to_the_gpu_in_inference_mode(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run() -> torch.Tensor:
        with torch.inference_mode():
            return move(torch.zeros(256))

    made = allocations(estimated(run))
    assert [size for _, size, _ in made] == [1024 if move is torch.Tensor.cuda else 2048]


def test_copies_of_models_and_of_optimizer_states_keep_the_values() -> None:
    def run() -> None:
        model = copy.deepcopy(nn.BatchNorm1d(3)).cuda()  # counts batches, on the CPU so far
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 3, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        read.append(optimizer.state[model.weight]["step"].item())

    read: list[float] = []
    estimated(run)
    assert read == [2.0]


def test_what_follows_from_a_batch_of_a_loader_is_known() -> None:
    read: list[Any] = []

    def run() -> None:
        lengths: Any = [3, 5, 2, 4]
        for batch in torch.utils.data.DataLoader(lengths, batch_size=2):
            longest = int(batch.max())
            read.append((longest, torch.zeros(2, longest, device="cuda").shape, batch.cuda().sum().item()))

    estimated(run)
    assert read == [(5, (2, 5), 8), (4, (2, 4), 6)]


def test_what_is_drawn_on_the_cpu_is_known() -> None:
    def run() -> None:
        assert sorted(torch.randperm(9).tolist()) == list(range(9))
        assert 3 <= int(torch.randint(3, 5, (1,))) < 5
        rows: Any = range(5_000)
        parts: Any = torch.utils.data.random_split(rows, [4_000, 1_000])
        assert sorted([*parts[0], *parts[1]]) == list(rows)

    estimated(run)


def test_points_of_sobol_are_real() -> None:
    with MemoryEstimator():
        engine = torch.quasirandom.SobolEngine(2)
        assert engine.draw(3).tolist() == [[0, 0], [0.5, 0.5], [0.75, 0.25]]
        assert (engine.draw(1).cuda() @ torch.ones(2, 4, device="cuda")).shape == (1, 4)


def test_a_graph_of_data_has_as_many_edges_as_in_a_real_run() -> None:
    """Points 3 apart on a line, of which each sees the next: 2 x 399 of 160,000 pairs."""
    points = torch.arange(400.0)[:, None] * 3  # of a data loader: no fake tensor

    def edges() -> None:
        distances = torch.cdist(points.cuda(), points.cuda())
        assert ((distances > 0) & (distances < 4)).nonzero().shape == (798, 2)

    estimated(edges)


def test_more_values_than_are_kept_are_not_computed() -> None:
    """Distances of 300,000 points: 335 GiB of them would end the process."""
    points = torch.zeros(300_000, 3)

    def distances() -> None:
        assert torch.cdist(points.cuda(), points.cuda()).shape == (300_000, 300_000)

    estimated(distances)
