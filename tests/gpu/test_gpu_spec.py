"""What `GpuSpec` says of the GPU at hand is what torch and the driver do there. Needs an NVIDIA GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from tb_memplugin import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.read.cublas import keeps_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


newest = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
    reason="the table is that of torch 2.11 to 2.13",
)


@pytest.fixture
def spec():
    name = torch.cuda.get_device_name(0)
    try:
        return GpuSpec.named(name)
    except MemPluginError:
        pytest.skip(f"{name} is not in the table: add it")


def test_it_has_the_memory_that_the_driver_tells(spec):
    """The table has the least that drivers were seen to tell; they differ by some hundred MiB."""
    told = torch.cuda.get_device_properties(0).total_memory
    assert 0.97 * told <= spec.memory_bytes <= 1.005 * told
    assert spec.compute_capability == torch.cuda.get_device_capability(0)


@newest
@pytest.mark.skipif("CUBLAS_WORKSPACE_CONFIG" in os.environ, reason="the user chose another size")
def test_the_first_matrix_product_allocates_the_workspace(spec):
    matrix = torch.ones(64, 64, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    product = matrix @ matrix
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - product.nbytes
    end = torch.cuda.memory_stats()["requested_bytes.all.current"] - before - product.nbytes
    assert peak == spec.cublas_workspace_bytes
    assert end == (peak if keeps_workspaces() else 0)


@newest
def test_attention_takes_the_first_kernel_of_the_order(spec):
    query = torch.ones(1, 4, 256, 64, device="cuda", dtype=torch.float16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        F.scaled_dot_product_attention(query, query, query)
    called = {event.name for event in profile.events()}
    kernels = [name for name in spec.sdpa_order if f"aten::_scaled_dot_product_{name}_attention" in called]
    assert kernels == [spec.sdpa_order[0]]
