"""Tests for GPUs by name, which are found in various spellings, and for their properties."""

import re
from pathlib import Path

import pytest
import torch

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.gpu_spec import MIB, GpuSpec

TABLE = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("a100", "a100-80gb"),
        ("A100 40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("A100 40", "a100-40gb"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("Tesla T4", "t4"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("NVIDIA H20", "h20"),
    ],
)
def test_a_gpu_is_found_however_its_name_is_written(written, name):
    assert GpuSpec.named(written).name == name


def test_every_gpu_is_found_by_its_name():
    assert [GpuSpec.named(name).name for name in GpuSpec.names()] == list(GpuSpec.names())


@pytest.mark.parametrize("name", ["h1000", "", "a100-60gb", "\x1b[31m", "x" * 10_000])
def test_an_unknown_name_is_refused_with_all_that_are_known(name):
    with pytest.raises(MemPluginError) as refused:
        GpuSpec.named(name)
    assert all(known in refused.value.fix for known in GpuSpec.names())
    assert len(refused.value.what) < 200


@pytest.mark.parametrize(
    ("written", "near"), [("h10", "h100"), ("rtx6000", "rtxa6000"), ("a100-60gb", "a100-80gb")]
)
def test_an_unknown_name_is_refused_with_those_that_are_near(written, near):
    with pytest.raises(MemPluginError) as refused:
        GpuSpec.named(written)
    meant = refused.value.fix.partition("?")[0]
    assert meant.startswith("Did you mean ")
    assert near in meant


@pytest.mark.parametrize("name", ["MI300X", "AMD Instinct MI300X", "Radeon RX 7900 XTX"])
def test_gpus_of_amd_are_refused_by_name(name):
    with pytest.raises(MemPluginError, match="is a GPU of AMD"):
        GpuSpec.named(name)


@pytest.mark.parametrize(
    ("name", "workspace"),
    [("t4", 8_519_680), ("a100", 8_519_680), ("l4", 8_519_680), ("h100", 32 * MIB), ("h200", 32 * MIB)],
)
def test_the_workspace_grew_with_hopper(name, workspace):
    assert GpuSpec.named(name).cublas_workspace_bytes == workspace


@pytest.mark.parametrize(
    ("version", "kept"),
    [
        ("2.7", 32 * MIB),  # cuBLASLt's workspace of 1 MiB is freed when the product returns
        ("2.11.0+cu128", 33 * MIB),  # and kept beside that of cuBLAS
        ("2.13", 32 * MIB),  # it uses that of cuBLAS
        ("2.15", 0),  # each product frees its own
    ],
)
def test_the_rules_of_another_pytorch_decide_what_stays_after_a_layer_with_a_bias(version, kept):
    with MemoryEstimator(gpu=GpuSpec.named("h100").with_torch(version)) as estimator:
        weight, bias = (torch.zeros(shape, device="cuda", dtype=torch.half) for shape in ((64, 64), 64))
        before = torch.cuda.memory_allocated()
        result = torch.nn.functional.linear(weight, weight, bias)
        assert torch.cuda.memory_allocated() - before == kept + result.numel() * 2
    assert any("The rules of PyTorch" in note for note in estimator.estimate().notes)


def test_blackwell_and_cudnn_before_they_were_changed():
    for name, version, workspace, first in (
        ("b200", "2.11", 8_519_680, "cudnn"),
        ("b200", "2.12", 32 * MIB, "cudnn"),
        ("b200", "2.10", 8_519_680, "flash"),
        ("h100", "2.10", 32 * MIB, "flash"),
    ):
        spec = GpuSpec.named(name).with_torch(version)
        assert (spec.cublas_workspace_bytes, spec.sdpa_order[0]) == (workspace, first)


@pytest.mark.parametrize("version", ["2.5", "2.16", "", "3", "two", "2.11111111", "x2.11"])
def test_rules_that_were_not_seen_are_refused(version):
    with pytest.raises(MemPluginError, match="are not known"):
        GpuSpec.named("h100").with_torch(version)


@pytest.mark.parametrize("name", ["b200", "rtx5090"])
def test_blackwell_has_the_large_workspace(name):
    assert GpuSpec.named(name).cublas_workspace_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("v100", ("efficient", "math")),
        ("t4", ("efficient", "math")),
        ("a100", ("flash", "efficient", "math")),
        ("rtx4090", ("flash", "efficient", "math")),
        ("h100", ("cudnn", "flash", "efficient", "math")),
        ("b200", ("cudnn", "flash", "efficient", "math")),
        ("rtx5090", ("flash", "efficient", "math")),
    ],
)
def test_the_attention_that_pytorch_tries_first(name, order):
    assert GpuSpec.named(name).sdpa_order == order


def test_the_order_is_pytorchs_where_cudnn_does_not_come_first():
    attention = pytest.importorskip("torch.nn.attention")
    order = [str(backend) for backend in attention._cur_sdpa_kernel_backends(with_priority=True)]
    ours = [f"SDPBackend.{kernel.upper()}" for kernel in GpuSpec.named("a100").sdpa_order]
    assert [name.removesuffix("_ATTENTION") for name in order[: len(ours)]] == ours


def test_another_size_of_memory():
    half = GpuSpec.named("h100").with_memory(40 << 30)
    assert (half.memory_bytes, half.usable_bytes) == (40 << 30, 40 << 30)
    assert half.cublas_workspace_bytes == 32 * MIB
    assert GpuSpec.named("h100").memory_bytes == 81_008 * MIB


def test_a_gpu_without_memory_is_refused():
    with pytest.raises(MemPluginError, match="cannot have a memory of"):
        GpuSpec.named("h100").with_memory(0)


def test_a_known_context_is_not_pytorchs_to_reserve():
    assert GpuSpec("small", 1_000, (8, 0), context_bytes=300).usable_bytes == 700
    assert GpuSpec("small", 1_000, (8, 0)).usable_bytes == 1_000


def test_a_context_that_is_larger_than_the_memory_leaves_nothing():
    assert GpuSpec.named("a100-40gb").with_memory(10 * MIB).usable_bytes == 0


def test_the_document_tells_every_context_as_it_is_and_where_it_was_seen():
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \| ([^|]+(?:issue|debug)[^|]+) \|", TABLE, re.MULTILINE)
    told = {name: int(size) * MIB for name, size, _ in rows}
    known = {name: GpuSpec.named(name).context_bytes for name in GpuSpec.names()}
    assert told == {name: size for name, size in known.items() if size is not None}
    unknown = [name for name, size in known.items() if size is None]
    assert all(f"`{name}`" in TABLE.split("No source that names")[1].split("None.")[0] for name in unknown)


def test_the_document_tells_every_gpu_as_it_is():
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \|", TABLE.split("## CUDA")[0], re.MULTILINE))
    told = {name: int(size.replace(",", "")) * MIB for name, size in rows.items()}
    assert told == {name: GpuSpec.named(name).memory_bytes for name in GpuSpec.names()}


@pytest.mark.parametrize(("name", "processors", "capability"), [("t4", 40, (7, 5)), ("a100", 108, (8, 0))])
def test_programs_see_the_properties_of_the_gpu(name, processors, capability):
    with MemoryEstimator(gpu=name):
        seen = torch.cuda.get_device_properties(0)
        assert torch.cuda.get_device_capability() == capability
    assert (seen.multi_processor_count, seen.major, seen.minor) == (processors, *capability)
    assert seen.total_memory == GpuSpec.named(name).memory_bytes
    assert (seen.is_integrated, seen.is_multi_gpu_board) == (0, 0)


def test_programs_see_the_cache_of_an_h100():
    """By which timm's optimizers divide their steps."""
    with MemoryEstimator(gpu="h100"):
        assert torch.cuda.get_device_properties(0).L2_cache_size == 50 * MIB
