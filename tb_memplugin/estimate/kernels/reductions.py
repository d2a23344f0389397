"""Record what reductions allocate on a GPU beside their results: sums, means, norms, extremes.

They are the buffers of block_reductions.py; the results of the parts of an input of 2 GiB and more, where the
result's dtype cannot hold them (AccumulationBuffer of Reduce.cuh); and a copy of an input that is reduced in
another dtype (ReduceOpsUtils.h, make_reduction). Kernels: ReduceSumProdKernel.cu, ReduceMomentKernel.cu,
ReduceNormKernel.cu, ReduceMinValuesKernel.cu, ReduceArgMaxKernel.cu and their like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.block_reductions import Layout, reduction_buffers
from tb_memplugin.estimate.run.correction import Correction, Target
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode
from tb_memplugin.trace import Category

aten = torch.ops.aten

ANY_GPU = GpuSpec.named("a100")
"""The GPU whose properties count if no particular GPU is given."""

_HALVES = (torch.float16, torch.bfloat16)
Partial = Callable[[torch.dtype], int]
"""From the dtype of an input to the bytes of a partial result."""


def _number(dtype: torch.dtype) -> int:
    return max(dtype.itemsize, 4)


def _real(dtype: torch.dtype) -> int:
    return max(dtype.itemsize // (2 if dtype.is_complex else 1), 4)


def _element(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _truth(dtype: torch.dtype) -> int:
    return 1


def _with_index(dtype: torch.dtype) -> int:
    return 16


def _moments(dtype: torch.dtype) -> int:
    return 32 if dtype is torch.float64 else 16  # WelfordData: two numbers, an int32, and a count as a number


_PARTIAL: dict[str, Partial] = {
    **dict.fromkeys(("sum", "nansum", "mean", "prod"), _number),
    "linalg_vector_norm": _real,
    **dict.fromkeys(("amax", "amin", "max", "min"), _element),
    **dict.fromkeys(("any", "all"), _truth),
    **dict.fromkeys(("argmax", "argmin"), _with_index),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _moments),
}
"""By operator. `max` and `min` of a dimension also have an index."""

_WHOLE = ("max", "min", "argmax", "argmin")
"""Operators that copy an input that is not contiguous, if they reduce it to one element."""


_PART = 65_536
"""The elements that one block of a foreach operator computes: kChunkSize of MultiTensorApply.cuh."""


@dataclass(slots=True)
class Reducer:
    """Records reductions for a target."""

    target: Target

    def record(
        self,
        mode: CountingFakeMode,
        func: Any,
        scope: Scope,
        device: int,
        layout: Layout,
        dimensions: Any = None,
        *,
        partial: int = 0,
        before: tuple[int, ...] = (),
        accumulates: bool | None = None,
    ) -> None:
        """Record the buffers of a reduction of a tensor with this layout.

        Args:
            mode: the mode that runs the operator.
            func: the operator.
            scope: where it runs.
            device: row of the device in the ledger.
            layout: of what is reduced.
            dimensions: a dimension or several; None or none for all.
            partial: bytes of a partial result; 0 for those of a sum.
            before: sizes of what the kernel holds meanwhile.
            accumulates: whether the result holds partial results; None: not if it is in half precision.
        """
        count = len(layout.shape)
        rows = [dimensions] if isinstance(dimensions, int) else dimensions
        reduced = {row % max(count, 1) for row in rows} if rows else set(range(count))
        partial = partial or _number(layout.dtype)
        kernels = reduction_buffers(layout, reduced, partial, self.target.gpu or ANY_GPU)
        blocks = [mode.allocate(size, func, scope, Category.TEMPORARY, device) for size in before if size]
        if len(kernels) > 1 and not (layout.dtype not in _HALVES if accumulates is None else accumulates):
            outputs = prod(size for row, size in enumerate(layout.shape) if row not in reduced)
            blocks.append(mode.allocate(outputs * partial, func, scope, Category.TEMPORARY, device))
        for sizes in kernels:
            mode.passing(sizes, func, scope, device)
        for block in reversed(blocks):
            mode.ledger.free(block, scope)


class Reductions(Correction):
    """Records the buffers of every operator that reduces."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        functions: dict[Any, After] = {}
        for name, partial in _PARTIAL.items():
            packet = getattr(aten, name)
            for overload in packet.overloads():
                run = self._of(getattr(packet, overload), partial)
                if run is not None:
                    functions[getattr(packet, overload)] = run
        for operator in (aten.count_nonzero.default, aten.count_nonzero.dim_IntList):
            functions[operator] = self._counted
        for name in ("_foreach_norm", "_foreach_max"):
            for overload in getattr(getattr(aten, name, None), "overloads", list)():
                if overload in ("default", "Scalar"):
                    functions[getattr(getattr(aten, name), overload)] = _of_each
        return functions

    def _counted(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Record the sum of a mask, a byte and then 8 bytes for each element (ReduceOps.cpp)."""
        tensor = args[0]
        if out.device.type == "cuda":
            counts = Layout(tensor.shape, tensor.stride(), torch.int64)
            row, dimensions = mode.ledger.device_row(out.device), args[1] if len(args) > 1 else None
            before = (tensor.numel(), 8 * tensor.numel())
            Reducer(self.target).record(mode, func, scope, row, counts, dimensions, before=before)

    def _of(self, operator: Any, partial: Partial) -> After | None:
        arguments = operator._schema.arguments
        if any(argument.is_out for argument in arguments) or (
            len(arguments) > 1 and arguments[1].name == "other"
        ):
            return None
        name = operator._schema.name.removeprefix("aten::")
        at = next((row for row, argument in enumerate(arguments) if argument.name == "dim"), None)
        pair = len(operator._schema.returns) == 2 and partial is _element
        reducer = Reducer(self.target)

        def run(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
            first = out[0] if isinstance(out, tuple) else out
            if first.device.type != "cuda":
                return
            tensor, copied = args[0], None
            dimensions = args[at] if at is not None and len(args) > at else None
            if name in _WHOLE and dimensions is None and not tensor.is_contiguous():
                copied = Layout.contiguous(tensor.shape, tensor.dtype)
            if partial is _number and _is_copied(tensor.dtype, first.dtype):
                copied = Layout(tensor.shape, tensor.stride(), first.dtype)
            layout = copied or Layout.of(tensor)
            before = tensor.numel() * layout.dtype.itemsize if copied else 0
            size = 16 if pair else partial(layout.dtype)
            halved = layout.dtype in _HALVES and first.dtype in _HALVES and size > 2
            reducer.record(
                mode,
                func,
                scope,
                mode.ledger.device_row(first.device),
                layout,
                dimensions,
                partial=size,
                before=(before,),
                accumulates=not (halved or pair or partial in (_with_index, _moments)),
            )

        return run


def _of_each(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record partial results, for each tensor as many as the largest has parts (ForeachReduceOp.cu)."""
    tensors = [tensor for tensor in args[0] if tensor.device.type == "cuda"]
    if tensors:
        parts = max(-(-tensor.numel() // _PART) for tensor in tensors)
        size = max(tensors[0].element_size(), 4 if func._schema.name == "aten::_foreach_norm" else 0)
        mode.passing([len(tensors) * parts * size], func, scope, mode.ledger.device_row(tensors[0].device))


def _is_copied(dtype: torch.dtype, out: torch.dtype) -> bool:
    """Whether an input is copied in the dtype of the result; a GPU sums half precision in float32 without."""
    return dtype is not out and not (dtype in _HALVES and out is torch.float32)
