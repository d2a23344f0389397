"""What `GpuSpec` says of the GPU at hand is what torch and the driver do there. Needs an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tb_memplugin import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: run on a machine with an NVIDIA GPU"
    ),
]


@pytest.fixture
def spec():
    name = torch.cuda.get_device_name(0)
    try:
        return GpuSpec.named(name)
    except MemPluginError:
        pytest.skip(f"{name} is not in the table: add it")


def test_it_has_no_more_memory_than_the_driver_tells(spec):
    told = torch.cuda.get_device_properties(0).total_memory
    assert 0.97 * told <= spec.memory_bytes <= told
    assert spec.compute_capability == torch.cuda.get_device_capability(0)


def test_the_first_matrix_product_allocates_the_workspace(spec, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    matrix = torch.ones(64, 64, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    product = matrix @ matrix
    grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert grown - product.nbytes == spec.cublas_workspace_bytes


def test_attention_takes_the_first_kernel_of_the_order(spec):
    query = torch.ones(1, 4, 256, 64, device="cuda", dtype=torch.float16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        F.scaled_dot_product_attention(query, query, query)
    called = {event.name for event in profile.events()}
    kernels = [name for name in spec.sdpa_order if f"aten::_scaled_dot_product_{name}_attention" in called]
    assert kernels == [spec.sdpa_order[0]]
