"""Memory that torch takes or gives back without an operator, as FSDP2 does, is in the tracer's numbers."""

from __future__ import annotations

import gc
import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile

from tb_memplugin import MemoryTracer
from tb_memplugin.sources.storages import storages

RESIZE = torch.UntypedStorage.resize_


def test_a_storage_that_is_emptied_and_filled_again():
    model, tracer = nn.Linear(2, 2), MemoryTracer(device="cpu")
    with tracer.trace(model):
        held = torch.zeros(1000)
        held.untyped_storage().resize_(0)
        held.untyped_storage().resize_(8000)
        del held
    assert tracer.trace_result().window(0).tolist() == [0, 4000, 0, 8000, 0]
    assert torch.UntypedStorage.resize_ is RESIZE


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def below(events):
    """The events and all those inside them."""
    for event in events:
        yield event
        yield from below(event.children)


def test_fsdp2s_gathered_parameters_come_and_go(alone):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=alone)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    weight = next(model.parameters())
    assert [storage.nbytes() for storage, _ in storages(weight)] == [4 * 64 * 256]
    tracer = MemoryTracer(device="cpu")
    with tracer.trace(model, optimizer):
        step()
    with profile(profile_memory=True) as recorded:
        step()
    levels = tracer.trace_result().window(0)
    told = [
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in below(recorded.profiler.kineto_results.experimental_event_tree())
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation)
    ]
    expected = np.cumsum([0, *(size for _, size in sorted(told))])
    assert (levels.max(), levels[-1], len(levels)) == (expected.max(), expected[-1], len(expected))


def test_what_torch_load_reads_counts_and_goes():
    layer, tracer, file = nn.Linear(64, 128), MemoryTracer(), io.BytesIO()
    reads = torch._C.PyTorchFileReader.get_storage_from_record
    torch.save(layer.state_dict(), file)
    file.seek(0)
    with tracer.trace(layer):
        state = torch.load(file)
        layer.load_state_dict(state)
        del state
    size = 4 * (64 * 128 + 128)
    live = tracer.trace_result().live(0)
    assert int(live.max() - live[0]) == size
    assert live[-1] == live[0]
    assert torch._C.PyTorchFileReader.get_storage_from_record is reads


def test_a_file_that_is_mapped_takes_no_memory_of_torchs(tmp_path):
    layer, tracer = nn.Linear(64, 128), MemoryTracer()
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    with tracer.trace(layer):
        state = torch.load(tmp_path / "state.pt", mmap=True)
        assert state["weight"].shape == (128, 64)
    live = tracer.trace_result().live(0)
    assert live.max() == live[0]


def test_what_a_tensors_text_takes_is_the_profilers_and_torchs_function_comes_back():
    held, before = torch.arange(5000.0) + 0.5, torch._tensor_str._str
    tracer = MemoryTracer()
    gc.collect()
    with profile(profile_memory=True) as recorded:
        text = repr(held)
    with tracer.trace(nn.Identity()):
        assert repr(held) == text
    assert torch._tensor_str._str is before
    told = [
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in below(recorded.profiler.kineto_results.experimental_event_tree())
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation)
    ]
    assert (
        tracer.trace_result().window(0).tolist()
        == np.cumsum([0, *(size for _, size in sorted(told))]).tolist()
    )
    assert tracer.trace_result().notes == ()
