"""The dispatch mode that intercepts every operator while a tracer runs, and updates the ledger.

While any mode is on, torch does not write over tensors in backward, and computes some formulas in another
way (`isTensorSubclassLike` in torch's C++ code is then true for every tensor). `ModeEffects` bounds how much
of a peak that is. Its lists come from running every operator of torch's own test database forward and
backward, alone and under a mode that does nothing, with a counter in front of the allocator (torch 2.13.0,
CPU).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from time import time_ns
from types import TracebackType
from typing import Any

import torch

from tb_memplugin.record.beside_compiler import hidden_from_dynamo, is_hidden
from tb_memplugin.record.guard import UNOWNED, entry, guarded
from tb_memplugin.record.storage_lifetimes import Block, Buffer, Ledger
from tb_memplugin.record.storages import allocated_by_torch, storages_and_tensors
from tb_memplugin.record.torch_private.autograd import current_graph_task, current_node
from tb_memplugin.record.torch_private.compiler import default_stance, is_loaded, replace_stance
from tb_memplugin.record.torch_private.dispatch import (
    OPERATOR_FILE,
    HiddenFromDynamo,
    TorchDispatchMode,
    current_mode,
    current_modes,
    pop_mode,
    push_mode,
    schema_of,
    without_torch_functions,
)
from tb_memplugin.record.torch_private.tensors import storage_key
from tb_memplugin.record.tracer.kernels import Counted, KernelMemory, Origin, ResultStorage
from tb_memplugin.record.tracer.layers import Layers, ThreadLayers
from tb_memplugin.trace import Phase

_Tensor, _strided = torch.Tensor, torch.strided

_IN_PLACE_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        "add", "sub", "index_add", "index_fill", "index_put", "logical_and", "masked_fill", "masked_scatter",
        "put", "scatter", "scatter_add",
    )
)  # fmt: skip
"""Operators that autograd and derivative formulas run in place when no mode is on."""

_OTHER_FORMULAS = frozenset(
    f"{name}Backward{number}"
    for name, numbers in (
        ("BinaryCrossEntropy", "0"),
        ("BinaryCrossEntropyWithLogits", "0"),
        ("Clamp", "0"),
        ("Cumprod", "0"),
        ("Max", "1"),
        ("Median", "0"),
        ("Min", "1"),
        ("Nanmedian", "0"),
        ("Prod", "01"),
    )
    for number in numbers
)
"""Autograd nodes that compute several tensors in another way while a mode is on."""

_MORE_ALONE = frozenset(("MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0"))
"""Nodes that may take more without a mode, by less than their result: max() and others of a whole tensor."""


class ModeEffects:
    """Notes the peaks of one thread, reached in backward, that would be lower without a mode.

    Attributes:
        args: the arguments of the operator that has just run.
    """

    def __init__(self, layers: Layers, here: ThreadLayers) -> None:
        self._layers, self._here = layers, here
        self.args: tuple[Any, ...] = ()
        self._overwritten: tuple[Block, int, int] | None = None

    def note(self, operator: Any, out: Any, row: int, counted: Counted) -> None:
        """Note the peak that an operator has just reached in backward, on the device or in a layer (row)."""
        node = self._here.node_name
        if node in _MORE_ALONE:
            self._note_more(out, counted)
        if counted.top < self._layers.ledger.peak and counted.top < self._peak_of(row):
            return
        if node in _OTHER_FORMULAS:
            self._reached(counted.top, row, counted.top - self._here.node_level)
        elif isinstance(out, _Tensor) and out.layout is torch.sparse_coo:
            self._reached(counted.top, row, counted.bytes)  # autograd's copy of a sparse gradient
        else:
            self._overwritten = self._perhaps_overwritten(operator, out, row, counted)

    def block_of_first(self) -> Block | Buffer | None:
        """Return the memory of the operator's first argument; None for another than a plain tensor."""
        first = self.args[0] if self.args else None
        if type(first) is not _Tensor or first.layout is not _strided:
            return None
        try:
            return self._layers.ledger.blocks.get(storage_key(first.untyped_storage()))
        except (RuntimeError, NotImplementedError):  # functorch's wrappers
            return None

    def settle(self) -> None:
        """Note the last peak if the input of its operator was freed before the next operator."""
        if self._overwritten is not None:
            (block, top, row), self._overwritten = self._overwritten, None
            if block() is None:
                self._reached(top, row, block.bytes)

    def _perhaps_overwritten(
        self, operator: Any, out: Any, row: int, counted: Counted
    ) -> tuple[Block, int, int] | None:
        """Return (block, peak, row) of an input that torch may write over when no mode is on."""
        schema, args = schema_of(operator), self.args
        if schema is None or schema.name not in _IN_PLACE_ALONE or not args:
            return None
        if not (type(args[0]) is type(out) is _Tensor and args[0].layout is out.layout is _strided):
            return None
        blocks = self._layers.ledger.blocks
        block, result = (blocks.get(storage_key(tensor.untyped_storage())) for tensor in (args[0], out))
        if (
            isinstance(block, Block)
            and result is not None
            and result is not block
            and result.bytes == block.bytes
        ):
            return block, counted.top, row
        return None

    def _note_more(self, out: Any, counted: Counted) -> None:
        here, unseen = self._here, self._layers.unseen
        here.node_peak = max(here.node_peak, counted.top)
        if isinstance(out, _Tensor):
            unseen.higher_peak = max(unseen.higher_peak, here.node_peak + out.nbytes)

    def _peak_of(self, row: int) -> int:
        return self._layers.figures[row].peak if row >= 0 else 1 << 62

    def _reached(self, top: int, row: int, excess: int) -> None:
        if top == self._layers.ledger.peak:
            self._layers.unseen.excess = top, excess
        if row >= 0 and top == self._layers.figures[row].peak:
            self._layers.figures[row].excess = top, excess


_BACKWARD, _OTHER = Phase.BACKWARD, Phase.OTHER
_CALLERS = frozenset((KernelMemory.run.__code__.co_filename, OPERATOR_FILE))
"""Files whose functions only pass on the arguments of an operator."""

_WHERE = "an operator"


def _called(call: Callable[[], Any]) -> Any:
    return call()


def _tensors(results: Any) -> Iterator[torch.Tensor]:
    for result in results:
        if isinstance(result, torch.Tensor):
            yield result
        elif isinstance(result, list | tuple):
            yield from _tensors(result)


def _let_go(failed: TracebackType | None) -> None:
    """Clear the frames that the tracer adds to a failed operator's traceback.

    These frames hold the operator's arguments. Without the tracer they would not exist; with them, an error
    that the program keeps would keep tensors alive.
    """
    while failed is not None and failed.tb_frame.f_code.co_filename in _CALLERS:
        failed.tb_frame.clear()
        failed = failed.tb_next


class StorageMode(TorchDispatchMode):
    """Writes the storages of every operator's results into a ledger. Each thread has its own mode.

    It calls each operator with unchanged arguments and returns its result unchanged.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = layers
        self._ledger: Ledger = layers.ledger
        self._without_operator = False
        self._on_cpu = layers.ledger.device_type == "cpu"
        self._here: ThreadLayers = layers.here()
        self._kernels = KernelMemory(layers.ledger, layers.unseen, self._here.numbers, layers.failed)
        self._is_entered = False
        self._effects = ModeEffects(layers, self._here)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: hiding the mode from dynamo would load dynamo, which takes a second.

        See `storage_mode`.
        """
        return False

    @property
    def supports_higher_order_operators(self) -> bool:  # type: ignore[override]
        """Whether torch runs flex_attention or cond here: what they allocate is seen as one kernel's.

        Not where autograd is on and did not take the operator: the weights that an uncompiled branch closes
        over would get no gradient, silently.
        """
        return not torch.is_grad_enabled()

    @hidden_from_dynamo
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then record what it allocated."""
        if not self._layers.on:
            _drop_soon(self)
            return func(*args, **kwargs) if kwargs else func(*args)
        self._settle()
        began, out = time_ns(), None
        try:
            out = self._kernels.run(func, args, kwargs)
        except BaseException as error:
            args, kwargs = (), None
            _let_go(error.__traceback__ and error.__traceback__.tb_next)
            raise
        finally:  # an operator that raises may also have allocated memory
            self._ended(out, func, began, args)
            self._effects.args = ()
        return out

    def fail(self, where: str, error: BaseException) -> None:
        """Stop tracing after an error of ours."""
        self._layers.failed(where, error)

    def _settle_all(self) -> None:
        """Note what happened since the operator before."""
        FLAGS.look_for_dynamo()
        self._effects.settle()
        if self._ledger.freed or self._here.numbers.waiting:
            with self._ledger.lock:
                self._here.settle()

    _settle = entry(_settle_all, None, _WHERE)  # it reads no tensors

    @guarded(_WHERE)
    def _ended(self, out: Any, func: Any, began_ns: int, args: tuple[Any, ...] = ()) -> None:
        with self._ledger.lock:
            self._effects.args = args
            self._note(out, func, began_ns)

    @property
    def is_on(self) -> bool:
        """Whether the recording of this mode still runs."""
        return self._layers.on

    def keeps(self, layers: Layers) -> bool:
        """Whether this mode writes for the given layers."""
        return self._layers is layers

    def see(self, memory: torch.Tensor | torch.UntypedStorage) -> None:
        """Record a tensor or storage that torch allocated or resized on this thread without an operator."""
        if self._layers.on:
            with self._ledger.lock, without_torch_functions():
                self._here.settle()
                self._without_operator = True
                try:
                    self._note(memory, None, time_ns())
                finally:
                    self._without_operator = False

    def make_hidden_call(self, call: Callable[[], Any]) -> Any:
        """Make a call in which torch disables modes, and record what it allocates and frees."""
        if not self._layers.on:
            return call()
        self._settle()
        began = time_ns()
        try:
            return self._kernels.run(_called, (call,), None, is_operator=False)
        finally:
            self._ended(None, None, began)

    def _note(self, out: Any, func: Any, began_ns: int) -> None:
        here, ledger, kernels = self._here, self._ledger, self._kernels
        task = current_graph_task()
        in_backward = task != -1
        recomputing, node = False, None
        if in_backward:
            node = current_node()
            added_to = self._effects.block_of_first() if func is torch.ops.aten.add.Tensor else None
            row, recomputing = here.in_node(task, node, began_ns, added_to)
            phase = _BACKWARD
        else:
            if here.in_backward:
                here.end_backward()
            row, phase = here.row_and_phase()
        if ledger.freed:
            kernels.collect_freed()
        results: list[ResultStorage] = []
        kind = type(out)
        if kind is _Tensor:
            self._see(out, results)
        elif kind is tuple or kind is list:
            for tensor in _tensors(out):
                self._see(tensor, results)
        elif isinstance(out, torch.Tensor):
            self._see(out, results)
        elif isinstance(out, torch.UntypedStorage) and out.device.type == ledger.device_type:
            self._see_storage(out, results)
        if results or kernels.reports or kernels.freed or ledger.freed:
            counted = kernels.write(Origin(row, phase, func, recomputing), results)
            here.count(row, counted)
            if in_backward and counted.top >= 0 and not torch.is_grad_enabled():
                self._effects.note(func, out, row, counted)
        if in_backward:
            here.last_ns = time_ns()
        elif row < 0 and phase is _OTHER:
            here.outside(began_ns)
        if self._layers.results is not None:
            self._layers.results.ran(node, out)

    def _see(self, tensor: torch.Tensor, results: list[ResultStorage]) -> None:
        if type(tensor) is _Tensor and tensor.layout is _strided and not tensor.is_nested:
            if tensor.is_cpu if self._on_cpu else tensor.device.type == self._ledger.device_type:
                try:
                    storage = tensor.untyped_storage()
                except (RuntimeError, NotImplementedError):
                    return  # functorch's wrappers: the tensor inside is seen separately
                self._see_storage(storage, results, tensor)
            return
        if getattr(tensor, "fake_mode", None) is not None:
            return  # a FakeTensor holds no memory
        for storage, _, plain in storages_and_tensors(tensor):
            if storage.device.type == self._ledger.device_type:
                self._see_storage(storage, results, plain)

    def _see_storage(
        self, storage: torch.UntypedStorage, results: list[ResultStorage], tensor: torch.Tensor | None = None
    ) -> None:
        size = storage.nbytes()
        key = storage_key(storage)
        block = self._ledger.blocks.get(key)
        if block is None:
            if (
                size
                and not (results and any(storage_key(result.storage) == key for result in results))
                and (self._without_operator or allocated_by_torch(storage))
            ):
                results.append(ResultStorage(storage, size, tensor=tensor))
        elif (
            block.bytes != size
            or (self._without_operator and block.device != self._ledger.device_row(storage))
        ) and not any(result.was is block for result in results):
            results.append(ResultStorage(storage, size, block, tensor))

    def enter(self) -> None:
        """Turn the mode on for this thread."""
        _drop_ended()
        FLAGS.up()
        self._is_entered = True
        push_mode(self)

    def leave(self) -> None:
        """Turn the mode off for this thread, even if modes that began later are still on (as in generators).

        If called on another thread than `enter`, the mode stays on the thread where it began. It does
        nothing there, because the tracer is off, and is removed at the thread's next operator.
        """
        above = []
        while (top := current_mode()) is not None and top is not self:
            above.append(pop_mode())
        if top is self:
            pop_mode()
            self._kernels.close()
        for mode in reversed(above):
            push_mode(mode)
        _drop_ended()
        if self._is_entered:
            FLAGS.down()
            self._is_entered = False
        self._effects.settle()


def _drop_ended() -> None:
    """Remove modes from this thread whose recording ended on another thread."""
    while isinstance(top := current_mode(), StorageMode) and not top.is_on:
        pop_mode()


@guarded(_WHERE)
def _drop_soon(_: StorageMode) -> None:
    """Remove ended modes from this thread after the running operator, when torch has restored the mode."""
    if sys.getprofile() is None:
        sys.setprofile(_drop_when_back)


def _drop_when_back(*_: object) -> None:
    top = current_mode()
    if isinstance(top, StorageMode) and not top.is_on:
        sys.setprofile(None)
        _drop_ended()


class StorageModeBesideDynamo(HiddenFromDynamo, StorageMode):
    """A `StorageMode` that is hidden from dynamo, which would otherwise compile what runs inside it."""

    __torch_dispatch__ = StorageMode.__torch_dispatch__


def storage_mode(layers: Layers) -> StorageMode:
    """Return a new mode for the calling thread."""
    return (StorageModeBesideDynamo if must_hide_from_dynamo() else StorageMode)(layers)


def must_hide_from_dynamo() -> bool:
    """Whether a mode needs a wrapper that keeps dynamo from compiling what runs inside it.

    Newer versions of torch can mark the function instead, which has no cost per operator.
    """
    return is_loaded() and not is_hidden(StorageMode.__torch_dispatch__)


def modes_here(layers: Layers) -> Iterator[StorageMode]:
    """Yield the modes on the calling thread that write for the given layers; there is at most one."""
    for mode in current_modes():
        if isinstance(mode, StorageMode) and mode.keeps(layers):
            yield mode


class _Flags:
    """torch's flags for "a dispatch mode is on", which make compiled functions run uncompiled.

    The flags are per process, but modes save and restore them as if only one thread used modes. So this
    sets them with the tracer's first mode and clears them with the last, on any thread. With them alone, a
    function that must be one graph would raise an error: so this is also dynamo's stance meanwhile.

    Attributes:
        uncompiled_calls: how many calls of compiled functions ran uncompiled in this process.
    """

    backend = None

    def __init__(self) -> None:
        self.stance = "default"  # a program that changed the stance meanwhile may put this object back later
        self.uncompiled_calls = 0
        self._users = 0
        self._lock = threading.Lock()
        self._holder: TorchDispatchMode | None = None
        self._stance_before: Any = None
        self._knows_dynamo = False

    def _count_call(self) -> bool:
        self.uncompiled_calls += 1
        return False

    # dynamo reads it once in each call of a compiled function
    skip_guard_eval_unsafe = property(entry(_count_call, UNOWNED.end, "torch.compile", lambda _: False))

    def up(self) -> None:
        with self._lock:
            self._users += 1
            if self._holder is None:
                self._holder = TorchDispatchMode()
                self._holder.__enter__()
                pop_mode()
        self.look_for_dynamo()

    def look_for_dynamo(self) -> None:
        """Have compiled functions run uncompiled, from when dynamo is loaded."""
        if self._knows_dynamo or not is_loaded():
            return
        with self._lock:
            if self._users and not self._knows_dynamo:
                self._knows_dynamo, self._stance_before = True, default_stance()
                replace_stance(self._stance_before, self)
                self.stance = "force_eager"

    def down(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._holder is not None:
                push_mode(self._holder)
                self._holder.__exit__(None, None, None)
                self._holder = None
                if self._knows_dynamo:
                    replace_stance(self, self._stance_before)
                self._knows_dynamo, self._stance_before, self.stance = False, None, "default"


FLAGS = _Flags()
