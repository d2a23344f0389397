"""Tests that programs that cannot be estimated raise errors that name the cause, and similar ones run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tb_memplugin import MemPluginError
from tests.estimate.fake_runs import KIB, estimated, sizes


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", **options)


@torch.library.custom_op("tb_memplugin_tests::without_a_fake", mutates_args=())
def without_a_fake(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


PROGRAMS: dict[str, tuple[Callable[[], Any], str]] = {
    "a sparse tensor": (
        lambda: torch.sparse_coo_tensor(ones(2, 3).long(), ones(3), (4, 4)).log1p(),
        "log1p.default of a sparse tensor",
    ),
    "a quantized tensor": (
        lambda: torch.quantize_per_tensor(ones(64, 64), 0.1, 0, torch.qint8),
        "creates a quantized tensor",
    ),
    "an operator of the program": (
        lambda: without_a_fake(ones(4)),
        "tb_memplugin_tests.without_a_fake.default has no fake implementation",
    ),
    "nested tensors": (
        lambda: torch.nested.nested_tensor([ones(3, 8), ones(5, 8)], layout=torch.jagged),
        "Nested tensors",
    ),
    "a subclass": (lambda: ones(4).as_subclass(Plain), "A subclass of torch.Tensor"),
    "an old constructor": (lambda: torch.cuda.FloatTensor(4), "torch.cuda.FloatTensor"),  # type: ignore[attr-defined]
    "another thread": (lambda: ThreadPoolExecutor().submit(ones, 4).result(), "another thread"),
    "a condition": (
        lambda: torch.cond(ones(1).sum() > 0, lambda x: x + 1, lambda x: x - 1, (ones(4),)),
        "torch.cond",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="these are torch's words on a build for the CPU")
def test_what_fake_tensors_cannot_do_is_refused_by_name(name: str) -> None:
    program, said = PROGRAMS[name]
    with pytest.raises(MemPluginError, match=said):
        estimated(program)


def test_an_error_of_the_programs_own_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mine"):
        estimated(lambda: exec("raise RuntimeError('mine')"))


def test_kernels_of_extensions_are_told_to_become_operators() -> None:
    """The error is that of Tensor::data_ptr<float>() in C++, as seen in an extension."""
    said = "The tensor has a non-zero number of elements, but its data is not allocated yet."
    with pytest.raises(MemPluginError, match=r"extension .* cannot be estimated"):
        estimated(lambda: exec(f"raise RuntimeError({said!r})"))


def test_parameters_that_functions_replace_are_no_real_ones() -> None:
    """torch.func computes the gradient of 64 x 64 weights."""

    def run() -> Any:
        layer = nn.Linear(64, 64, device="cuda")

        def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(layer, weights, (ones(4, 64),)).sum()
            return result

        return torch.func.grad(loss)(dict(layer.named_parameters()))

    assert 16 * KIB in sizes(estimated(run), "mm")


def test_peaks_that_the_program_resets_begin_anew() -> None:
    told: list[int] = []

    def run() -> None:
        for count in (KIB, KIB // 2):
            ones(count)
            told.extend([torch.cuda.max_memory_allocated(), torch.cuda.memory.max_memory_reserved()])
            torch.cuda.reset_peak_memory_stats()
        told.append(torch.cuda.memory_stats()["allocated_bytes.all.peak"])

    done = estimated(run)
    segment = 2 << 20
    assert told == [4 * KIB, segment, 2 * KIB, segment, 0]
    assert done.get_max_memory_allocated() == (4 * KIB,)


def test_batches_in_pinned_memory_arrive() -> None:
    def run() -> None:
        for (batch,) in DataLoader(TensorDataset(torch.ones(8, 64)), 4, pin_memory=True):
            batch.to("cuda", non_blocking=True)

    assert sizes(estimated(run), "_to_copy") == [KIB, KIB]


@pytest.mark.parametrize(
    "program",
    [
        lambda: nn.Linear(4, 4, dtype=torch.bfloat16, device="cuda")(ones(2, 4)),
        lambda: ones(2, 2) @ ones(2, 2, dtype=torch.long),
        lambda: nn.Conv1d(2, 2, 1, bias=False, dtype=torch.bfloat16, device="cuda")(ones(1, 2, 4)),
        lambda: ones(4).index_add(0, ones(2, dtype=torch.long), ones(2, dtype=torch.float16)),
    ],
)
def test_operands_of_two_types_raise_as_in_a_real_run(program: Callable[[], Any]) -> None:
    """Fake tensors of a GPU alone would take them."""
    with pytest.raises(RuntimeError, match="to have the same dtype"):
        estimated(program)
