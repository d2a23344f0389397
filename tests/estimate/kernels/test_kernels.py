"""Tests for memory of CUDA kernels: workspaces, recurrent layers, flex_attention, fused operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from tb_memplugin import MemPluginError
from tb_memplugin.estimate.kernels.results import HAS_RMS_NORM, ON_CUDA
from tb_memplugin.read import cublas
from tests.estimate.fake_runs import KIB, MIB, allocations, estimated, sizes

BEFORE_HOPPER, HOPPER = 8_519_680, 33_554_432
SPREAD = 64 * 4
"""Bytes of a row of 64 floats."""


def product(*, train: bool) -> None:
    weight = torch.randn(64, 64, device="cuda", requires_grad=train)
    result = weight @ weight
    if train:
        result.sum().backward()
        (weight @ weight).sum().backward()


@pytest.mark.parametrize(("gpu", "size"), [("a100", BEFORE_HOPPER), ("h100", HOPPER), ("b200", HOPPER)])
def test_a_workspace_for_inference_and_another_for_the_backward(
    gpu: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 13))
    one = estimated(lambda: product(train=False), gpu=gpu)
    two = estimated(lambda: product(train=True), gpu=gpu)
    assert [bytes_ for _, bytes_, kind in allocations(one) if kind == "workspace"] == [size]
    assert [bytes_ for _, bytes_, kind in allocations(two) if kind == "workspace"] == [size, size]
    assert two.estimate().workspace_bytes == 2 * size


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("product", "size"),
    [
        (lambda: ones(8, 8) @ ones(8, 8), BEFORE_HOPPER),
        (lambda: torch.addmm(ones(8), ones(8, 8), ones(8, 8)), MIB),
        (lambda: torch.addmm(ones(1, 8), ones(8, 8), ones(8, 8)), MIB),
        (lambda: torch.addmm(ones(8), ones(1, 8), ones(8, 8)), MIB),
        (lambda: torch.addmm(ones(8, 8), ones(8, 8), ones(8, 8)), BEFORE_HOPPER),
        (lambda: torch.addmm(ones(8, 8, dtype=HALF), ones(8, 8, dtype=HALF), ones(8, 8, dtype=HALF)), MIB),
        (lambda: torch.addmm(ones(8, 1), ones(8, 8), ones(8, 8)), BEFORE_HOPPER),
        (lambda: torch.addmm(ones(1), ones(8, 8), ones(8, 1)), BEFORE_HOPPER),
        (lambda: ones(8, 8).addmm_(ones(8, 8), ones(8, 8)), BEFORE_HOPPER),
        (lambda: ones(8).addmv_(ones(8, 8), ones(8)), BEFORE_HOPPER),
        (lambda: torch._addmm_activation(ones(8, 8), ones(8, 8), ones(8, 8)), MIB),
        (lambda: torch.addr(ones(8, 8), ones(8), ones(8)), None),
        (lambda: ones(8, 0) @ ones(0, 8), None),
    ],
)
def test_newer_versions_allocate_a_workspace_for_each_product(
    product: Any, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are those that PyTorch 2.15 allocates for an A100 (tests/gpu/standin)."""
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 15))
    done = estimated(lambda: (product(), product()), gpu="a100")
    taken = [bytes_ for _, bytes_, kind in allocations(done) if kind == "workspace"]
    assert taken == ([size, size] if size else [])
    assert sum(done.get_current_memory_allocated()) < MIB  # freed again


@pytest.mark.parametrize(
    ("version", "unified", "taken", "kept"),
    [
        ((2, 7), "", [BEFORE_HOPPER, MIB, MIB, BEFORE_HOPPER], 2 * BEFORE_HOPPER),
        ((2, 7), "1", [BEFORE_HOPPER, MIB, MIB, BEFORE_HOPPER], 2 * BEFORE_HOPPER),
        ((2, 8), "", [BEFORE_HOPPER, MIB, MIB, BEFORE_HOPPER], 2 * BEFORE_HOPPER),
        ((2, 8), "1", [BEFORE_HOPPER, BEFORE_HOPPER], 2 * BEFORE_HOPPER),
        ((2, 9), "", [BEFORE_HOPPER, MIB, BEFORE_HOPPER], 2 * BEFORE_HOPPER + MIB),
        ((2, 11), "", [BEFORE_HOPPER, MIB, BEFORE_HOPPER], 2 * BEFORE_HOPPER + MIB),
        ((2, 11), "1", [BEFORE_HOPPER, BEFORE_HOPPER], 2 * BEFORE_HOPPER),
        ((2, 12), "", [BEFORE_HOPPER, BEFORE_HOPPER], 2 * BEFORE_HOPPER),
        ((2, 12), "0", [MIB, BEFORE_HOPPER], BEFORE_HOPPER + MIB),
    ],
)
def test_layers_with_a_bias_share_the_workspace_of_cublas_or_have_their_own(
    version: tuple[int, int], unified: str, taken: list[int], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As these versions allocate on the stand-in, in two forwards and a backward of a linear layer."""
    monkeypatch.setattr(cublas, "_torch_version", lambda: version)
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", unified)

    def train() -> None:
        layer = nn.Linear(256, 256, device="cuda")
        layer(ones(64, 256))
        layer(ones(64, 256)).sum().backward()

    done = estimated(train, gpu="a100")
    assert [bytes_ for _, bytes_, kind in allocations(done) if kind == "workspace"] == taken
    assert kept <= sum(done.get_current_memory_allocated()) < kept + MIB


def test_grids_and_distances_are_products_too() -> None:
    points = 30  # of fewer, each distance is computed by itself
    for program in (
        lambda: functional.affine_grid(ones(1, 2, 3), [1, 1, 4, 4], align_corners=False),
        lambda: torch.cdist(ones(points, 8), ones(points, 8)),
        lambda: nn.Bilinear(2, 2, 2, device="cuda")(ones(1, 2), ones(1, 2)),
    ):
        assert estimated(program, gpu="a100").estimate().workspace_bytes == BEFORE_HOPPER


def test_what_multiplies_no_matrices_needs_no_workspace() -> None:
    done = estimated(lambda: torch.randn(64, device="cuda").exp())
    assert done.estimate().workspace_bytes == 0


def test_fake_tensors_alone_know_no_workspace() -> None:
    assert estimated(lambda: product(train=True), corrected=False).estimate().workspace_bytes == 0


def recurrent(kind: Any) -> nn.RNNBase:
    """Train a layer with 64 inputs and 128 hidden units on 8 sequences of 32."""
    layer = kind(64, 128, batch_first=True).cuda()
    layer(torch.randn(8, 32, 64, device="cuda"))[0].sum().backward()
    return layer


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_run(kind: type[nn.RNNBase], gates: int) -> None:
    """Weights are in one buffer and gradients in another, of gates x 128 x (64 + 128 + 2) floats each."""
    done = estimated(lambda: recurrent(kind))
    weights = gates * 128 * (64 + 128 + 2) * 4
    assert sizes(done, "new_empty") == [weights]
    assert weights in sizes(done, "_cudnn_rnn_backward")
    assert 8 * 32 * 128 * 4 in sizes(done, "_cudnn_rnn")
    assert any("reserve" in note for note in done.estimate().notes)


def test_autocast_computes_recurrent_layers_in_half_precision() -> None:
    def run() -> torch.Tensor:
        layer = nn.LSTM(64, 128, batch_first=True).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            result: torch.Tensor = layer(torch.randn(8, 32, 64, device="cuda"))[0]
        assert result.dtype is torch.float16
        result.float().sum().backward()
        weights: Any = layer.weight_ih_l0
        assert weights.grad.dtype is torch.float32
        return result

    done = estimated(run)
    assert 8 * 32 * 128 * 2 in sizes(done, "_cudnn_rnn")


def test_fake_tensors_alone_have_no_lstm() -> None:
    with pytest.raises(RuntimeError):
        estimated(lambda: recurrent(nn.LSTM), corrected=False)


def packed(lengths: Any, kind: Any = nn.LSTM, **options: Any) -> None:
    """Train a layer with 64 inputs and 128 hidden units on two packed sequences."""
    layer = kind(64, 128, device="cuda")
    batch = torch.randn(32, 2, 64, device="cuda", requires_grad=True)
    rows = nn.utils.rnn.pack_padded_sequence(batch, lengths, **options)
    result, told = nn.utils.rnn.pad_packed_sequence(layer(rows)[0])
    assert result.shape == (32, 2, 128)
    assert told.tolist() == [32, 8]
    result.sum().backward()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_have_as_many_rows_as_their_lengths_say(kind: type[nn.RNNBase]) -> None:
    """The input has 32 + 8 rows of 64 floats, the output as many of 128, padded again to 2 x 32."""
    done = estimated(lambda: packed([32, 8], kind=kind))
    assert sizes(done, "clone")[0] == 24 * 64 * 4  # the steps of one sequence; those of both lie together
    assert sizes(done, "cat") == [40 * 64 * 4]
    assert 40 * 128 * 4 in sizes(done, "_cudnn_rnn")
    assert sizes(done, "new_full") == [64 * 128 * 4]
    assert 64 * 64 * 4 in sizes(done, "new_zeros")


def test_packed_sequences_may_be_in_any_order() -> None:
    def run() -> None:
        batch = torch.randn(2, 32, 64, device="cuda", requires_grad=True)
        lengths = torch.tensor([8, 32])
        rows = nn.utils.rnn.pack_padded_sequence(batch, lengths, batch_first=True, enforce_sorted=False)
        assert rows.data.shape == (40, 64)
        rows = nn.utils.rnn.pack_padded_sequence(batch, [32, 8], batch_first=True)
        (gradient,) = torch.autograd.grad(rows.data.sum(), batch)
        assert gradient.stride() == (64, 2 * 64, 1)  # time first, as the rows are written

    estimated(run)


def test_the_lengths_of_a_batch_are_known() -> None:
    batch = torch.tensor([32, 8])  # of a data loader: no fake tensor
    assert sizes(estimated(lambda: packed(batch)), "cat") == [40 * 64 * 4]


def test_packed_sequences_of_unknown_lengths_are_refused_by_name() -> None:
    lengths = torch.tensor([32, 8])
    with pytest.raises(MemPluginError, match="pack_padded_sequence needs the values"):
        estimated(lambda: packed(lengths * torch.randint(1, 2, (2,), device="cuda").cpu()))


def test_flex_attention_lays_its_result_out_like_the_query() -> None:
    def run() -> None:
        query, key, value = torch.zeros(2, 64, 3, 4, 16, device="cuda").permute(2, 0, 3, 1, 4)
        result = flex.flex_attention(query, key, value)
        assert result.shape == (2, 4, 64, 16)
        assert result.transpose(1, 2).is_contiguous()  # so that merging the heads copies nothing

    estimated(run)


def test_flex_attention_never_holds_the_scores() -> None:
    """8 heads of 1024 x 64 float32 are 2 MiB for each tensor; the scores would take 32 MiB."""

    def run() -> None:
        query = torch.randn(1, 8, 1024, 64, device="cuda", requires_grad=True)
        flex.flex_attention(query, query, query).sum().backward()

    done = estimated(run)
    assert done.get_max_memory_allocated()[0] < 12 * MIB
    assert sizes(done, "new_empty") == [8 * 1024 * 4]
    assert sizes(done, "empty_permuted") == [2 * MIB]
    assert any("flex_attention" in note for note in done.estimate().notes)


def test_the_program_may_ask_torch_cuda() -> None:
    answers: list[Any] = []

    def run() -> torch.Tensor:
        kept = torch.empty(MIB, device="cuda")
        torch.empty(MIB, device="cuda")
        answers.extend([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(0)])
        answers.extend([torch.cuda.get_device_capability(), torch.cuda.is_available()])
        answers.append(torch.cuda.mem_get_info()[1])
        return kept

    done = estimated(run, gpu="a100")
    assert answers == [4 * MIB, 8 * MIB, (8, 0), True, done.gpu.memory_bytes if done.gpu else 0]


def embedded(tokens: int) -> None:
    table = nn.Embedding(1000, 64, device="cuda")
    table(torch.zeros(tokens, dtype=torch.long, device="cuda")).sum().backward()


def test_the_gradient_of_a_large_batch_of_embeddings_is_summed_in_buffers() -> None:
    """The buffers are a copy of the gradient, which is one number expanded to a shape, 4096 indices of 8
    bytes, at most 1000 segments, and 409 + 1000 partial sums of 64 floats.
    """
    done = estimated(lambda: embedded(4096))
    found = sizes(done, "embedding_dense_backward")
    assert found == [1000 * 64 * 4, SPREAD * 4096, *[4096 * 8] * 3, 8, 8000, 8000, 8, 1409 * 8, 1409 * 64 * 4]


def test_that_of_a_small_batch_is_not() -> None:
    found = sizes(estimated(lambda: embedded(3072)), "embedding_dense_backward")
    assert found == [1000 * 64 * 4, SPREAD * 3072]


def test_what_cublas_cannot_read_is_copied_first() -> None:
    """The gradient of a sum is one number expanded to 1024 x 1024."""

    def run() -> None:
        weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        (torch.randn(1024, 1024, device="cuda") @ weight).sum().backward()

    passing = [
        size for name, size, kind in allocations(estimated(run)) if (name, kind) == ("mm", "temporary")
    ]
    assert passing == [4 * MIB]


def test_the_bias_of_rows_that_lie_apart_is_added_in_place() -> None:
    """The input is transposed: 8 x 16 rows of 64 floats. A real run allocates only a copy and the product."""

    def run() -> torch.Tensor:
        result: torch.Tensor = nn.Linear(64, 64, device="cuda")(
            torch.ones(8, 64, 16, device="cuda").transpose(1, 2)
        )
        return result

    assert [(name, size) for name, size, kind in allocations(estimated(run)) if kind != "workspace"][2:] == [
        ("ones", 32 * KIB),
        ("clone", 32 * KIB),
        ("mm", 32 * KIB),
    ]
    assert sizes(estimated(run, corrected=False), "add") == [32 * KIB]


def test_a_sum_in_another_type_copies_what_it_sums_first() -> None:
    """4,096 booleans become numbers of 8 bytes, and the sums are as large."""
    done = estimated(lambda: torch.ones(64, 64, dtype=torch.bool, device="cuda").cumsum(-1))
    assert sizes(done, "cumsum") == [32 * KIB] * 2
    assert sizes(estimated(lambda: torch.ones(64, 64, device="cuda").cumsum(-1)), "cumsum") == [16 * KIB]


def test_the_derivative_of_masked_select_counts_where_each_element_goes() -> None:
    """There is a number of 8 bytes for each of 65,536 elements."""

    def run() -> None:
        chosen = 2 * torch.ones(256, 256, device="cuda", requires_grad=True)
        chosen.masked_select(chosen > 0).sum().backward()

    found = allocations(estimated(run))
    assert [size for name, size, _ in found if name == "masked_scatter"] == [MIB // 2]


def backward_of(function: Any, dtype: torch.dtype = torch.float32) -> None:
    """Run a function's forward and backward on 4 rows of 64 numbers."""
    result = function(torch.randn(4, 64, device="cuda", dtype=dtype, requires_grad=True))
    result.backward(torch.empty_like(result))


@pytest.mark.parametrize("function", [functional.silu, functional.mish], ids=["silu", "mish"])
def test_an_activations_derivative_is_one_kernel(function: Any) -> None:
    done = estimated(lambda: backward_of(function))
    made = [(name, size) for name, size, _ in allocations(done) if name not in ("empty", "randn")]
    name = function.__name__
    assert made == [(name, 4 * SPREAD), ("empty_like", 4 * SPREAD), (f"{name}_backward", 4 * SPREAD)]


@pytest.mark.skipif(not HAS_RMS_NORM, reason="this PyTorch has no such kernel")
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_rms_norm_is_one_kernel_that_keeps_a_number_a_row(dtype: torch.dtype, size: int) -> None:
    """bfloat16 is accumulated in float32. The gradient of the weight is one row."""
    weight: list[torch.Tensor] = []

    def program() -> None:
        weight.append(torch.randn(64, device="cuda", dtype=dtype, requires_grad=True))
        backward_of(lambda x: functional.rms_norm(x, (64,), weight[0]), dtype)

    done = estimated(program)
    weight.clear()
    assert sizes(done, "_fused_rms_norm") == [4 * 64 * size, 4 * max(size, 4)]
    assert sizes(done, "_fused_rms_norm_backward") == [4 * 64 * size, 64 * size]


def test_what_cuda_has_kernels_for_is_as_before_afterwards() -> None:
    """A PyTorch built without CUDA has no kernel afterwards; one built with CUDA keeps its own."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    before = has_kernel("aten::silu_backward", "CUDA")
    estimated(lambda: backward_of(functional.silu))
    assert has_kernel("aten::silu_backward", "CUDA") is before is torch.backends.cuda.is_built()


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="only a PyTorch built with CUDA has its kernels"
)
def test_no_other_operator_has_a_formula_and_a_kernel_of_cudas() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    formulas = {name for name in names if has_kernel(name, "CompositeImplicitAutograd")}
    both = {name for name in formulas if has_kernel(name, "CUDA")}
    assert both <= {f"aten::{name}" for name in ON_CUDA}


def test_a_gpu_sums_halves_in_float32_without_a_copy_and_a_mask_in_integers_with_one() -> None:
    def run() -> None:
        torch.ones(KIB, device="cuda", dtype=torch.bfloat16).sum(dtype=torch.float32)
        torch.ones(KIB, device="cuda", dtype=torch.bool).sum()

    assert sizes(estimated(run), "sum") == [4, 8, 8 * KIB]


def test_a_gpu_reads_operands_of_two_types_without_copies() -> None:
    def run() -> None:
        torch.ones(KIB, device="cuda", dtype=torch.bool) * torch.ones(KIB, device="cuda")

    assert sizes(estimated(run), "mul") == [4 * KIB]


def test_a_loss_of_a_gpu_keeps_the_memory_of_the_losses_of_all_elements() -> None:
    def run() -> torch.Tensor:
        return nn.functional.mse_loss(torch.ones(KIB, device="cuda"), torch.ones(KIB, device="cuda"))

    assert sizes(estimated(run), "mse_loss") == [4 * KIB, 4 * KIB]  # the result, and what is averaged


@pytest.mark.parametrize(
    ("program", "note"),
    [
        (lambda: torch.fft.rfft(torch.ones(8, device="cuda")), "cuFFT's workspaces"),
        (lambda: torch.linalg.inv(torch.ones(2, 2, device="cuda")), "the workspaces of cuSOLVER"),
        (lambda: nn.Bilinear(2, 2, 2, device="cuda")(*torch.ones(2, 1, 2, device="cuda")), "nn.Bilinear"),
    ],
)
def test_libraries_whose_workspaces_are_not_known_are_named(program: Any, note: str) -> None:
    assert any(note in one for one in estimated(program).estimate().notes)
