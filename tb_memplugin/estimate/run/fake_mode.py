"""A fake-tensor mode that follows the results of every operator from allocation to free."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import compute_required_storage_length
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import _DISPATCH_META_HANDLERS, FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch, _stats
from torch.utils._pytree import tree_leaves, tree_map_only

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.kernels.table import Buffers, Call, Outliving
from tb_memplugin.estimate.run.fake_layers import FakeLayers
from tb_memplugin.estimate.run.fake_ledger import Block, FakeLedger, Scope
from tb_memplugin.estimate.run.known_values import KnownValues, UnknownValuesError, forget
from tb_memplugin.record.tensor_metadata import Dense, dense
from tb_memplugin.record.torch_private.tensors import is_zero_tensor
from tb_memplugin.trace import Category, Phase

if TYPE_CHECKING:
    from tb_memplugin.estimate.run.correction import Corrections

aten = torch.ops.aten

Rule = Callable[["CountingFakeMode", Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""`rule(mode, operator, args, kwargs)` returns the operator's results in place of FakeTensorMode."""

After = Callable[["CountingFakeMode", Any, tuple[Any, ...], Any, Scope], None]
"""`after(mode, operator, args, results, scope)` records what the kernel allocates besides its results."""

_BELOW_MODES = {fake_tensor.__name__, _stats.__name__, _python_dispatch.__name__}
"""Modules of torch whose functions an operator may pass on its way from its caller to the mode."""

_IN_PLACE_WITHOUT_MODES = frozenset(
    {
        aten.add.Tensor,
        aten.index_put.default,
        aten.index_add.default,
        aten.index_fill.int_Tensor,
        aten.scatter.src,
        aten.scatter_add.default,
        aten.masked_scatter.default,
        aten.put.default,
    }
)
"""Operators that autograd runs in place for plain tensors, but out of place under any dispatch mode.

Its engine sums gradients with them (input_buffer.cpp), and derivatives write into zeros with them
(FunctionsManual.cpp, areAnyTensorSubclassLike).
"""

_ZEROS = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default})
"""Operators that create zeros. Derivatives write only into these, not into a gradient from elsewhere."""

_SELECTING = frozenset({aten.index.Tensor, aten.masked_select.default, aten.nonzero.default})
"""Operators that take masks. Their rules count what a mask selects, and the indices that it becomes."""

_NOT_WRITTEN = frozenset({aten.new_empty.default, aten.new_empty_strided.default, aten.empty_like.default})
"""Operators that make room like another tensor. Where that is a constant, FakeTensorMode would take what was
in memory there for the values of results which another operator writes."""

_LAST_FIRST = frozenset({aten.native_dropout.default})
"""Operators whose kernels allocate their last result first (Dropout.cu: the mask)."""

_PACKAGE = str(Path(__file__).parents[2])
"""The folder of this package, whose frames are not the program's."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE

_ENGINE = "_engine_run_backward"
"""The Python function that calls autograd's engine: an operator called directly below it is the engine's."""


class CountingFakeMode(FakeTensorMode):
    """FakeTensorMode that records the storages of every operator's results in a ledger.

    It is one mode, since a second mode on top would send each operator through the dispatcher once more.
    Operators inside an operator (its decomposition) are not recorded: the real kernel does not run them.

    Args:
        ledger: records allocations and frees.
        layers: knows the current module and phase.
        corrections: what runs in place of FakeTensorMode and after it, and what kernels allocate.
    """

    def __init__(self, ledger: FakeLedger, layers: FakeLayers, corrections: Corrections) -> None:
        self._values = KnownValues()
        super().__init__(allow_non_fake_inputs=True)
        self.ledger, self.layers = ledger, layers
        self.created: dict[Any, list[int]] = {}
        """For each operator: the number of storages that it created, and their total bytes."""
        self._corrections, self._rules = corrections, dict(corrections.rules)
        self._after, self._kernels = corrections.after, corrections.kernels
        self._inside = False
        self._thread = threading.get_ident()
        self._composite: dict[Any, bool] = {}
        self._pending: (
            tuple[weakref.ref[torch.UntypedStorage], int, Block, Any, Scope, Dense | None] | None
        ) = None
        self._adding_in_place = False

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the estimate's thread. Patches are seen by all threads."""
        return threading.get_ident() == self._thread

    def is_on(self) -> bool:
        """Whether tensors are fake now: they are not while a data loader fetches a batch."""
        return self.is_here and torch._C._get_dispatch_mode(_FAKE) is not None

    @property
    def avoid_device_init(self) -> bool:
        """Return True: FakeTensorMode must not initialise CUDA, also where there is a GPU.

        Its own rule asks `torch.cuda.is_available`, which is patched.
        """
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap `__torch_dispatch__` for dynamo.

        Nothing is compiled inside this mode, and the wrapper would slow down every operator.
        """
        return False

    def _validate_output_for_cache_entry(self, *arguments: Any) -> None:
        """Keep FakeTensorMode from caching a result within a larger storage: it would return a smaller one.

        `hann_window` allocates an element more than it has.
        """
        super()._validate_output_for_cache_entry(*arguments)
        func, inputs, out = arguments[2], arguments[3], arguments[-1]
        if type(out) is not FakeTensor or func.is_view or any(out is each for each in inputs):
            return
        used = compute_required_storage_length(out.shape, out.stride(), 0) * out.itemsize
        if out.untyped_storage().nbytes() > used:
            raise fake_tensor._BypassDispatchCache("larger storage")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on fake tensors, and record the storages that it created."""
        if self._inside or func in _DISPATCH_META_HANDLERS:
            out = self.dispatch(func, types, args, kwargs or {})
            if func in _NOT_WRITTEN and type(out) is FakeTensor:
                forget(out)
            return out
        scope = self.layers.scope()
        self.settle(scope)
        plain = all(kind is FakeTensor for kind in types)  # DTensor and others call again with what they hold
        if not plain and any(getattr(kind, "computes_itself", False) for kind in types):
            return NotImplemented
        composite = self._is_composite(func)
        rule = self._rules.get(func) if plain else None
        self._inside = not composite
        try:
            if composite and plain:  # FakeTensorMode would run it as a whole on constants
                with self:
                    out = func.decompose(*args, **(kwargs or {}))
            else:
                out = self._computed(func, types, args, kwargs or {}, rule if plain else None, plain=plain)
            buffers = self._buffers(func, args, kwargs or {}, out) if func in self._kernels else ()
        except Exception as error:
            refusal = self._corrections.refusal(func, error)
            if refusal is None:
                raise
            try:
                raise refusal from error
            finally:
                del refusal  # or this frame, to which its traceback refers, keeps tensors as garbage
        finally:
            self._inside = False
        if out is not NotImplemented:
            self._note(out, func, args, scope, buffers)
        return out

    def _computed(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rule: Rule | None,
        *,
        plain: bool,
    ) -> Any:
        """Run an operator by its rule or by FakeTensorMode, and keep the values of small results."""

        def run() -> Any:
            if rule is not None:
                return rule(self, func, tuple(args), kwargs)
            return self.dispatch(func, types, args, kwargs)

        if not plain:
            return run()
        try:
            real = self._values.result(func, args, kwargs)
        except UnknownValuesError:
            return run()
        if not any(isinstance(each, torch.Tensor) for each in tree_leaves(real)):
            return real
        if torch.Tag.dynamic_output_shape in func.tags and func not in _SELECTING:
            out = self._shaped_as(real, args[0])
        else:
            out = run()
        self._values.keep(out, real)
        return out

    def _shaped_as(self, real: Any, source: Any) -> Any:
        """Return fake tensors with the shapes of real ones, on the device of an input."""
        with self:
            return tree_map_only(
                torch.Tensor, lambda each: torch.empty_like(each, device=source.device), real
            )

    def __deepcopy__(self, memo: Any) -> CountingFakeMode:
        """Return the mode itself: fake tensors refer to it, and copies of modules belong to the same run."""
        return self

    def quietly(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return FakeTensorMode's own result of an operator, for rules."""
        return self.dispatch(func, (), args, kwargs)

    def settle(self, scope: Scope) -> None:
        """Record the storages freed since the last operator, and the sum that waited to know about them.

        If the first summand was freed, the sum takes its block over; otherwise the sum is a new allocation.
        """
        ledger = self.ledger
        if self._pending is not None:
            reference, size, block, func, where, tensor = self._pending
            self._pending = None
            storage = reference()
            if storage is None:  # the sum was freed already
                if not any(life.block is block for life in ledger.freed):
                    ledger.free(ledger.allocate(size, block.device, func, where), where)
            elif not ledger.inherit(block, storage):
                ledger.allocate_storage(storage, size, block.device, func, where).tensor = tensor
        if ledger.freed:
            ledger.settle(scope)

    def allocate(self, size: int, func: Any, scope: Scope, category: Category, device: int = 0) -> Block:
        """Allocate memory that no tensor owns, such as a library's workspace or a kernel's buffer.

        It stays live until the caller passes the block to `FakeLedger.free`.
        """
        block = self.ledger.allocate(size, device, func, scope)
        block.category = category
        return block

    def passing(self, sizes: Sequence[int], func: Any, scope: Scope, device: int = 0) -> None:
        """Record a kernel's temporary buffers: all are allocated in order, then freed in reverse order."""
        blocks = [self.allocate(size, func, scope, Category.TEMPORARY, device) for size in sizes if size]
        for block in reversed(blocks):
            self.ledger.free(block, scope)

    @contextmanager
    def running(self, *, recorded: bool) -> Iterator[None]:
        """Run operators inside this context as if the program called them, or without recording anything."""
        inside, self._inside = self._inside, not recorded
        try:
            with self:
                yield
        finally:
            self._inside = inside

    def ran(self, func: Any, args: Sequence[object], out: Any) -> None:
        """Record what a kernel allocates besides a result that it wrote into a given tensor."""
        if self._inside:
            return
        scope = self.layers.scope()
        self.settle(scope)
        after = self._after.get(func)
        if after is not None:
            after(self, func, tuple(args), out, scope)

    def caller(self) -> FrameType | None:
        """Return the frame that called the operator which runs now; None if none runs on this thread.

        It is found by the function with which torch enters this mode, so it does not depend on how many
        functions run in between, also where somebody wrapped that function.
        """
        frame: FrameType | None = sys._getframe()
        for entry in (_DISPATCH, type(self).__torch_dispatch__.__code__):
            while frame is not None and frame.f_code is not entry:
                frame = frame.f_back
        while frame is not None and (
            frame.f_code is entry or frame.f_globals.get("__name__") in _BELOW_MODES
        ):
            frame = frame.f_back
        return frame

    def python_stack(self) -> tuple[str, ...]:
        """Return the Python frames of the program, innermost first, as PyTorch's allocator records them.

        Autograd's engine runs backward on a thread of its own: what is below its call is not part of it.
        """
        frames, frame = [], self.caller()
        while frame is not None and frame.f_code.co_name != _ENGINE:
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                frames.append(f"{frame.f_code.co_name} {frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        return tuple(frames)

    def is_called_by_engine(self) -> bool:
        """Whether autograd's engine, and no Python function, called the operator which runs now."""
        caller = self.caller()
        return caller is not None and caller.f_code.co_name == _ENGINE

    def keep_values(self, fake: Any, real: Any) -> None:
        """Keep the values of a small tensor that the program made from numbers."""
        self._values.keep(fake, real)

    def see(self, results: Any, func: Any) -> None:
        """Record the storages of results now, for rules whose kernel allocates more in between."""
        for tensor in _tensors(results):
            self._see(tensor, func, (), self.layers.scope())

    @contextmanager
    def adding_in_place(self) -> Iterator[None]:
        """Count sums inside this context as written into the first summand, if that dies at once.

        That is how torch adds biases and masks to products, but not under any dispatch mode.
        """
        before, self._adding_in_place = self._adding_in_place, True
        try:
            yield
        finally:
            self._adding_in_place = before

    def _is_composite(self, func: Any) -> bool:
        """Whether an operator consists of other operators. These arrive here only in inference mode."""
        composite = self._composite.get(func)
        if composite is None:
            if (rule := self._rules.get(str(func))) is not None:
                self._rules[func] = rule
            composite = self._composite[func] = (
                isinstance(func, torch._ops.OpOverload)
                and func not in self._rules
                and func._can_decompose()
                and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
            )
        return composite

    def _buffers(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object], out: Any) -> Buffers:
        """Return what the kernel of an operator allocates, nothing if it runs on another device."""
        at = self._placed(out, args)
        if at is None or not at.numel():
            return ()
        return self._kernels[func].buffers(Call(func, tuple(args), kwargs, out, self._corrections.gpu))

    def _placed(self, out: Any, args: Sequence[object]) -> Any:
        """Return a tensor where a kernel ran: a result, or what it copies to the host; None if elsewhere."""
        kind = self.ledger.device_type
        first = next(_tensors((out,)), None)
        if first is None or first.fake_device.type == kind:
            return first
        return next((tensor for tensor in _tensors(args) if tensor.fake_device.type == kind), None)

    def hold(self, buffers: Buffers, func: Any, scope: Scope, device: int) -> list[Block]:
        """Record buffers and the results among them; returns the blocks that outlive their sequence."""
        blocks: list[Block] = []
        outliving: list[Block] = []
        for step in buffers:
            if isinstance(step, int):
                if step:
                    block = self.allocate(step, func, scope, Category.TEMPORARY, device)
                    (outliving if isinstance(step, Outliving) else blocks).append(block)
            elif isinstance(step, torch.Tensor):
                self._see(step, func, (), scope)
            elif step is not None:
                blocks += self.hold(step, func, scope, device)
        for block in reversed(blocks):
            self.ledger.free(block, scope)
        return outliving

    def _note(self, out: Any, func: Any, args: Sequence[object], scope: Scope, buffers: Buffers) -> None:
        at = self._placed(out, args) if buffers else None
        device = 0 if at is None else self.ledger.device_row(at.fake_device)
        among_results = _has_results(buffers)
        if among_results:
            self.hold(buffers, func, scope, device)
        kind = type(out)
        if kind is FakeTensor:
            self._see(out, func, args, scope)
        elif isinstance(out, tuple | list | dict):
            for tensor in _tensors(out[::-1] if func in _LAST_FIRST else out):
                self._see(tensor, func, (), scope)
        if buffers and not among_results:
            self.hold(buffers, func, scope, device)
        after = self._after.get(func)
        if after is not None:
            after(self, func, tuple(args), out, scope)

    def _see(self, tensor: Any, func: Any, args: Sequence[object], scope: Scope) -> None:
        device = tensor.fake_device
        ledger = self.ledger
        if device.type != ledger.device_type:
            return
        if tensor.layout is not torch.strided:
            raise MemPluginError(
                f"{func} returns a tensor with layout {tensor.layout}, whose size in memory is not known.",
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
                ledger.free_storage(storage, scope)
                return
        elif not size or (self._pending is not None and self._pending[0]() is storage):
            return
        if life is None and is_zero_tensor(tensor):  # a derivative that is zero: a shape without memory
            return
        count = self.created.setdefault(func, [0, 0])
        count[0] += 1
        count[1] += size
        if func in _IN_PLACE_WITHOUT_MODES:
            summand = self._reused(func, args, size, scope)
            if summand is not None:
                self._pending = (weakref.ref(storage), size, summand, func, scope, dense(tensor))
                return
        old = life.block if life is not None else None
        fresh = ledger.allocate_storage(storage, size, ledger.device_row(device), func, scope)
        fresh.tensor = dense(tensor)
        if old is not None:  # resized: the new memory is allocated before the old is freed
            fresh.category, fresh.label = old.category, old.label
            ledger.free(old, scope)

    def _reused(self, func: Any, args: Sequence[object], size: int, scope: Scope) -> Block | None:
        """Return the block that a real run would write this result into, None if it would allocate.

        The engine adds into its first summand, but not with `create_graph=True`, and a derivative writes into
        its zeros. A view keeps its base tensor alive, a second reference to the memory, so the engine never
        adds into views (input_buffer.cpp, accumulate). Gradients of weights and biases are views.
        """
        first = args[0] if args else None
        engine_adds = scope.phase is Phase.BACKWARD and self._corrections.engine_adds_in_place
        if not self._adding_in_place and not engine_adds:
            return None
        if type(first) is not FakeTensor or first._is_view():
            return None
        if not self._adding_in_place and not self.is_called_by_engine():
            return None
        block = self.ledger.block_of(first.untyped_storage())
        if block is None or block.bytes != size:
            return None
        if func is aten.add.Tensor:
            return block if self._adding_in_place or not torch.is_grad_enabled() else None
        return block if block.made_by in _ZEROS else None


def _has_results(buffers: Buffers) -> bool:
    return any(
        isinstance(step, torch.Tensor)
        or (step is not None and not isinstance(step, int) and _has_results(step))
        for step in buffers
    )


_DISPATCH = CountingFakeMode.__torch_dispatch__.__code__


def _tensors(results: Any) -> Iterator[Any]:
    for result in results.values() if isinstance(results, dict) else results:
        if type(result) is FakeTensor:
            yield result
        elif isinstance(result, list | tuple):
            yield from _tensors(result)
