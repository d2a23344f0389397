"""What is alive before a recording is found and named, whatever the program's objects do."""

from __future__ import annotations

import io
import multiprocessing
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import profile

from tb_memplugin import MemoryTracer, load, memory_trace_handler
from tb_memplugin.record.alive_before import Alive, alive_now, variable_names
from tb_memplugin.record.storages_alive import storages_alive
from tb_memplugin.trace import Category, Note

kept: Any = None
"""What a test keeps in a variable of this module."""


@pytest.fixture(autouse=True)
def nothing_is_kept():
    yield
    globals()["kept"] = None


def keep(value: Any) -> Any:
    globals()["kept"] = value
    return value


def of(tensor: torch.Tensor) -> Alive | None:
    key = tensor.untyped_storage()._cdata
    found = [alive for alive in alive_now() if alive.storage._cdata == key]
    assert len(found) <= 1
    return found[0] if found else None


def seen(tensor: torch.Tensor) -> tuple[Category, str]:
    found = of(tensor)
    assert found is not None
    return found.category, found.label


class Slots:
    __slots__ = ("empty", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory


@dataclass
class Batch:
    rows: torch.Tensor


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (lambda tensor: tensor, "kept"),
        (lambda tensor: {"rows": [tensor]}, "kept['rows'][0]"),
        (lambda tensor: Slots(deque([(1, tensor)])), "kept.memory[0][1]"),
        (lambda tensor: SimpleNamespace(batch=Batch(tensor)), "kept.batch.rows"),
        (lambda tensor: {(1, 2): tensor}, "kept[…]"),
    ],
)
def test_a_tensor_has_the_name_of_its_variable(holder, name):
    tensor = torch.ones(7)
    keep(holder(tensor))
    assert seen(tensor) == (Category.UNKNOWN, name)


def test_parameters_gradients_and_results_are_told_apart():
    layer = keep(nn.Linear(3, 2))
    layer(torch.ones(4, 3)).sum().backward()
    waiting = layer(torch.ones(4, 3)).tanh()
    assert seen(layer.weight) == (Category.PARAMETER, "kept.weight")
    assert seen(layer.weight.grad)[0] is Category.GRADIENT
    assert seen(waiting)[0] is Category.ACTIVATION


def test_the_search_for_names_ends_when_all_that_are_wanted_have_one():
    keep([torch.ones(17), torch.ones(18)])
    first, second = (tensor.untyped_storage()._cdata for tensor in kept)
    names = variable_names({second})
    assert (names[first], names[second]) == ("kept[0]", "kept[1]")
    assert second not in variable_names({first})
    assert variable_names(set()) == {}


def test_storages_that_are_known_are_left_out():
    keep(torch.ones(19))
    key = kept.untyped_storage()._cdata
    assert key in [alive.storage._cdata for alive in alive_now()]
    assert key not in [alive.storage._cdata for alive in alive_now(excluded=[key])]


def test_what_only_the_graph_saved_is_found_without_running_hooks():
    rows = torch.ones(5, 3, requires_grad=True)
    unpacked: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    def saved() -> list[str]:
        labels = [alive.label for alive in alive_now() if alive.storage.nbytes() == 60]
        return sorted(label for label in labels if label.startswith("saved for"))

    total = (rows * 2).exp().sum()  # the graph keeps the result of exp, and nothing else does
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        hooked = (rows * 3).sigmoid().sum()
    assert saved() == ["saved for ExpBackward0", "saved for SigmoidBackward0"]
    assert unpacked == []
    (total + hooked).backward()
    assert saved() == []


def test_memory_that_torch_did_not_allocate_is_left_out():
    assert of(torch.from_numpy(np.ones(9))) is None
    assert of(torch.frombuffer(bytearray(40), dtype=torch.uint8)) is None


@pytest.mark.parametrize("kind", [torch.UntypedStorage, torch.ByteStorage])
def test_a_storage_without_a_tensor_is_found(kind):
    before = {alive.storage.data_ptr() for alive in alive_now()}
    bare = kind(12_345)
    (found,) = [alive for alive in alive_now() if alive.storage.data_ptr() not in before]
    assert (found.storage.data_ptr(), found.storage.nbytes()) == (bare.data_ptr(), 12_345)


def test_views_count_once_with_the_whole_storage():
    whole = torch.ones(100)
    part = whole[10:20]
    found = of(part)
    assert found is not None
    assert found.storage.nbytes() == 400


class Liar:
    """Claims to be a tensor, and is furious at everybody who looks."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch.Tensor

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("looked at")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")

    def __len__(self) -> int:
        raise RuntimeError("counted")

    def __iter__(self) -> Any:
        raise RuntimeError("walked")


class HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("listed")

    def __iter__(self) -> Any:
        raise RuntimeError("walked")

    def __len__(self) -> int:
        raise RuntimeError("counted")


class Watched(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Watched.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_hostile_objects_are_skipped_and_none_of_their_code_runs():
    tensor = torch.ones(11)
    keep([Liar(), HostileDict(held=tensor), weakref.ref(tensor), tensor])
    assert seen(tensor) == (Category.UNKNOWN, "kept[3]")


def test_tensors_of_subclasses_are_found_and_their_code_does_not_run():
    tensor = keep(torch.ones(13).as_subclass(Watched))
    Watched.calls = 0
    sizes = [alive.storage.nbytes() for alive in alive_now() if alive.label == "kept"]
    assert (sizes, Watched.calls) == ([52], 0)
    del tensor


def test_a_circle_of_containers_ends():
    circle: list[Any] = [torch.ones(3)]
    circle.append(circle)
    keep(circle)
    assert seen(circle[0])[1] == "kept[0]"


def test_fake_and_meta_tensors_have_no_bytes():
    with FakeTensorMode():
        fake = torch.ones(1000)
    meta = torch.ones(1000, device="meta")
    assert not any(alive.storage.nbytes() == 4000 and alive.device == "meta" for alive in alive_now())
    assert fake.shape == meta.shape


def test_storages_of_fake_tensors_are_left_out_without_a_warning():
    with FakeTensorMode():
        fake = torch.empty(77_777).untyped_storage()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fake.nbytes() not in [alive.storage.nbytes() for alive in alive_now()]


def test_nothing_is_kept_alive():
    tensor = torch.ones(17)
    keep({"tensor": tensor})
    reference = weakref.ref(tensor)
    assert variable_names({tensor.untyped_storage()._cdata})
    assert list(alive_now())
    keep(None)
    del tensor
    assert reference() is None


def test_a_view_that_torch_refuses_to_differentiate_does_not_end_the_search():
    base = torch.ones(300, requires_grad=True).clone()
    with torch.no_grad():
        view = base.view(3, 100)
    base.mul_(2)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        view.grad_fn  # noqa: B018  # what a search must not ask for
    assert base.untyped_storage().data_ptr() in {one.storage.data_ptr() for one in alive_now()}
    assert base.untyped_storage().data_ptr() in {one.data_ptr() for one in storages_alive()}


def test_memory_that_numpy_looks_at_and_memory_read_from_a_file_are_torchs_numpys_is_not():
    shared, written = torch.randn(30), io.BytesIO()
    torch.save(torch.randn(40), written)
    written.seek(0)
    loaded, numpys = torch.load(written), torch.from_numpy(np.zeros(50))
    shared.numpy()
    assert not any(one.untyped_storage().resizable() for one in (shared, loaded, numpys))
    assert [of(one) is not None for one in (shared, loaded, numpys)] == [True, True, False]


class Comparing(type):
    """A class of classes that answers no question about them."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError

    def __hash__(cls) -> int:
        raise RuntimeError


class Nameless(type(torch.Tensor)):  # type: ignore[misc]
    def __getattribute__(cls, name: str) -> Any:
        if name == "__module__":
            raise RuntimeError
        return super().__getattribute__(name)


def test_classes_that_cannot_be_compared_or_named_hide_nothing():
    holder = Comparing("Holder", (), {})()
    holder.memory = torch.ones(10)
    of_nameless: Any = torch.ones(20).as_subclass(Nameless("Nameless", (torch.Tensor,), {}))
    keep([holder, of_nameless])
    assert seen(holder.memory) == (Category.UNKNOWN, "kept[0].memory")
    assert seen(of_nameless) == (Category.UNKNOWN, "kept[1]")


def test_scripted_modules_and_variables_without_names_are_passed_over():
    scripted = keep([torch.jit.script(nn.Linear(3, 3)), torch.ones(10)])
    globals()[3] = None  # type: ignore[index]
    try:
        assert seen(scripted[1]) == (Category.UNKNOWN, "kept[1]")
    finally:
        del globals()[3]  # type: ignore[arg-type]


class Scaled(nn.Module):
    """A parameter and a buffer of its own, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(11_111))
        self.register_buffer("offset", torch.ones(22_222))
        self.layer = nn.Linear(1, 33_333, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x).sum() * self.scale
        return result


def test_what_only_the_cpp_object_of_a_scripted_module_has_is_found():
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Scaled()), file)
    file.seek(0)
    model = torch.jit.load(file)
    sizes = {alive.storage.nbytes() for alive in alive_now()}
    assert {4 * 11_111, 4 * 22_222, 4 * 33_333} <= sizes
    del model


class RaisesOnAccess(torch.Tensor):
    """A tensor whose attributes raise, and that says it is of another class."""

    __class__ = property(lambda _: int)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_tensors_without_memory_are_counted_and_hostile_ones_are_looked_into():
    hostile = torch.ones(55_555).as_subclass(RaisesOnAccess)
    before: list[Note] = []
    list(alive_now(before))
    keep([torch.ones(3, device="meta"), torch.empty(0, device="meta"), torch.empty(0), hostile])
    after: list[Note] = []
    sizes = [alive.storage.nbytes() for alive in alive_now(after)]
    assert 55_555 * 4 in sizes
    (note,) = after
    assert (note.code, note.bytes) == ("tensors_without_memory", 0)
    assert count_in(note) == (count_in(before[0]) if before else 0) + 1


def count_in(note: Note) -> int:
    return int(note.split()[0].replace(",", ""))


def test_a_window_and_a_tracer_say_how_much_torch_did_not_allocate(tmp_path):
    model = nn.Linear(100, 10, bias=False)
    model.weight.data = torch.from_numpy(np.ones((10, 100), np.float32))
    with MemoryTracer().trace(model) as tracer:
        model(torch.ones(1, 100))
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler(tmp_path, "w", model=model)):
        model(torch.ones(1, 100))
    for trace in (tracer.trace_result(), load(tmp_path)):
        assert [note.bytes for note in trace.notes if note.code == "foreign"] == [4000]
        assert 4000 in trace.start.bytes.tolist()


def test_a_window_and_a_tracer_say_how_many_tensors_have_no_memory(tmp_path):
    keep(torch.ones(3, device="meta"))
    model = nn.Linear(3, 3)
    with MemoryTracer().trace(model) as tracer:
        model(torch.ones(1, 3))
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler(tmp_path, "w", model=model)):
        model(torch.ones(1, 3))
    (file,) = tmp_path.rglob("*.mem")
    for trace in (tracer.trace_result(), load(file)):
        assert "tensors_without_memory" in [note.code for note in trace.notes]


def without_memory() -> int:
    notes: list[Note] = []
    list(alive_now(notes))
    return sum(count_in(note) for note in notes if note.code == "tensors_without_memory")


def test_the_size_of_a_symbolic_tensor_is_not_asked_for():
    before, sizes = without_memory(), ShapeEnv()
    with FakeTensorMode(shape_env=sizes):
        symbolic = torch.empty(sizes.create_unbacked_symint())
    size: object = symbolic.untyped_storage().nbytes()
    assert isinstance(size, torch.SymInt)
    guards = len(sizes.guards)
    assert (without_memory() - before, len(sizes.guards)) == (0, guards)


def test_each_tensor_that_only_stands_for_one_is_counted_once():
    """Not fake ones, which compilers keep. A proxy is no tensor, and what a dead one stood for is gone."""
    before = without_memory()
    with FakeTensorMode() as mode:
        fake = [torch.ones(3), mode.from_tensor(torch.ones(5)), nn.Parameter(torch.ones(4))]
    meta = nn.Linear(3, 3, device="meta")
    real = torch.ones(21)
    keep(
        [
            fake,
            meta,
            real,
            weakref.proxy(real),
            weakref.proxy(torch.ones(22)),
            symbolic_trace(nn.Tanh()).graph,
        ]
    )
    assert without_memory() == before + len(list(meta.parameters()))
    sizes = [alive.storage.nbytes() for alive in alive_now()]
    assert (sizes.count(84), sizes.count(88)) == (1, 0)


def send(queue: Any) -> None:
    queue.put(torch.ones(3_333))
    queue.get()  # torch wants the memory to be there until the other process has opened it


def test_a_tensor_of_another_process_is_in_shared_memory(tmp_path):
    """Its bytes are not this process's allocator's, and count as their own device's."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=send, args=(queue,))
    process.start()
    sent, model = queue.get(timeout=120), nn.Linear(3, 3)
    queue.put(None)
    process.join()
    assert [alive.device for alive in alive_now() if alive.storage.nbytes() == 13_332] == ["shared"]
    with MemoryTracer().trace(model) as tracer:
        model(torch.ones(1, 3))
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler(tmp_path, "w", model=model)):
        model(torch.ones(1, 3))
    for trace in (tracer.trace_result(), load(tmp_path)):
        assert 13_332 not in trace.start.bytes[trace.start.device == trace.device_rows("cpu")[0]].tolist()
    (shared,) = load(tmp_path).device_rows("shared")
    assert load(tmp_path).start.bytes[load(tmp_path).start.device == shared].tolist() == [13_332]
    del sent


def test_objects_that_the_collector_has_set_aside_are_counted():
    script = """
import gc, sys, torch
from torch import nn
from torch.profiler import profile
from tb_memplugin import MemoryTracer, load, memory_trace_handler

data, model = torch.ones(1_000), nn.Linear(3, 3)

def train():
    local = torch.ones(10_000)
    gc.freeze()
    with MemoryTracer().trace(model) as tracer:
        model(torch.ones(1, 3))
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler(sys.argv[1], "w", model=model)):
        model(torch.ones(1, 3))
    return tracer.trace_result(), load(sys.argv[1])

for trace in train():
    (note,) = [note for note in trace.notes if note.code == "frozen_objects"]
    print(int(note.split()[4].replace(",", "")) > 1_000, trace.start.bytes.sum())
"""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=300, check=True
        )
    assert done.stdout.splitlines() == ["True 4048"] * 2  # all but the local variable
