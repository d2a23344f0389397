"""Files with tensors: checkpoints that a program saves and loads again, and what it reads from safetensors.

Tensors of an estimate have no values that anybody could load later. So a checkpoint is kept as a pickle in
this process, with the form of each tensor in place of its bytes. For the program there is a short file at its
path, which it can look for, copy and rename; it is removed at the end. A file that was there before is never
touched. No operator returns tensors that are read from files, so they are recorded here.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import _utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.known_values import values_of
from tb_memplugin.estimate.run.patches import Patches

_CHECKPOINTS = "torch.distributed.checkpoint"

MARK = b"tb_memplugin: nothing is saved in an estimate: "
"""How the short file at a checkpoint's path begins; the checkpoint's name follows."""

Values = Callable[[torch.Tensor], torch.Tensor | None]
KeepValues = Callable[[torch.Tensor, torch.Tensor | None], object]


class SavedFiles(Correction):
    """Keeps checkpoints in memory, and tells storages apart by an address."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace the functions that save and load."""
        address: Any = torch.UntypedStorage.data_ptr

        def data_ptr(storage: torch.UntypedStorage) -> int:  # transformers looks for weights that are shared
            return int(storage._cdata if storage.device.type == "meta" and mode.is_here else address(storage))

        def keep(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
            if values is not None:
                mode.keep_values(tensor, values)

        patches.set(torch.UntypedStorage, "data_ptr", data_ptr)
        Checkpoints(self.target.note, _copied, keep, mode.is_on).apply(patches)


def _copied(tensor: torch.Tensor) -> torch.Tensor | None:
    values = values_of(tensor)
    with no_dispatch():
        return None if values is None else values.detach().clone()


@dataclass(frozen=True, slots=True)
class _Form:
    """A saved tensor: which storage it is a view of, and how; `values` where they are known.

    A real one, such as the state of a random generator, is loaded as one.
    """

    storage: int
    elements: int
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_parameter: bool
    requires_grad: bool
    values: torch.Tensor | None
    is_real: bool


class _Pickler(pickle.Pickler):
    """Pickles objects, and keeps the forms of their tensors beside."""

    def __init__(self, file: io.BytesIO, values: Values) -> None:
        super().__init__(file, protocol=4)
        self.forms: list[_Form] = []
        self._values, self._alive = values, list[torch.Tensor]()

    def persistent_id(self, saved: Any) -> int | None:
        """Return the number of a tensor's form; None for what is pickled as it is."""
        if not isinstance(saved, torch.Tensor) or saved.layout is not torch.strided or _wraps(saved):
            return None
        storage = saved.untyped_storage()
        self._alive.append(saved)
        self.forms.append(
            _Form(
                storage._cdata,
                storage.nbytes() // saved.element_size(),
                saved.dtype,
                saved.device,
                tuple(saved.shape),
                saved.stride(),
                int(saved.storage_offset()),
                isinstance(saved, torch.nn.Parameter),
                saved.requires_grad,
                self._values(saved),
                type(saved) is torch.Tensor,
            )
        )
        return len(self.forms) - 1


class _Unpickler(pickle.Unpickler):
    """Makes tensors anew, those that shared a storage as views of one, on the device that `where` says."""

    def __init__(self, kept: _Kept, where: Callable[[torch.device], torch.device], keep: KeepValues) -> None:
        super().__init__(io.BytesIO(kept.pickled))
        self._forms, self._where, self._keep = kept.forms, where, keep
        self._storages: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def persistent_load(self, number: Any) -> torch.Tensor:
        """Return the tensor of a form."""
        form = self._forms[number]
        if form.is_real and form.values is not None and self._where(form.device).type == "cpu":
            with no_dispatch():
                real: torch.Tensor = form.values.clone()
                return real
        if form.storage not in self._storages:
            device = self._where(form.device)
            self._storages[form.storage] = torch.empty(form.elements, dtype=form.dtype, device=device)
        tensor = self._storages[form.storage].as_strided(form.size, form.stride, form.offset)
        self._keep(tensor, form.values)
        if form.is_parameter:
            return torch.nn.Parameter(tensor, form.requires_grad)
        return tensor.requires_grad_(form.requires_grad)


@dataclass(frozen=True, slots=True)
class _Kept:
    pickled: bytes
    forms: list[_Form]


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one run, or of one of its ranks.

    Args:
        values: returns a copy of a tensor's values, on the CPU; None where they are not known.
        keep: gives such values, or None, to a tensor that is loaded.
        is_on: whether the program's tensors are those of the run now; if not, files are real.
        shared: a folder of the run's own, through which its ranks load what others saved, without values.
    """

    note: Callable[[str], object]
    values: Values
    keep: KeepValues
    is_on: Callable[[], bool]
    shared: Path | None = None
    rank: int = 0
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _names: dict[Path, str] = field(default_factory=dict)

    def apply(self, patches: Patches) -> None:
        """Replace the functions of torch and of libraries that are imported, and those that copy files."""
        for module in (torch, torch.serialization):
            self._set(patches, module, "save", self._save)
            self._set(patches, module, "load", self._load)
        safetensors = sys.modules.get("safetensors.torch")
        if safetensors is not None:
            self._set(patches, safetensors, "save_file", self._save_tensors)
            self._set(patches, safetensors, "save_model", self._save_model)
            self._set(patches, safetensors, "load_model", self._load_model)
            for module in (safetensors, sys.modules["safetensors"]):
                self._set(patches, module, "safe_open", self._open)
        distributed = sys.modules.get(_CHECKPOINTS)
        for name in ("save", "async_save", "load") if distributed is not None else ():
            self._set(patches, distributed, name, self._ignored(f"{_CHECKPOINTS}.{name}"))
        for module, name in ((shutil, "copyfile"), (os, "replace"), (os, "rename")):
            self._set(patches, module, name, self._moved)
        patches.on_undo(self.remove_files)

    def name_of(self, file: Any) -> str | None:
        """Return the name of the checkpoint at a path or in an open file; None for other files."""
        if hasattr(file, "read"):
            position = file.tell()
            head = file.read(len(MARK) + 20)
            file.seek(position)
        else:
            path = Path(os.path.realpath(file))
            if path in self._names:
                return self._names[path]
            try:
                with path.open("rb") as opened:
                    head = opened.read(len(MARK) + 20)
            except OSError:
                return None
        is_ours = isinstance(head, bytes) and head.startswith(MARK)
        name = head[len(MARK) :].decode("ascii", "replace").split("\n")[0] if is_ours else ""
        if self.shared is not None and re.fullmatch(r"\d+-\d+", name) and (self.shared / name).exists():
            ours = (self.shared / name).read_bytes()  # in the run's own folder
            self._kept.setdefault(name, pickle.loads(ours))  # noqa: S301
        return name if name in self._kept else None

    def loaded(self, name: str, map_location: Any = None) -> Any:
        """Return what was saved, with tensors of the same forms."""
        kept = self._kept[name]
        return _Unpickler(kept, lambda device: _mapped(map_location, device), self.keep).load()

    def remove_files(self) -> None:
        """Remove the short files at the paths of checkpoints."""
        for path in self._names:
            if _is_short(path):
                path.unlink(missing_ok=True)

    def _set(self, patches: Patches, module: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = vars(module).get(name)
        if original is None:
            return

        def call(*arguments: Any, **keywords: Any) -> Any:
            if not self.is_on():
                return original(*arguments, **keywords)
            return replacement(original, *arguments, **keywords)

        patches.set(module, name, call)

    def _save(self, _: Any, obj: Any, f: Any, *__: Any, **___: Any) -> None:
        self._keep(obj, f, "torch.save")

    def _save_tensors(self, _: Any, tensors: Any, filename: Any, *__: Any, **___: Any) -> None:
        self._keep(dict(tensors), filename, "safetensors.torch.save_file")

    def _save_model(self, _: Any, model: torch.nn.Module, filename: Any, *__: Any, **___: Any) -> None:
        firsts = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
        self._keep(dict(reversed(firsts.values())), filename, "safetensors.torch.save_model")

    def _keep(self, saved: Any, file: Any, name: str) -> None:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled, self.values)
        pickler.dump(saved)
        kept, key = _Kept(pickled.getvalue(), pickler.forms), f"{self.rank}-{len(self._kept)}"
        self._kept[key] = kept
        if self.shared is not None:
            forms = [replace(form, values=None) for form in kept.forms]
            (self.shared / key).write_bytes(pickle.dumps(replace(kept, forms=forms)))
        short = MARK + key.encode() + b"\n"
        if hasattr(file, "write"):
            file.write(short)
            if isinstance(path := getattr(file, "name", None), str):
                self._names[Path(os.path.realpath(path))] = key
        else:
            self._at(Path(os.path.realpath(file)), key, short)
        self.note(f"{name} wrote nothing: tensors have no values in an estimate.")

    def _at(self, path: Path, name: str, short: bytes) -> None:
        if not path.exists() or _is_short(path):
            path.write_bytes(short)
        self._names[path] = name

    def _load(self, original: Any, f: Any, map_location: Any = None, *rest: Any, **more: Any) -> Any:
        saved = self.name_of(f)
        return original(f, map_location, *rest, **more) if saved is None else self.loaded(saved, map_location)

    def _load_model(
        self, original: Any, model: Any, filename: Any, strict: bool = True, device: Any = "cpu", **more: Any
    ) -> Any:
        saved = self.name_of(filename)
        if saved is None:
            return original(model, filename, strict, device, **more)
        model.load_state_dict(self.loaded(saved, device), strict=False)  # tied weights have one name
        return set(), []

    def _open(
        self, original: Any, filename: Any, framework: Any = "pt", device: Any = "cpu", **more: Any
    ) -> Any:
        saved = self.name_of(filename)
        if saved is None:
            return original(filename, framework, device, **more)
        return _OpenCheckpoint(self.loaded(saved, device), sys.modules["safetensors.torch"])

    def _ignored(self, name: str) -> Callable[..., None]:
        def ignored(*_: Any, **__: Any) -> None:
            self.note(f"{name} did nothing: tensors have no values in an estimate.")

        return ignored

    def _moved(self, original: Any, source: Any, target: Any, *rest: Any, **more: Any) -> Any:
        """Copy or rename a file; of a checkpoint only the short file, which takes the place of nothing."""
        before, after = (Path(os.path.realpath(path)) for path in (source, target))
        name = self.name_of(before) if before in self._names or _is_short(before) else None
        if name is not None:
            self._at(after, name, MARK + name.encode() + b"\n")
            if original.__name__ != "copyfile" and before != after:
                self._names.pop(before, None)
                if _is_short(before):
                    before.unlink()
            return target
        result = original(source, target, *rest, **more)
        for path in [path for path in self._names if before in path.parents]:
            self._names[after / path.relative_to(before)] = self._names[path]
        return result


def _wraps(tensor: Any) -> bool:
    """Whether a tensor consists of others, as a DTensor does."""
    return type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor)


def _is_short(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(MARK)) == MARK
    return False


def _mapped(location: Any, saved: torch.device) -> torch.device:
    """Return the device on which a tensor is loaded, by the `map_location` of `torch.load`."""
    if location is None:
        return saved
    if isinstance(location, dict):
        return torch.device(location.get(str(saved), saved))
    if callable(location):
        storage = location(torch.empty(1, dtype=torch.uint8, device="cpu").untyped_storage(), str(saved))
        return saved if storage is None else torch.device(storage.device)
    return torch.device("cuda", location) if isinstance(location, int) else torch.device(location)


class _OpenCheckpoint:
    """What `safe_open` returns for a checkpoint of this run."""

    def __init__(self, tensors: dict[str, torch.Tensor], library: Any) -> None:
        self._tensors = tensors
        self._names = {dtype: name for name, dtype in vars(library)["_TYPES"].items()}
        self.keys = self.offset_keys = lambda: list(tensors)
        self.get_tensor, self.get_tensors = tensors.__getitem__, tensors.copy

    def __enter__(self) -> _OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""

    def metadata(self) -> dict[str, str]:
        """Return what the libraries of Hugging Face write."""
        return {"format": "pt"}

    def get_slice(self, name: str) -> FileSlice:
        """Return a tensor that is read later."""
        tensor = self._tensors[name]
        return FileSlice(list(tensor.shape), self._names[tensor.dtype], lambda: tensor)


_SET = torch.ops.aten.set_
_LOADED = _SET.source_Storage_storage_offset

IN_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Makes transformers read weights on the program's thread: on others, tensors are not fake."""


class LoadedFiles(Correction):
    """Records loaded tensors where they are put; safetensors gives fake tensors of the file's shapes."""

    def rules(self) -> dict[Any, Rule]:
        """Return rules for operators that take a storage."""
        return {_LOADED: _set_storage, _SET.source_Storage: _set_storage}

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Wrap the function with which `torch.load` gives a fake tensor its device, and `safe_open`."""
        restore: Any = getattr(_utils, "_restore_device_fake_mode", None)

        def restored(tensor: torch.Tensor) -> Any:
            loaded = restore(tensor)
            if mode.is_on():
                mode.settle(mode.layers.scope())
                mode.see([loaded], _LOADED)
            return loaded

        if restore is not None:  # PyTorch 2.7 and newer
            patches.set(_utils, "_restore_device_fake_mode", restored)
        if IN_ONE_THREAD not in os.environ:
            os.environ[IN_ONE_THREAD] = "1"
            patches.on_undo(lambda: os.environ.pop(IN_ONE_THREAD, None))
        library = sys.modules.get("safetensors.torch")
        if library is not None:
            original: Any = vars(library)["safe_open"]

            def opened(filename: Any, framework: str = "pt", device: Any = "cpu", **more: Any) -> Any:
                if not mode.is_on():
                    return original(filename, framework=framework, device=device, **more)
                return _FakeFile(original(filename, framework="np"), vars(library)["_TYPES"], device)

            for module in (library, sys.modules["safetensors"]):
                patches.set(module, "safe_open", opened)


def _set_storage(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run without FakeTensorMode's cache, whose keys would keep the storage alive.

    A real storage, which libraries that read checkpoints on their own put into tensors (Lightning's Fabric),
    has a fake one in its place: fake tensors take no other.
    """
    tensor, storage, *layout = args
    if storage.device.type != "meta":
        args = (tensor, torch.UntypedStorage(storage.nbytes(), device="meta"), *layout)
    enabled, mode.cache_enabled = mode.cache_enabled, False
    try:
        return mode.quietly(func, *args, **kwargs)
    finally:
        mode.cache_enabled = enabled


class _FakeFile:
    """An open safetensors file whose tensors are fake. The library reads into real memory of the device."""

    def __init__(self, file: Any, types: dict[str, torch.dtype], device: Any) -> None:
        self._file, self._types, self._device = file, types, device
        self.offset_keys: Callable[[], list[str]] = file.keys
        self.keys: Callable[[], list[str]] = file.keys
        self.metadata: Callable[[], dict[str, str] | None] = file.metadata

    def __enter__(self) -> _FakeFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> FileSlice:
        """Return a tensor of the file that is read later."""
        real = self._file.get_slice(name)
        return FileSlice(real.get_shape(), real.get_dtype(), partial(self.get_tensor, name))

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file."""
        real = self._file.get_slice(name)
        return torch.empty(real.get_shape(), dtype=self._types[real.get_dtype()], device=self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the file."""
        return {name: self.get_tensor(name) for name in self.keys()}


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A tensor of an open file that is not read yet, with the name of its type in safetensors."""

    shape: list[int]
    dtype: str
    read: Callable[[], torch.Tensor]

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return self.shape

    def get_dtype(self) -> str:
        """Return the name of the tensor's type."""
        return self.dtype

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.read()[part]
