"""Looking at all tensors alive must not be a reason for torch to copy any."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import profile

from tb_memplugin import LineTracer, MemoryTracer, load, memory_trace_handler
from tb_memplugin.record.storages_alive import frames_of_other_threads, other_threads_may_run, storages_alive
from tb_memplugin.record.torch_private.tensors import storage_address, storage_addresses
from tb_memplugin.store import files
from tb_memplugin.store.disk_sync import DiskSync


def alive() -> set[int]:
    return {storage._cdata for storage in storages_alive()}


def test_tensors_parameters_and_gradients_are_found():
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    batch = torch.ones(4)
    expected: list[Any] = [batch, layer.weight, layer.bias, layer.weight.grad, layer.bias.grad]
    assert {tensor.untyped_storage()._cdata for tensor in expected} <= alive()


def test_both_parts_of_a_sparse_tensor_and_of_a_sparse_gradient_are_found():
    table = nn.Embedding(9, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    sparse = torch.eye(3).to_sparse()
    gradient: Any = table.weight.grad
    parts = [sparse._indices(), sparse._values(), gradient._indices(), gradient._values()]
    assert {part.untyped_storage()._cdata for part in parts} <= alive()


def test_a_nested_tensors_shapes_are_found():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    parts = [nested, nested._nested_tensor_size(), nested._nested_tensor_strides()]
    assert {part.untyped_storage()._cdata for part in parts} <= alive()


def test_tensors_without_memory_are_left_out_and_do_no_harm():
    kept = torch.ones(5), torch.empty(0), torch.ones(3, device="meta")
    assert kept[0].untyped_storage()._cdata in alive()

    def inside(row: torch.Tensor) -> torch.Tensor:
        assert kept[0].untyped_storage()._cdata in alive()  # `row` has no storage of its own
        return row * 2

    assert torch.vmap(inside)(torch.ones(2, 3)).sum() == 12


def test_threads_that_wait_are_told_from_those_that_may_be_in_a_backward():
    begin, end = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        while not end.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    assert not other_threads_may_run()
    begin.set()
    while not other_threads_may_run():
        pass
    end.set()
    thread.join()


@pytest.mark.parametrize(("package", "may_run"), [("zmq", False), ("ipykernel", False), ("trainer", True)])
def test_threads_of_a_notebooks_kernel_run_nothing_of_torch(package, may_run):
    file = f"/env/lib/python3.11/site-packages/{package}/loop.py"
    functions: dict[str, Any] = {}
    exec(
        compile("def loop(begun, ended):\n begun.append(1)\n while not ended: pass", file, "exec"), functions
    )
    before = other_threads_may_run()  # other tests leave threads of torch.compile
    begun, ended = list[int](), list[int]()
    thread = threading.Thread(target=functions["loop"], args=(begun, ended))
    thread.start()
    while not begun:
        pass
    answer = other_threads_may_run()
    ended.append(1)
    thread.join()
    assert answer == (may_run or before)


def test_the_thread_that_flushes_our_files_hides_nothing(tmp_path, monkeypatch):
    """A window that begins while the disk is slow sees what every other window sees."""
    flushing, flushed = threading.Event(), threading.Event()

    def slow(path: str) -> None:
        flushing.set()
        while not flushed.is_set():
            pass  # in this file, as in a package: not in the standard library

    monkeypatch.setattr(files, "flush_path", slow)
    before = len(frames_of_other_threads())  # other tests leave threads of torch.compile
    disk = DiskSync("", failed=lambda error: None)
    disk.add(str(tmp_path))
    assert flushing.wait(60)
    try:
        assert len(frames_of_other_threads()) == before
        assert len(sys._current_frames()) == before + 2
    finally:
        flushed.set()
        disk.wait(60)


@pytest.fixture
def eager_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_gradients_of_another_thread_are_not_copied():
    """Autograd gives a parameter its gradient as it is, if nobody else holds it."""
    weight: Any = nn.Parameter(torch.ones(64))
    copied, stop = [], threading.Event()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            made = gradient * 2
            addresses.append(made.data_ptr())
            return made

    def look() -> None:
        while not stop.is_set():
            list(storages_alive(of_gradients=False))  # else it may crash: see there

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(300):
        addresses: list[int] = []
        weight.grad = None
        Twice.apply(weight).sum().backward()
        copied.append(weight.grad.data_ptr() != addresses[0])
    stop.set()
    looking.join()
    assert not any(copied)


def recorder(name: str, folder: Path, model: nn.Module) -> AbstractContextManager[Any]:
    if name == "tracer":
        return MemoryTracer().trace(model)
    if name == "lines":
        return LineTracer()
    handler = memory_trace_handler(folder, "worker", model=model)
    return profile(profile_memory=True, on_trace_ready=handler)


@pytest.mark.parametrize("name", ["handler", "tracer", "lines"])
def test_a_lazy_clone_goes_on_sharing_its_memory_while_it_is_recorded(tmp_path, name):
    """`data_ptr()` would give the clone memory of its own, at the first look at it."""
    model = nn.Linear(8, 8)
    tensor = torch.ones(250_000)
    clone = torch._lazy_clone(tensor)
    with recorder(name, tmp_path, model):
        model(torch.ones(2, 8)).sum().backward()
    private: Any = torch._C
    assert private._is_cow_tensor(clone)
    if name == "handler":
        (file,) = tmp_path.rglob("*.mem")
        assert load(file).start.bytes.tolist().count(1_000_000) == 1  # both have the same memory


def test_the_address_of_a_storage_is_what_data_ptr_returns():
    for tensor in (torch.ones(3), torch.from_numpy(np.ones(3)), torch.ones(3)[1:]):
        storage = tensor.untyped_storage()
        assert storage_address(storage) == storage.data_ptr()
        assert storage_addresses([storage]) == [storage.data_ptr()]
    for without in (torch.empty(0), torch.ones(3, device="meta")):
        assert storage_address(without.untyped_storage()) == 0
