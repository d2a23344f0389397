"""Find all storages known to Python without keeping references to the program's tensors.

Autograd assigns a gradient to its parameter without a copy only if nothing else refers to the gradient. So
this search must not hold a tensor while another thread runs: everything up to the storages happens within one
call into C, during which no other Python thread runs.

The program's other Python threads, without ours that flushes files: it runs nothing of torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, compress, starmap, tee
from operator import is_, is_not, not_, or_
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.record.storages import storages
from tb_memplugin.record.tensors_inside import subclasses
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.torch_private.modules import ScriptedModule, tensors_of_scripted
from tb_memplugin.record.torch_private.tensors import (
    TensorBase,
    grad_of,
    is_nested,
    layout_of,
    storage_address,
    untyped_storage,
)
from tb_memplugin.store.disk_sync import THREAD


def frames_of_other_threads() -> list[FrameType]:
    """Return the innermost frame of each Python thread but the calling one."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name == THREAD}
    ours.add(threading.get_ident())
    return [frame for ident, frame in sys._current_frames().items() if ident not in ours]


_new, _number, _clear, _delete, _interpreter = (
    ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    for name, result, *arguments in (
        ("PyThreadState_New", ctypes.c_void_p, ctypes.c_void_p),
        ("PyThreadState_GetID", ctypes.c_uint64, ctypes.c_void_p),
        ("PyThreadState_Clear", None, ctypes.c_void_p),
        ("PyThreadState_Delete", None, ctypes.c_void_p),
        ("PyInterpreterState_Get", ctypes.c_void_p),
    )
)


class OtherThreads:
    """Tells whether the program has had other Python threads since it was made, also some that have ended."""

    def __init__(self) -> None:
        self._ran, self._next = bool(frames_of_other_threads()), self._next_number()

    def have_run(self) -> bool:
        """Return the answer."""
        before, self._next = self._next, self._next_number()
        self._ran = self._ran or self._next != before + 1 or bool(frames_of_other_threads())
        return self._ran

    @staticmethod
    def _next_number() -> int:
        """Return Python's number of a thread that would begin now. Python numbers its threads in order."""
        state = _new(_interpreter())
        number: int = _number(state)
        _clear(state)
        _delete(state)
        return number


_OF_NOTEBOOKS = frozenset({"IPython", "debugpy", "ipykernel", "jupyter_client", "tornado", "zmq"})
"""The packages of a notebook's kernel, which has threads of its own all the time."""

_PACKAGE = re.compile(r".*[/\\](site|dist)-packages[/\\](?P<name>[^/\\]*)")
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
get_is_leaf, get_grad_fn = (getattr(TensorBase, name).__get__ for name in ("is_leaf", "grad_fn"))
_module_of = type.__dict__["__module__"].__get__
_address = object.__hash__
"""What an object is known by. `id` tells hooks of the program (`sys.audit`): other threads run meanwhile."""

_Candidate = torch.UntypedStorage | weakref.ref[torch.Tensor]


def storages_alive(*, of_gradients: bool = True) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of every tensor that Python's garbage collector knows; some are yielded twice.

    Args:
        of_gradients: include the gradients of leaves, which Python may not know. Must be False while
            another thread may run backward (`other_threads_may_run`): autograd writes gradients without
            holding the GIL, and reading one at that moment crashes the process.
    """
    candidates: list[_Candidate]
    alive: list[torch.UntypedStorage] = []
    # A collection would run other code, and so other threads, within the one call.
    with without_torch_functions(), collector_at_rest():
        try:
            candidates = list(_look(_storages_of, of_gradients))
        except (RuntimeError, NotImplementedError):  # a tensor without a storage, as functorch's wrappers are
            candidates = list(_look(_references, of_gradients))
        for candidate in candidates:
            if isinstance(candidate, torch.UntypedStorage):
                alive.append(candidate)
            elif (tensor := candidate()) is not None:
                alive += storages_behind(tensor)
                del tensor
    yield from filter(_has_memory, alive)


def young_storages_alive() -> list[torch.UntypedStorage]:
    """Return the storages of tensors in the garbage collector's young generations, without gradients.

    These generations have the objects created since the collector's last runs: some thousands, where a
    program has hundreds of thousands. Nothing is returned if other threads have Python frames: a reference
    to a tuple that one is building would make that thread fail.
    """
    if frames_of_other_threads():
        return []
    kinds = set(map(id, _classes()))
    with without_torch_functions(), collector_at_rest():
        return [
            storage
            for generation in (0, 1)
            for thing in gc.get_objects(generation=generation)
            if id(type(thing)) in kinds
            for storage in storages_behind(thing)
            if _has_memory(storage)
        ]


def storages_behind(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield a tensor's storages. Of a wrapper's tensors, each is known to the collector by itself."""
    has_parts = layout_of(tensor) is not torch.strided or is_nested(tensor)
    if has_parts and type(tensor) in (torch.Tensor, nn.Parameter):
        yield from (storage for storage, _ in storages(tensor))
        return
    try:
        yield untyped_storage(tensor)
    except (RuntimeError, NotImplementedError):
        return


def tensors_alive() -> tuple[list[torch.Tensor], list[torch.UntypedStorage]]:
    """Return every tensor, and every storage without one, that Python's garbage collector knows.

    The caller must drop the tensors soon. Must not be called while another thread may run backward
    (`other_threads_may_run`).
    """
    kinds = _classes()
    with collector_at_rest():
        referrers = gc.get_referrers(*kinds, torch.UntypedStorage, ScriptedModule)
        bare = [thing for thing in referrers if type(thing) is torch.UntypedStorage and not _is_meta(thing)]
        scripted = [thing for thing in referrers if type(thing) is ScriptedModule]
        inside = chain.from_iterable(map(tensors_of_scripted, scripted))
        return [*_of(kinds, iter(referrers)), *inside], bare


def _is_meta(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has no memory. Those of fake tensors warn when they are asked for an address."""
    return storage.device.type == "meta"


def other_threads_may_run() -> bool:
    """Whether another Python thread may be inside torch.

    One that is inside the standard library is not, nor inside a package that calls no function of torch: what
    such a package calls back has a frame of its own.
    """
    return not all(_is_apart(frame.f_code.co_filename) for frame in frames_of_other_threads())


def _is_apart(file: str) -> bool:
    package = _PACKAGE.search(file)
    return package["name"] in _OF_NOTEBOOKS if package else file.startswith(_STANDARD_LIBRARY)


def _tensors() -> Iterator[torch.Tensor]:
    """Yield all tensors that refer to their class, `torch.Tensor` or one made from it.

    `gc.get_objects()` would also return tuples that other threads are still building, and those threads
    would then fail in C code.
    """
    kinds = _classes()
    return _of(kinds, chain.from_iterable(starmap(gc.get_referrers, [kinds])))


def _classes() -> list[type]:
    """Return the classes of tensors with memory of their own.

    The search asks every object of the program for every one of them, so torch's other classes, which wrap
    tensors or have no memory, are left out. A compiler keeps fake tensors alive: they are no news to tell.
    """
    kinds: dict[int, type] = {}
    for kind in subclasses(torch.Tensor):
        module = _module_of(kind)  # read past its metaclass, which may be the program's
        is_torchs = type(module) is str and module.startswith("torch.")
        if kind is torch.Tensor or kind is nn.Parameter or not is_torchs:
            kinds[id(kind)] = kind
    return list(kinds.values())


def _look(
    candidates_of: Callable[[Iterator[torch.Tensor]], Iterator[_Candidate]], of_gradients: bool
) -> Iterator[_Candidate]:
    """Return an iterator, which the caller must drop when it is exhausted: it refers to tensors."""
    tensors, same = tee(_tensors())
    return (
        chain(candidates_of(tensors), candidates_of(_gradients(same)))
        if of_gradients
        else candidates_of(tensors)
    )


def _gradients(tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    tensors, same = tee(tensors)
    gradients, filled = tee(map(grad_of, compress(tensors, map(is_leaf, same))))
    return compress(gradients, map(partial(is_not, None), filled))


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no node of autograd. It is False for a view that torch refuses to differentiate.

    That is a view made without gradients whose base was then changed in place with them: asked for its node,
    torch raises an error.
    """
    try:
        return bool(get_is_leaf(tensor))
    except RuntimeError:
        return False


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node of autograd that made a tensor; None for a leaf, and for views as in `is_leaf`."""
    try:
        return get_grad_fn(tensor)
    except RuntimeError:
        return None


def _storages_of(tensors: Iterator[torch.Tensor]) -> Iterator[_Candidate]:
    tensors, same = tee(tensors)
    return chain(_dense(tensors), _references(_not_dense(same)))


def _references(tensors: Iterator[torch.Tensor]) -> Iterator[_Candidate]:
    return map(weakref.ref, tensors)


def instances_of(kind: type) -> list[Any]:
    """Return the objects of a class and of all classes made from it, without running their code.

    All objects of the program are asked for their classes within one call into C, so that no other thread
    meets a tuple that it is still building (see `_tensors`).
    """
    kinds = {_address(current): current for current in subclasses(kind)}
    used = kinds.keys() & set(map(_address, map(type, chain.from_iterable(starmap(gc.get_objects, [()])))))
    classes = list(map(kinds.__getitem__, used))
    return list(_of(classes, chain.from_iterable(starmap(gc.get_referrers, [classes]))))


def _of(kinds: list[type], things: Iterator[Any]) -> Iterator[torch.Tensor]:
    things, same = tee(things)
    return compress(things, map(set(map(_address, kinds)).__contains__, map(_address, map(type, same))))


def _dense(tensors: Iterator[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    tensors, same = tee(tensors)
    return map(untyped_storage, compress(tensors, _are_strided(same)))


def _not_dense(tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Return the sparse tensors, and the nested ones, whose shapes are also tensors."""
    tensors, same, nested = tee(tensors, 3)
    sparse = map(not_, _are_strided(same))
    return compress(tensors, map(or_, sparse, map(is_nested, nested)))


def _are_strided(tensors: Iterator[torch.Tensor]) -> Iterator[bool]:
    return map(partial(is_, torch.strided), map(layout_of, tensors))


def _has_memory(storage: torch.UntypedStorage) -> bool:
    return storage_address(storage) != 0  # meta, fake: no memory that an allocator knows
