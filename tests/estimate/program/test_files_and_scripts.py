"""Tests for programs that read files or receive tensors, and for TorchScript."""

from __future__ import annotations

import copy
import io
import multiprocessing
import shutil
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tb_memplugin import MemoryEstimator
from tb_memplugin.errors import MemPluginError

SIDE = 256
BYTES = 4 * SIDE * SIDE


def weights(folder: Path) -> Path:
    torch.save({"weight": torch.ones(SIDE, SIDE)}, folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize(("place", "held"), [("cuda", BYTES), ("cpu", 0)])
def test_what_torch_load_reads_counts_where_it_is_put_until_it_is_freed(
    tmp_path: Path, place: str, held: int
) -> None:
    path = weights(tmp_path)
    with MemoryEstimator() as estimator:
        read = torch.load(path, map_location=place)
        assert estimator.get_current_memory_allocated() == (held,)
        model = nn.Linear(SIDE, SIDE, bias=False, device="cuda")
        model.load_state_dict(read)
        assert estimator.get_current_memory_allocated() == (held + BYTES,)
        del read
        assert estimator.get_current_memory_allocated() == (BYTES,)


def test_a_tensor_takes_the_storage_that_a_library_read(tmp_path: Path) -> None:
    reader = torch._C.PyTorchFileReader(str(weights(tmp_path)))  # as Lightning's Fabric reads checkpoints
    with MemoryEstimator() as estimator:
        storage: Any = reader.get_storage_from_record("data/0", BYTES, torch.UntypedStorage)  # type: ignore[arg-type]
        read = torch.empty(0).set_(storage, 0, (SIDE, SIDE), (SIDE, 1))
        parameter = torch.empty(SIDE, SIDE, device="cuda")
        parameter.copy_(read)
        assert (read.shape, read.device.type) == ((SIDE, SIDE), "cpu")
        assert estimator.get_current_memory_allocated() == (BYTES,)


def test_safetensors_counts_what_it_reads(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    path = tmp_path / "weights.safetensors"
    library.save_file({"a": torch.ones(SIDE, SIDE), "b": torch.ones(2, 3, dtype=torch.int64)}, path)
    with MemoryEstimator() as estimator:
        read = library.load_file(path, device="cuda")
        assert estimator.get_current_memory_allocated() == (BYTES + 512,)
        assert {name: (tuple(one.shape), one.dtype) for name, one in read.items()} == {
            "a": ((SIDE, SIDE), torch.float32),
            "b": ((2, 3), torch.int64),
        }
    assert library.load_file(path)["b"].sum().item() == 6  # afterwards files are read again


def test_a_batch_of_real_data_can_be_copied() -> None:
    with MemoryEstimator():
        (batch,) = next(iter(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=4)))
        assert copy.deepcopy(batch).cuda().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_storages_have_addresses_that_tell_them_apart() -> None:
    """As transformers and safetensors find weights that share memory, before they save them."""
    with MemoryEstimator():
        layer, other = nn.Linear(8, 8, device="cuda"), nn.Linear(8, 8, device="cuda")
        view = layer.weight.detach()[2:]
        pointers = [each.untyped_storage().data_ptr() for each in (layer.weight, view, other.weight)]
        assert pointers[0] == pointers[1] != pointers[2]


def _send(queue: Any, is_received: Any) -> None:
    queue.put(torch.tensor([1, 2, 3]))
    is_received.wait(60)  # the receiver gets the file descriptor of the storage from this process


def test_a_tensor_from_another_process_keeps_its_values() -> None:
    context = multiprocessing.get_context("fork")
    queue, is_received = context.Queue(), context.Event()
    sender = context.Process(target=_send, args=(queue, is_received))
    sender.start()
    with MemoryEstimator():
        received = queue.get()
        assert received.cuda().tolist() == [1, 2, 3]
    is_received.set()
    sender.join(60)
    assert sender.exitcode == 0


def test_a_tensor_that_takes_a_storage_does_not_keep_it_for_good() -> None:
    with MemoryEstimator() as estimator:
        first = torch.empty(SIDE, SIDE, device="cuda")
        second = torch.empty(0, device="cuda").set_(first.untyped_storage(), 0, first.shape, first.stride())
        del first
        assert estimator.get_current_memory_allocated() == (BYTES,)
        del second
        assert estimator.get_current_memory_allocated() == (0,)


def test_weights_that_were_read_outside_of_fake_tensors_are_refused_by_name() -> None:
    real = nn.Linear(2, 2)
    with pytest.raises(MemPluginError, match="read with its weights") as error, MemoryEstimator():
        real.cuda()
    assert "from_config" in str(error.value)


def scripted(model: nn.Module, example: torch.Tensor) -> Any:
    return torch.jit.script(model)


def traced(model: nn.Module, example: torch.Tensor) -> Any:
    return torch.jit.trace(model, example)


@pytest.mark.parametrize("compiled", [scripted, traced])
def test_torchscript_runs_uncompiled_with_a_note(compiled: Any) -> None:
    with MemoryEstimator() as estimator:
        batch = torch.ones(SIDE, SIDE, device="cuda")
        model = compiled(nn.Sequential(nn.ReLU(), nn.Tanh()), batch)
        before = estimator.get_current_memory_allocated()
        result = model(batch)
        assert estimator.get_current_memory_allocated() == (before[0] + BYTES,)
    del result
    assert any("torch.jit" in note for note in estimator.estimate().notes)
    assert isinstance(torch.jit.script(nn.Tanh()), torch.jit.ScriptModule)  # afterwards it compiles again


def test_optimizers_that_torch_scripts_while_they_are_imported() -> None:
    """As with `from torch.distributed.optim import ZeroRedundancyOptimizer`."""
    found = find_spec("torch.distributed.optim.functional_adadelta")
    assert found is not None
    assert found.origin is not None
    spec = spec_from_file_location("torch.distributed.optim.again", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with MemoryEstimator():
        spec.loader.exec_module(module)
    assert isinstance(module._FunctionalAdadelta, type)


def test_a_checkpoint_that_the_run_saved_is_loaded_as_its_tensors_were(tmp_path: Path) -> None:
    """Two names of one storage are one storage again; numbers and small tensors keep their values."""
    path = tmp_path / "best.pt"
    with MemoryEstimator() as estimator:
        weight = nn.Parameter(torch.ones(SIDE, SIDE, device="cuda"))
        torch.save({"a": weight, "b": weight[1:], "epoch": 3, "lengths": torch.tensor([4, 7])}, path)
        assert path.stat().st_size < 100
        before = estimator.get_current_memory_allocated()[0]
        read = torch.load(path)
        assert estimator.get_current_memory_allocated()[0] == before + BYTES
        assert read["epoch"] == 3
        assert read["lengths"].tolist() == [4, 7]
        assert isinstance(read["a"], nn.Parameter)
        assert read["b"].untyped_storage().data_ptr() == read["a"].untyped_storage().data_ptr()
        assert tuple(read["b"].shape) == (SIDE - 1, SIDE)
        del read
        torch.load(path, map_location="cpu")
        torch.load(path, map_location={"cuda:0": "cpu"})
        torch.load(path, map_location=lambda storage, _: storage)
        assert estimator.get_current_memory_allocated()[0] == before
    assert not path.exists()


def test_a_checkpoint_is_found_copied_and_renamed_but_takes_no_other_files_place(tmp_path: Path) -> None:
    precious = tmp_path / "precious.pt"
    precious.write_text("trained for a week")
    with MemoryEstimator():
        (tmp_path / "step-1").mkdir()
        torch.save({"step": 1}, tmp_path / "step-1" / "last.pt")
        torch.save({"step": 2}, tmp_path / "two.pt")
        shutil.copy(tmp_path / "two.pt", precious)
        torch.save({"step": 3}, tmp_path / "three.pt")
        (tmp_path / "three.pt").replace(tmp_path / "two.pt")
        (tmp_path / "step-1").rename(tmp_path / "best")
        steps = [torch.load(tmp_path / name)["step"] for name in ("best/last.pt", "precious.pt", "two.pt")]
        assert steps == [1, 2, 3]
        buffer = io.BytesIO()
        torch.save([5], buffer)
        buffer.seek(0)
        assert torch.load(buffer) == [5]
    assert precious.read_text() == "trained for a week"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["best", "precious.pt"]


def test_files_that_were_there_stay_however_a_program_saves_over_them(tmp_path: Path) -> None:
    """By name and copied as the best, as in PyTorch's ImageNet example; by a buffer, as in Lightning."""
    last, best, opened = (tmp_path / name for name in ("last.pt", "best.pt", "opened.pt"))
    last.write_text("the last epoch")
    best.write_text("the best epoch")
    with MemoryEstimator():
        torch.save({"epoch": 4}, last)
        shutil.copyfile(last, best)
        assert torch.load(best)["epoch"] == 4
        buffer = io.BytesIO()
        torch.save({"epoch": 5}, buffer)
        (tmp_path / "temporary").write_bytes(buffer.getvalue())
        (tmp_path / "temporary").replace(best)
        assert torch.load(best)["epoch"] == 5
        last.rename(tmp_path / "new.pt")
        assert torch.load(tmp_path / "new.pt")["epoch"] == 4
        with opened.open("wb") as file:
            torch.save({"epoch": 6}, file)
        assert torch.load(opened)["epoch"] == 6
    assert (last.read_text(), best.read_text()) == ("the last epoch", "the best epoch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_safetensors_loads_what_the_run_saved(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    with MemoryEstimator() as estimator:
        model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)).cuda()
        model[1].weight = model[0].weight  # one of the two names is saved
        library.save_model(model, path)
        before = estimator.get_current_memory_allocated()[0]
        read = library.load_file(path, device="cuda")
        assert list(read) == ["0.weight"]
        assert estimator.get_current_memory_allocated()[0] == before + BYTES
        assert library.load_model(model, path) == (set(), [])
        with library.safe_open(path, "pt", "cuda") as file:
            assert file.get_slice("0.weight").get_shape() == [SIDE, SIDE]
            assert tuple(file.get_slice("0.weight")[:2].shape) == (2, SIDE)
    assert not path.exists()


PRETRAINED = """
import gc, torch, transformers

small = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=512, n_positions=64)
model = transformers.GPT2LMHeadModel(small).cuda()
held = torch.cuda.memory_allocated()
model.save_pretrained("new")
for name in ("new", "old"):
    again = transformers.AutoModelForCausalLM.from_pretrained(name).cuda()
    print("HELD", torch.cuda.memory_allocated() / held)
    del again
    gc.collect()
"""


def test_transformers_reads_a_model_that_it_saved_or_that_was_there(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=512, n_positions=64)
    transformers.GPT2LMHeadModel(small).save_pretrained(tmp_path / "old")
    (tmp_path / "train.py").write_text(PRETRAINED)
    command = [sys.executable, "-m", "tb_memplugin", "estimate", "--", "python", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert [line for line in ran.stderr.splitlines() if line.startswith("HELD")] == ["HELD 2.0"] * 2
    assert not list((tmp_path / "new").glob("*.safetensors"))
