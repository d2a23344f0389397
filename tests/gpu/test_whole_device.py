"""What fills a GPU is what the driver and NVML say. Needs an NVIDIA GPU, or the stand-in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile

from tb_memplugin import MemoryMonitor, load, memory_trace_handler, record_on_oom
from tb_memplugin.analysis.whole_device import whole_of
from tb_memplugin.record.whole_device.card import cards_memory
from tb_memplugin.trace import DevicePart, Moment
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]
MIB = 1 << 20


def train_step(model):
    x, y = (tensor.cuda() for tensor in model.batch())
    F.cross_entropy(model(x), y).backward()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return MODELS["transformer"]().cuda()


def whole_at(path, moment):
    (file,) = path.rglob("*.mem")
    trace = load(file)
    (whole,) = [of for of in whole_of(trace, trace.device_row("cuda:0")) if of.moment is moment]
    return whole, dict(whole.parts)


def test_pytorchs_parts_are_its_counters_and_the_rest_is_the_drivers(model):
    train_step(model)
    memory, (free, total) = cards_memory()["cuda:0"], torch.cuda.mem_get_info(0)
    stats = torch.cuda.memory_stats(0)
    requested = stats["requested_bytes.all.current"]
    allocated = torch.cuda.memory_allocated(0)
    assert memory.parts[DevicePart.REQUESTED] == requested
    assert memory.parts[DevicePart.ROUNDING] == allocated - requested
    assert memory.parts[DevicePart.CACHED] == torch.cuda.memory_reserved(0) - allocated
    assert memory.parts[DevicePart.FREE] == pytest.approx(free, abs=64 * MIB)
    assert memory.total >= total


def test_with_nvml_the_sum_is_that_of_nvidia_smi(model):
    nvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    train_step(model)
    memory = cards_memory()["cuda:0"]
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    seen = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    assert memory.total == seen.total
    used = memory.total - memory.parts[DevicePart.FREE] - memory.parts[DevicePart.DRIVER]
    assert used == pytest.approx(seen.used, abs=64 * MIB)


def test_a_window_has_its_start_its_peak_and_its_end(model, tmp_path):
    handler = memory_trace_handler(tmp_path, "rank0", model=model)
    train_step(model)
    with profile(profile_memory=True, on_trace_ready=handler):
        train_step(model)
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    (_, start), (_, end) = whole_at(tmp_path, Moment.START), whole_at(tmp_path, Moment.END)
    whole, peak = whole_at(tmp_path, Moment.PEAK)
    assert start[DevicePart.REQUESTED] < end[DevicePart.REQUESTED] + 100 * MIB
    reserved = peak[DevicePart.ALLOCATED] + peak[DevicePart.CACHED]
    assert peak[DevicePart.ALLOCATED] >= 100 * MIB
    assert reserved == torch.cuda.memory_reserved(0)  # nothing was given back
    assert whole.total == whole_at(tmp_path, Moment.END)[0].total


def test_each_watched_step_has_the_free_bytes_of_the_card(model, tmp_path):
    with MemoryMonitor(tmp_path, "rank0", flush_seconds=600) as monitor:
        train_step(model)
        monitored = monitor.step()
        free, total = torch.cuda.mem_get_info(0)
    assert monitored is not None
    (step,) = monitored.devices
    assert step.whole_free == pytest.approx(free, abs=64 * MIB)
    assert step.whole_total == total
    assert step.requested == torch.cuda.memory_stats(0)["requested_bytes.all.current"]


def test_what_filled_the_card_when_memory_ran_out(tmp_path):
    free, _ = torch.cuda.mem_get_info(0)
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        with record_on_oom(tmp_path, "rank0"), pytest.raises(torch.OutOfMemoryError):
            torch.empty(free, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    whole, parts = whole_at(tmp_path, Moment.END)
    assert parts[DevicePart.FREE] > 0
    assert whole.total >= torch.cuda.mem_get_info(0)[1]


@pytest.mark.skipif(not hasattr(torch.cuda, "MemPool"), reason="needs torch.cuda.MemPool")
def test_what_a_private_pool_keeps_is_told_apart(model, tmp_path):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        freed = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    del freed
    handler = memory_trace_handler(tmp_path, "rank0", model=model)
    with profile(profile_memory=True, on_trace_ready=handler):
        train_step(model)
    for moment in (Moment.START, Moment.END):
        _, parts = whole_at(tmp_path, moment)
        assert parts[DevicePart.PRIVATE_POOLS] == 50 * MIB
    _, parts = whole_at(tmp_path, Moment.END)
    of_pytorch = (DevicePart.REQUESTED, DevicePart.ROUNDING, DevicePart.CACHED, DevicePart.PRIVATE_POOLS)
    assert sum(parts.get(part, 0) for part in of_pytorch) == torch.cuda.memory_reserved(0)
    del kept
