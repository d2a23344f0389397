"""Memory that torch takes or gives back without an operator, as FSDP2 does, is in the tracer's numbers."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tb_memplugin import MemoryTracer
from tb_memplugin.record.storages import storages
from tests.record.tracer.truth import profiled

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
    expected = profiled(step)
    levels = tracer.trace_result().window(0)
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
    expected, text = profiled(lambda: repr(held)), repr(held)
    with tracer.trace(nn.Identity()):
        assert repr(held) == text
    assert torch._tensor_str._str is before
    assert tracer.trace_result().window(0).tolist() == expected.tolist()
    assert tracer.trace_result().notes == ()


def test_what_no_operator_made_counts_when_the_block_ends_and_is_noted():
    """A generator's state is 5,056 bytes; the one that is gone by then is not known."""
    generator, tracer = torch.Generator(), MemoryTracer()
    kept = [generator.get_state()]
    with tracer.trace(nn.Identity()):
        kept = [generator.get_state() for _ in range(3)]
        generator.get_state()
    live = tracer.trace_result().live(0)
    assert int(live[-1] - live[0]) == 2 * 5056
    (note,) = tracer.trace_result().notes
    assert "Made without an operator" in note
    assert ": 3 tensors, 15,168 bytes." in note
    del kept
