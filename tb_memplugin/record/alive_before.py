"""Find and name what is alive when a recording begins: all that Python, or autograd's graph, can reach.

What a window leaves alive is kept for the next one, which knows its blocks again. Of the buckets in which
`DistributedDataParallel` reduces gradients, torch tells only the sizes.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tb_memplugin.record.exact_cpu.counting import is_counting
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.storages import allocated_by_torch, memory_of, storages
from tb_memplugin.record.storages_alive import (
    is_leaf,
    node_of,
    other_threads_may_run,
    storages_alive,
    storages_behind,
    tensors_alive,
    young_storages_alive,
)
from tb_memplugin.record.tensor_metadata import Dense, dense
from tb_memplugin.record.tensors_inside import held_by
from tb_memplugin.record.torch_private.autograd import saved_names
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.torch_private.modules import MODULE_TABLES, bucket_figures, modules_in, parameters_in
from tb_memplugin.record.torch_private.tensors import (
    grad_of,
    is_nested,
    layout_of,
    storage_address,
    storage_key,
    untyped_storage,
)
from tb_memplugin.trace import Category, MemoryTrace, Note
from tb_memplugin.trace.tables import code_mask

MOST_NODES = 200_000
"""The largest number of autograd nodes that are looked at."""


_Described = tuple[torch.UntypedStorage, Category, str, Dense | None]


@dataclass(frozen=True, slots=True)
class Alive:
    """A storage that is alive, with what is known of it. `label` names a variable, or an autograd node.

    `tensor` is a tensor that lies in it, None if only the storage is known.
    """

    storage: torch.UntypedStorage
    device: str
    category: Category = Category.UNKNOWN
    label: str = ""
    tensor: Dense | None = None


def alive_now(notes: list[Note] | None = None, excluded: Iterable[int] = ()) -> Iterator[Alive]:
    """Yield each storage with memory that torch allocated, once.

    What they are is known of parameters and their gradients, of what autograd computed and of what it saved
    for a backward that can still run. If another thread may run backward, neither this nor variables are
    looked for, and gradients that Python does not know are left out.

    Args:
        notes: a list that gets a note on how many tensors had no memory to look at, and one on how many
            objects Python does not list, if there are any.
        excluded: the `storage_key` of storages that are left out.
    """
    alone = not other_threads_may_run()
    notes = [] if notes is None else notes
    if (frozen := gc.get_freeze_count()) and not is_counting():
        notes.append(
            Note(
                f"The program has set {frozen:,} objects aside (gc.freeze()), and Python lists none of them. "
                "Of the tensors among them, only those that the model, the optimizer or global variables "
                "hold are counted here (on Linux, TB_MEMPLUGIN_EXACT_CPU=1 counts all of the CPU).",
                "frozen_objects",
            )
        )
        if alone:
            variable_names({0})  # gives the tensors of variables storages that Python lists
    left_out = set(excluded)
    alive: dict[int, _Described] = {}
    for described in _described(notes) if alone else _not_described():
        storage, key = described[0], storage_key(described[0])
        if key not in alive and key not in left_out and allocated_by_torch(storage) and storage.nbytes():
            alive[key] = described
    names = variable_names(set(alive)) if alone else {}
    for key, (storage, category, label, tensor) in alive.items():
        yield Alive(storage, memory_of(storage), category, names.get(key, "") or label, tensor)


def _not_described() -> Iterator[_Described]:
    return ((storage, Category.UNKNOWN, "", None) for storage in storages_alive(of_gradients=False))


def _described(notes: list[Note]) -> list[_Described]:
    """Return storages, what they are, and how they are known. No code of the program runs."""
    described: list[_Described] = []
    with without_torch_functions():
        tensors, bare = tensors_alive()
        parameters = [tensor for tensor in tensors if issubclass(type(tensor), nn.Parameter)]
        leaves, results = list[torch.Tensor](), list[torch.Tensor]()
        for tensor in tensors:
            (leaves if is_leaf(tensor) else results).append(tensor)
        gradients = [gradient for gradient in map(grad_of, leaves) if gradient is not None]
        nodes = [node for node in map(node_of, results) if node is not None]
        described += _storages_of(parameters, Category.PARAMETER)
        described += _storages_of(gradients, Category.GRADIENT)
        described += _saved_in(nodes)
        described += _storages_of(results, Category.ACTIVATION)
        described += _storages_of(tensors, Category.UNKNOWN)
        described += [(storage, Category.UNKNOWN, "", None) for storage in bare]
        passed_over = sum(map(_has_no_memory, tensors))
    if passed_over:
        notes.append(
            Note(
                f"{passed_over:,} tensors that were alive before have no memory that torch tells (they are "
                "on the meta device, or wrap other tensors), and count as 0 bytes.",
                "tensors_without_memory",
                0,
            )
        )
    return described


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor that should have memory of its own has none that torch tells."""
    if layout_of(tensor) is not torch.strided:  # its parts are looked at
        return False
    try:
        storage = untyped_storage(tensor)
    except (RuntimeError, NotImplementedError):  # functorch's
        return True
    size = storage.nbytes()
    if type(size) is not int:  # symbolic, of a fake tensor: to ask whether it is 0 would add a guard
        return True
    return not storage_address(storage) and size > 0


def _storages_of(tensors: Iterable[torch.Tensor], category: Category) -> Iterator[_Described]:
    for tensor in tensors:
        for storage in storages_behind(tensor):
            yield storage, category, "", _dense(tensor)


def _dense(tensor: torch.Tensor) -> Dense | None:
    """Return what a tensor is, None for one whose parts, or whose class, have the memory."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and layout_of(tensor) is torch.strided
    return dense(tensor) if is_plain and not is_nested(tensor) else None


def _saved_in(roots: Iterable[Any]) -> Iterator[_Described]:
    """Yield the storages that the graph below some nodes saved. Hooks of saved tensors do not run."""
    for node in nodes_below(roots):
        for saved in saved_by(node):
            tensor = getattr(saved, "data", None)  # not in older versions of torch
            if isinstance(tensor, torch.Tensor):
                for storage in storages_behind(tensor):
                    yield storage, Category.ACTIVATION, f"saved for {node.name()}", _dense(tensor)


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield some nodes of autograd and all below them, each once, at most `MOST_NODES`."""
    pending, visited = list(roots), set[Any]()
    while pending and len(visited) < MOST_NODES:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending += [following for following, _ in node.next_functions if following is not None]
            yield node


def saved_by(node: Any) -> Iterator[Any]:
    """Yield what a node of autograd has saved; its `data` is the tensor."""
    for name in saved_names(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed by a backward that has run
            continue
        yield from saved if isinstance(saved, tuple | list) else (saved,)


MOST_OBJECTS = 20_000
"""The largest number of objects that are looked into."""

MOST_ITEMS = 1_000
"""The largest number of items of one container that are looked into."""

DEEPEST = 6
"""How many attributes and indices a name has at most."""

_CLOSED = (ModuleType, FunctionType, type, str, bytes, bytearray, int, float, complex, bool, type(None))
_RUNNING = (torch.optim.Optimizer, torch.profiler.profile)
"""Objects that do not name what they hold: a parameter in `optimizer.param_groups` is the model's."""


def variable_names(wanted: Set[int]) -> dict[int, str]:
    """Return the names of storages by their `storage_key`: that of the variable nearest to the running code.

    The search ends when all that are `wanted` have names.

    The variables are those of the modules whose functions run on this thread, the innermost first.
    (Local variables are not searched: before Python 3.13, reading them keeps what they hold alive.) No code
    of the program runs: neither properties nor `__getattr__`, `__len__`, `__iter__` or `__eq__`.
    """
    names: dict[int, str] = {}
    nameless = set(wanted)
    pending: deque[tuple[str, int, Any]] = deque()
    for space in _namespaces(sys._getframe(1)):
        pending.extend(
            (name, 0, value)
            for name, value in list(space.items())
            if type(name) is str and not name.startswith("__")
        )
    visited: set[int] = set()
    while pending and nameless and len(visited) < MOST_OBJECTS:
        name, depth, value = pending.popleft()
        if id(value) in visited or issubclass(type(value), _CLOSED):
            continue
        visited.add(id(value))
        if issubclass(type(value), torch.Tensor):
            nameless.discard(_note(names, name, value))
        elif depth < DEEPEST and not issubclass(type(value), _RUNNING):
            pending.extend((name + part, depth + 1, inner) for part, inner in _inside(value))
    return names


def _namespaces(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the global variables of the modules that run, without those of torch and of this package."""
    visited: set[int] = set()
    while frame is not None:
        space, package = frame.f_globals, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if id(space) not in visited and package not in ("torch", "tb_memplugin"):
            visited.add(id(space))
            yield space
        frame = frame.f_back


def _note(names: dict[int, str], name: str, tensor: torch.Tensor) -> int:
    """Name a tensor's storage, and return its key; 0 for a tensor without one (functorch's, sparse)."""
    try:
        with without_torch_functions():
            key: int = storage_key(untyped_storage(tensor))
    except (RuntimeError, NotImplementedError):
        return 0
    names.setdefault(key, name)
    return key


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (".name" or "[key]", object) of everything in a container or an instance."""
    is_module = issubclass(type(value), torch.nn.Module)
    for key, inner, is_attribute in held_by(value, MOST_ITEMS):
        is_table = is_attribute and key in MODULE_TABLES
        if is_module and is_table and issubclass(type(inner), dict):  # a scripted module has other tables
            yield from ((f".{name}", member) for name, member in list(dict.items(inner)))
        elif not is_attribute:
            yield (f"[{key!r}]" if type(key) in (str, int) else "[…]"), inner
        elif type(key) is str:
            yield f".{key}", inner


def buckets_alive(models: Mapping[str, nn.Module], names: ModuleNames) -> list[tuple[int, int]]:
    """Return (module row, bytes) of every bucket of the models that is alive and out of Python's reach.

    Where gradients are views of their bucket, Python reaches it by them, unless there are none now.
    """
    buckets = bucket_sizes(models, names, rebuilt_only=True)
    gradients = (
        gradient
        for model in models.values()
        for parameter in parameters_in(model)
        if (gradient := grad_of(parameter)) is not None
    )
    reached = Counter(
        {
            storage_address(storage): storage.nbytes()
            for gradient in gradients
            for storage, _ in storages(gradient)
        }.values()
    )
    alive = []
    for row, size in buckets:
        if reached[size]:
            reached[size] -= 1
        else:
            alive.append((row, size))
    return alive


def bucket_sizes(
    models: Mapping[str, nn.Module], names: ModuleNames, *, rebuilt_only: bool = False
) -> list[tuple[int, int]]:
    """Return (module row, bytes) of every bucket of the models.

    In its second iteration, `DistributedDataParallel` makes its buckets again in another order. Both are
    returned, since NCCL holds the first ones for some time after that; with `rebuilt_only`, the new ones
    where there are any.
    """
    buckets = []
    for model in models.values():
        for _, module in modules_in(model):
            if isinstance(module, DistributedDataParallel):
                logging_data = bucket_figures(module)
                texts = [str(logging_data.get(key, "")) for key in ("bucket_sizes", "rebuilt_bucket_sizes")]
                if rebuilt_only:
                    texts = [text for text in texts if text.strip()][-1:]
                row = names.row_of.get(id(module), -1)
                buckets += [(row, int(size)) for text in texts for size in text.split(",") if size.strip()]
    return buckets


SMALLEST_SHARE = 0.001
"""The share of the live bytes from which on the program's objects are searched for their storages."""


@dataclass(frozen=True, slots=True)
class CarriedBlock:
    """A block's category, the key of its module and its label."""

    category: Category
    module: str
    label: str


@dataclass(frozen=True, slots=True)
class CarriedBlocks:
    """The blocks by their storages, which are held weakly: a later storage at the same address is another.

    `unreached` has the bytes of the CPU's other blocks by (device name, address): Python did not have them.
    """

    _blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], CarriedBlock]] = field(default_factory=dict)
    unreached: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: MemoryTrace, before: CarriedBlocks) -> CarriedBlocks:
        """Return the blocks alive at the end of a trace that was just recorded, where Python has them.

        Models and optimizers tell in each window what they hold, so what they hold is left out. Objects
        that Python created last are searched first, and no more once less than `SMALLEST_SHARE` of the live
        bytes is left to find; then none is `unreached`.

        Args:
            before: what the window before left.
        """
        carried = cls({key: kept for key, kept in before._blocks.items() if kept[0]() is not None})
        blocks = trace.allocations
        alive = blocks.freed >= len(trace.events)
        rows = np.flatnonzero(alive & (blocks.born >= 0) & ~_IS_HELD[blocks.category])
        small = SMALLEST_SHARE * blocks.bytes[alive].sum()
        keys = zip(
            [trace.devices[number].name for number in blocks.device[rows].tolist()],
            blocks.address[rows].tolist(),
            strict=True,
        )
        row_of = dict(zip(keys, rows.tolist(), strict=True))
        for search in (young_storages_alive, partial(storages_alive, of_gradients=False)):
            if blocks.bytes[list(row_of.values())].sum() <= small:
                break
            for storage in search():
                row = row_of.pop((memory_of(storage), storage_address(storage)), None)
                if row is not None:
                    carried._blocks[storage_key(storage)] = weakref.ref(storage), _block(trace, row)
        used = set(trace.events.address.tolist())
        carried.unreached.update((key, size) for key, size in before.unreached.items() if key[1] not in used)
        if blocks.bytes[list(row_of.values())].sum() > small:
            carried.unreached.update(
                (key, int(blocks.bytes[row])) for key, row in row_of.items() if key[0] == "cpu"
            )
        return carried

    def get(self, storage: torch.UntypedStorage) -> CarriedBlock | None:
        """Return what a storage was in the window before, None if it was not alive there."""
        reference, block = self._blocks.get(storage_key(storage), (None, None))
        return block if reference is not None and reference() is storage else None


def _block(trace: MemoryTrace, row: int) -> CarriedBlock:
    blocks = trace.allocations
    label, module = int(blocks.label[row]), int(blocks.module[row])
    return CarriedBlock(
        Category(int(blocks.category[row])),
        trace.modules[module].key if module >= 0 else "",
        trace.labels[label] if label >= 0 else "",
    )


_IS_HELD = code_mask((Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE))
