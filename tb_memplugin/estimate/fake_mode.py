"""The fake-tensor mode that keeps count: every operator's results are followed from birth to death."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import _DISPATCH_META_HANDLERS, FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch, _stats

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.fake_layers import FakeLayers
from tb_memplugin.estimate.fake_ledger import Block, FakeLedger, Place
from tb_memplugin.trace import Category, Phase

aten = torch.ops.aten

Rule = Callable[["CountingFakeMode", Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""`rule(mode, operator, args, kwargs)` gives the operator's results in place of FakeTensorMode."""

After = Callable[["CountingFakeMode", Any, tuple[Any, ...], Any, Place], None]
"""`after(mode, operator, args, results, place)`: what the operator's kernel takes besides its results."""

_OURS = {__file__, fake_tensor.__file__, _stats.__file__, _python_dispatch.__file__}
"""Files of the Python frames between an operator and us."""

_IN_PLACE_WITHOUT_MODES = frozenset(
    {
        aten.add.Tensor,
        aten.index_put.default,
        aten.index_add.default,
        aten.scatter.src,
        aten.scatter_add.default,
        aten.masked_scatter.default,
    }
)
"""What autograd does in place for plain tensors, and out of place under any mode: its engine's sums
(input_buffer.cpp), and derivatives that fill zeros (FunctionsManual.cpp, areAnyTensorSubclassLike)."""

_ZEROS = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default})
"""What makes them; into a gradient that came from elsewhere derivatives do not write."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE

_ENGINE = "_engine_run_backward"
"""The Python function from which autograd's engine runs: what has no other Python frame is its own."""


class CountingFakeMode(FakeTensorMode):
    """FakeTensorMode whose operators write the storages behind their results into a ledger.

    One mode and not two, since a mode of its own on top would cost each operator another way through the
    dispatcher. Operators inside an operator (its decomposition) are not seen: a kernel does not run them.

    Args:
        ledger: where allocations and frees go.
        layers: knows where the program is.
        rules: by operator, in place of what FakeTensorMode would do.
        after: by operator, what happens when it is done.
        engine_adds_in_place: whether autograd's engine adds gradients up as it does without modes.
        refusals: turns an operator's error into ours, or gives it back.
        has_device: whether CUDA calls reach a real device; else none is ever initialised.
    """

    def __init__(
        self,
        ledger: FakeLedger,
        layers: FakeLayers,
        rules: Mapping[Any, Rule],
        after: Mapping[Any, After],
        *,
        engine_adds_in_place: bool,
        refusals: Callable[[Any, Exception], Exception],
        has_device: bool,
    ) -> None:
        self._has_device = has_device
        super().__init__(allow_non_fake_inputs=True)
        self.ledger, self.layers = ledger, layers
        self.created: dict[Any, list[int]] = {}
        """By operator: how many storages it made, and their bytes."""
        self._rules, self._after = rules, after
        self._engine_adds = engine_adds_in_place
        self._refusals = refusals
        self._inside = False
        self._thread = threading.get_ident()
        self._composite: dict[Any, bool] = {}
        self._pending: tuple[weakref.ref[torch.UntypedStorage], int, Block, Any, Place] | None = None
        self.adds_bias = False
        """Whether `linear` runs: what it adds goes into its product (corrections/linear.py)."""

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the estimate's. What is patched is patched for all of them."""
        return threading.get_ident() == self._thread

    def is_on(self) -> bool:
        """Whether tensors are fake now: not while a data loader gets a batch."""
        return self.is_here and torch._C._get_dispatch_mode(_FAKE) is not None

    @property
    def avoid_device_init(self) -> bool:
        """Asked by FakeTensorMode, which looks at `torch.cuda.is_available`; that may be ours."""
        return not self._has_device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for dynamo's sake: nothing is compiled inside, and every operator would pay for it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on fake tensors, and note what it made."""
        if self._inside or func in _DISPATCH_META_HANDLERS:
            return self.dispatch(func, types, args, kwargs or {})
        place = self.layers.place()
        self.settle(place)
        rule = self._rules.get(func)
        self._inside = not self._is_composite(func)
        try:
            if rule is not None:
                out = rule(self, func, tuple(args), kwargs or {})
            else:
                out = self.dispatch(func, types, args, kwargs or {})
        except Exception as error:
            told = self._refusals(func, error)
            if told is error:
                raise
            raise told from error
        finally:
            self._inside = False
        if out is not NotImplemented:
            self._note(out, func, args, place)
        return out

    def __deepcopy__(self, memo: Any) -> CountingFakeMode:
        """Itself: fake tensors refer to their mode, and copies of modules belong to the same run."""
        return self

    def quietly(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """FakeTensorMode's own answer, for rules."""
        return self.dispatch(func, (), args, kwargs)

    def settle(self, place: Place) -> None:
        """Write down what died since the last operator, and a sum of the engine's that waited for that."""
        ledger = self.ledger
        if self._pending is not None:
            reference, size, block, func, where = self._pending
            self._pending = None
            storage = reference()
            if storage is None:  # the sum is gone already
                if not any(life.block is block for life in ledger.deaths):
                    ledger.give_back(ledger.take(size, block.device, func, where), where)
            elif not ledger.inherit(block, storage):
                ledger.born(storage, size, block.device, func, where)
        if ledger.deaths:
            ledger.settle(place)

    def held(self, size: int, func: Any, place: Place, category: Category, device: int = 0) -> Block:
        """Memory that no tensor owns, until it is given back: a library's workspace, a kernel's buffer."""
        block = self.ledger.take(size, device, func, place)
        block.category = category
        return block

    def passing(self, sizes: Sequence[int], func: Any, place: Place, device: int = 0) -> None:
        """Memory that a kernel takes, piece by piece, and gives back within an operator."""
        held = [self.held(size, func, place, Category.TEMPORARY, device) for size in sizes if size]
        for block in reversed(held):
            self.ledger.give_back(block, place)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """For rules: operators called inside are noted, each for itself."""
        inside, self._inside = self._inside, False
        try:
            with self:
                yield
        finally:
            self._inside = inside

    def _is_composite(self, func: Any) -> bool:
        """Whether it stands for other operators: these come here only in inference mode."""
        known = self._composite.get(func)
        if known is None:
            known = self._composite[func] = (
                isinstance(func, torch._ops.OpOverload)
                and func not in self._rules
                and func._can_decompose()
                and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
            )
        return known

    def _note(self, out: Any, func: Any, args: Sequence[object], place: Place) -> None:
        kind = type(out)
        if kind is FakeTensor:
            self._see(out, func, args, place)
        elif isinstance(out, tuple | list | dict):
            for one in _tensors(out):
                self._see(one, func, (), place)
        after = self._after.get(func)
        if after is not None:
            after(self, func, tuple(args), out, place)

    def _see(self, tensor: Any, func: Any, args: Sequence[object], place: Place) -> None:
        device = tensor.fake_device
        ledger = self.ledger
        if device.type != ledger.device_type:
            return
        if tensor.layout is not torch.strided:
            raise MemPluginError(
                f"{func} gives a tensor whose layout is {tensor.layout}: what it holds is not known.",
                where=str(func),
                fix="Use dense tensors there (nn.Embedding(sparse=False)).",
            )
        storage = tensor.untyped_storage()
        life = ledger.lives.get(storage._cdata)
        size = storage.nbytes()
        if life is not None:
            if life.block.bytes == size:
                return
            if not size:
                ledger.lost(storage, place)
                return
        elif not size or (self._pending is not None and self._pending[0]() is storage):
            return
        count = self.created.setdefault(func, [0, 0])
        count[0] += 1
        count[1] += size
        if func in _IN_PLACE_WITHOUT_MODES:
            summand = self._reused(func, args, size, place)
            if summand is not None:
                self._pending = (weakref.ref(storage), size, summand, func, place)
                return
        old = life.block if life is not None else None
        fresh = ledger.born(storage, size, ledger.device_row(device), func, place)
        if old is not None:  # resized: the new memory comes first, then the old goes back
            fresh.category, fresh.label = old.category, old.label
            ledger.give_back(old, place)

    def _reused(self, func: Any, args: Sequence[object], size: int, place: Place) -> Block | None:
        """The block that the engine would add into, or a derivative write into, if nobody else holds it.

        A view holds the tensor that it shows, and with it a second reference to the memory: the engine leaves
        views alone (input_buffer.cpp, can_accumulate_inplace). Gradients of weights and biases are views.
        """
        first = args[0] if args else None
        if not self.adds_bias and (place.phase is not Phase.BACKWARD or not self._engine_adds):
            return None
        if type(first) is not FakeTensor or first._is_view():
            return None
        if not self.adds_bias and not _called_by_engine():
            return None
        block = self.ledger.block_of(first.untyped_storage())
        if block is None or block.bytes != size:
            return None
        return block if func is aten.add.Tensor or block.made_by in _ZEROS else None


def _tensors(results: Any) -> Iterator[Any]:
    for one in results.values() if isinstance(results, dict) else results:
        if type(one) is FakeTensor:
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _called_by_engine() -> bool:
    """Whether no Python function asked for the operator that is being noted, but autograd's engine."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _ENGINE
