"""Sparse tensors: their bytes are those of their indices, 8 for each dimension, and of their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.estimate.fake_runs import KIB, allocations, estimated, sizes

ROWS, WIDTH = 64 * KIB, 32
TABLE = ROWS * WIDTH * 4


def backward(batches: int, **options: Any) -> nn.Embedding:
    table = nn.Embedding(ROWS, WIDTH, sparse=True, device="cuda", **options)
    for _ in range(batches):
        table(torch.empty(KIB, dtype=torch.long, device="cuda")).square().sum().backward()
    return table


def test_a_gradient_has_the_rows_that_were_looked_up() -> None:
    done = estimated(lambda: backward(1))
    assert [size for _, size, _ in allocations(done) if size >= TABLE] == [TABLE]
    assert done.get_current_memory_allocated() == (TABLE + KIB * (8 + WIDTH * 4),)
    gradients: list[Any] = []
    estimated(lambda: gradients.append(backward(1).weight.grad))
    (gradient,) = gradients
    assert (gradient.layout, gradient._nnz(), gradient._values().shape) == (
        torch.sparse_coo,
        KIB,
        (KIB, WIDTH),
    )


def test_gradients_that_accumulate_keep_the_rows_of_both() -> None:
    done = estimated(lambda: backward(2))
    assert sizes(done, "cat") == [2 * KIB * 8, 2 * KIB * WIDTH * 4]


def test_autograd_keeps_a_gradient_that_nothing_else_holds_without_a_copy() -> None:
    assert sizes(estimated(lambda: backward(1)), "clone") == []


def test_the_gradient_of_bags_has_the_rows_that_they_sum() -> None:
    def run() -> None:
        table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, device="cuda")
        table(torch.empty(KIB // 4, 4, dtype=torch.long, device="cuda")).square().sum().backward()

    done = estimated(run)
    assert [size for _, size, _ in allocations(done) if size >= TABLE] == [TABLE]
    assert sizes(done, "index_select") == [KIB * WIDTH * 4]


@pytest.mark.parametrize(
    ("optimizer", "states"), [(torch.optim.SGD, 0), (torch.optim.Adagrad, 1), (torch.optim.SparseAdam, 2)]
)
def test_optimizers_step_with_the_rows_alone(optimizer: Any, states: int) -> None:
    """Only states are as large as the table. Rows are coalesced where the step is not linear."""

    def run() -> None:
        table = backward(1)
        optimizer(table.parameters(), lr=0.1).step()

    done = estimated(run)
    large = [size for _, size, _ in allocations(done) if size >= TABLE]
    assert large == [TABLE] * (1 + states)
    assert any("assumed to be different" in note for note in done.estimate().notes) is bool(states)


def test_known_indices_are_coalesced_as_they_are() -> None:
    read: list[Any] = []

    def run() -> None:
        indices = torch.tensor([[0, 0, 1], [2, 2, 0]], device="cuda")
        matrix = torch.sparse_coo_tensor(indices, torch.rand(3, device="cuda"), (4, 4)).coalesce()
        read.extend([matrix._nnz(), matrix.indices().shape, matrix.t().shape, matrix.to_dense().shape])

    estimated(run)
    assert read == [2, (2, 2), (4, 4), (4, 4)]


def test_a_graph_multiplies_its_sparse_adjacency() -> None:
    """Features and products have 16 KiB; so have zeros, and the product by columns that cuSPARSE writes."""

    def run() -> Any:
        edges = torch.randint(0, KIB, (2, 100))
        adjacency = torch.sparse_coo_tensor(edges, torch.ones(100), (KIB, KIB)).coalesce().cuda()
        features = nn.Parameter(torch.ones(KIB, 4, device="cuda"))
        torch.sparse.mm(adjacency, features).sum().backward()
        return features.grad

    by_operator = [name for name, size, _ in allocations(estimated(run)) if size == 16 * KIB]
    assert by_operator == ["ones", "zeros", *["empty_like"] * 2, "new_zeros", *["empty_like"] * 2]
