"""Tests for the Transformer Engine plugin: its replacements, and the real library where it is installed.

The real library needs CUDA's headers to be built, so CI does not have it. The figures of a real run are those
that PyTorch 2.13.0+cu130 counted for transformer-engine 2.20.2 on the stand-in for an H100 (docs/gpu.md).
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.libraries.plugins.transformer_engine import (
    Kernels,
    TransformerEngine,
    fused_attn_bwd,
    fused_attn_fwd,
)
from tests.estimate.fake_runs import sizes

KIB, MIB = 1 << 10, 1 << 20
BF16 = torch.bfloat16


@pytest.fixture
def kernels() -> Any:
    """The replacements by name, for a library that calls float32 4 and bfloat16 6."""
    made = Kernels({torch.float32: 4, BF16: 6}, attention=1).all()
    return SimpleNamespace(**made)


def gemm(kernels: Any, a: torch.Tensor, b: torch.Tensor, layout: str, **options: Any) -> list[Any]:
    """Call `generic_gemm` as `general_gemm` does in versions 2.2 to 2.20: 16 positional arguments."""
    given = {"out": None, "bias": None, "gelu": False, "grad": False} | options
    workspace = torch.empty(16, dtype=torch.uint8)
    first = (a, layout[0] == "T", b, layout[1] == "T", given["out"], None, 6, given["bias"], 6)
    rest = (given["gelu"], None, given["grad"], workspace, 16, False, False)
    found: list[Any] = kernels.generic_gemm(*first, *rest, comm_overlap=None, extra_output=None)
    return found


def test_products_have_the_shapes_of_a_linear_layer(kernels: Any) -> None:
    """A weight of (32, 64) and a batch of (2, 8, 64): the result, and both gradients."""
    weight, batch = torch.empty(32, 64, dtype=BF16), torch.empty(2, 8, 64, dtype=BF16)
    grad = torch.empty(2, 8, 32, dtype=BF16)
    out, bias_grad, *_ = gemm(kernels, weight, batch, "TN")
    assert (out.shape, out.dtype, bias_grad) == ((2, 8, 32), BF16, None)
    assert gemm(kernels, weight, grad, "NN")[0].shape == (2, 8, 64)
    out, bias_grad, *_ = gemm(kernels, batch, grad, "NT", grad=True, bias=torch.empty(32))
    assert (out.shape, bias_grad.shape, bias_grad.dtype) == ((32, 64), (32,), BF16)


def test_a_product_is_written_into_the_tensor_it_is_given(kernels: Any) -> None:
    total = torch.empty(32, 64)
    assert gemm(kernels, torch.empty(8, 64), torch.empty(8, 32), "NT", out=total)[0] is total


def test_gelu_keeps_its_input(kernels: Any) -> None:
    _, _, before, _ = gemm(kernels, torch.empty(32, 64), torch.empty(8, 64), "TN", gelu=True)
    assert before.shape == (8, 32)


def test_norms_keep_two_floats_or_one_for_each_row(kernels: Any) -> None:
    x, gamma = torch.empty(2, 8, 64, dtype=BF16), torch.empty(64, dtype=BF16)
    out, mean, rsigma = kernels.layernorm_fwd(x, gamma, gamma, 1e-5, None, None, 6, 0, False)
    assert (out.shape, mean.shape, rsigma.dtype) == ((2, 8, 64), (16,), torch.float32)
    out, nothing, rsigma = kernels.rmsnorm_fwd(x, gamma, 1e-5, None, None, 6, 0, False)
    assert (out.dtype, nothing, rsigma.shape) == (BF16, None, (16,))


@pytest.mark.parametrize(("name", "columns"), [("gelu", 64), ("swiglu", 32), ("clamped_swiglu", 32)])
def test_gated_activations_halve_their_input(kernels: Any, name: str, columns: int) -> None:
    x = torch.empty(8, 64)
    assert getattr(kernels, name)(x, None).shape == (8, columns)


def test_the_gradients_of_attention_share_a_block_if_the_inputs_do() -> None:
    query, key, value = torch.empty(4, 2, 8, 3, 16, dtype=BF16).unbind(3)
    out, statistics, state = fused_attn_fwd(4, 4, True, query, key, value)
    assert (out.shape, statistics.shape, statistics.dtype) == ((4, 2, 8, 16), (4, 2, 8), torch.float32)
    assert state.nbytes == 16
    grads = fused_attn_bwd(4, 4, query, key, value)[:3]
    assert [one.shape for one in grads] == [(4, 2, 8, 16)] * 3
    assert len({one.untyped_storage().data_ptr() for one in grads}) == 1


def test_other_quantizers_are_refused_by_name(kernels: Any) -> None:
    class MXFP8Quantizer:
        pass

    with pytest.raises(MemPluginError, match="MXFP8Quantizer"):
        kernels.quantize(torch.empty(8, 64), MXFP8Quantizer())


def test_a_library_without_the_functions_of_version_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(MemPluginError, match="too old"), TransformerEngine().patch():
        pass


@pytest.fixture
def real() -> Any:
    """The real library."""
    reason = "transformer-engine is not installed: it needs PyTorch for CUDA, and a compiler"
    return pytest.importorskip("transformer_engine.pytorch", reason=reason)


def steps(te: Any, make: Any, recipe: Any = None) -> tuple[int, int]:
    """Return (peak, reserved) bytes of three steps with AdamW on batches of 2,048 rows of 1,024."""
    with MemoryEstimator(device="cuda", gpu="h100") as estimator:
        model = torch.nn.Sequential(*make()).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            batch = torch.randn(512, 4, 1024, device="cuda", dtype=BF16)
            with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                out = model(batch)
            out.float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = estimator.estimate()
    return found.peak_allocated_bytes, found.peak_reserved_bytes


def test_linear_layers_as_counted_in_a_real_run(real: Any) -> None:
    def make() -> list[Any]:
        return [real.Linear(1024, 4096, params_dtype=BF16), real.Linear(4096, 1024, params_dtype=BF16)]

    assert steps(real, make) == (151_027_712, 180_355_072)
    recipes: Any = pytest.importorskip("transformer_engine.common.recipe")
    assert steps(real, make, recipes.DelayedScaling()) == (157_364_224, 180_355_072)
    assert steps(real, make, recipes.Float8CurrentScaling()) == (207_663_104, 272_629_760)


def test_norms_before_linear_layers_as_counted_in_a_real_run(real: Any) -> None:
    def norms() -> list[Any]:
        second = real.LayerNormLinear(4096, 1024, normalization="RMSNorm", params_dtype=BF16)
        return [real.LayerNormLinear(1024, 4096, params_dtype=BF16), second]

    assert steps(real, norms) == (172_060_672, 201_326_592)


def test_the_workspace_of_products_is_that_of_the_gpu_and_does_not_stay(real: Any) -> None:
    """32 MiB and 1 KiB since Hopper, 4 MiB before; the next estimate allocates its own."""
    for gpu, size in (("h100", 32 * MIB + KIB), ("a100", 4 * MIB)):
        with MemoryEstimator(device="cuda", gpu=gpu) as estimator:
            real.Linear(64, 64, params_dtype=BF16).cuda()
        assert size in sizes(estimator, "empty")


def test_the_library_is_its_own_again(real: Any) -> None:
    compiled: Any = sys.modules["transformer_engine_torch"]
    before = compiled.generic_gemm
    with MemoryEstimator(device="cuda", gpu="h100"):
        assert compiled.generic_gemm is not before
    assert compiled.generic_gemm is before
