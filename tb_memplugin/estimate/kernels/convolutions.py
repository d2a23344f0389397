"""Record the copies and the workspaces of convolutions on a GPU, and how they sum the gradient of the bias.

cuDNN reads all operands in one memory format, which is channels-last if the input or the weight is. Each call
has a workspace of its own, which is freed as the call ends. Its size depends on the kernel that cuDNN
chooses: the cuDNN that is installed is asked (estimate/libraries/cudnn). If there is none, no workspace is
counted, and a note says what they may add to the peak.

Sources in aten/src/ATen/native: Convolution.cpp (_convolution, convolution_backward), cudnn/ConvShared.cpp,
and cudnn/Conv_v8.cpp. Of memory formats: c10/core/MemoryFormat.h (is_channels_last_strides_2d),
aten/src/ATen/native/ConvUtils.h (cudnn_conv_suggest_memory_format), and aten/src/ATen/cudnn/Descriptors.h
(fixSizeOneDimStride).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.reductions import Layout, reduction
from tb_memplugin.estimate.kernels.table import ANY_GPU, HALVES
from tb_memplugin.estimate.libraries.cudnn.convolution import Convolution, Operand
from tb_memplugin.estimate.libraries.cudnn.questions import Cudnn, installed
from tb_memplugin.estimate.run.correction import Correction, Target
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.trace import Category

aten = torch.ops.aten

_DTYPES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}
_COUNTED = (
    "Convolutions: the sizes of their workspaces are those that cuDNN {} answers for a description of this "
    "GPU. On the GPU itself, some are larger or smaller (docs/gpu.md)."
)
_LEFT_OUT = (
    " Without {}, it leaves out kernels that it has there, most of them for 1x1 and depthwise convolutions: "
    "those counted instead can take more than 100 MB more."
)
_REFUSED = " It has no answer for {:,} calls, whose workspaces are not counted: {}."
_BENCHMARK = (
    " torch.backends.cudnn.benchmark is on: at the first call of each shape, the workspace in which it tries "
    "all kernels is counted, then always that of the kernel that cuDNN takes without it."
)
_OFF = (
    "Convolutions: torch.backends.cudnn.enabled is off. The buffers of PyTorch's own kernels are not counted."
)
_UNKNOWN = (
    "Convolutions: cuDNN's workspaces are not counted, since it chooses among kernels, and it was not asked: "
    "{}. If each were as large as input, weight and result together (0 for channels-last in half precision), "
    "the allocated peak would be {:,} bytes higher. Reserved memory can grow more. "
    "torch.backends.cudnn.benchmark tries larger ones. To have them counted: "
    "pip install nvidia-cudnn-cu13==9.20.0.48 (PyTorch 2.13; or the version that your PyTorch comes with)."
)


@dataclass(frozen=True, slots=True)
class Layer:
    """The numbers of a convolution: for each dimension of space, and the groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    @classmethod
    def of(cls, args: Sequence[Any], dimensions: int) -> Layer:
        """Return those of an operator's arguments, from `stride` on; a sequence is an image of one row."""
        stride, padding, dilation, transposed, _, groups = args[:6]
        steps, added, spread = (
            (first, *numbers) if dimensions == 1 else tuple(numbers) * (1 if len(numbers) > 1 else dimensions)
            for first, numbers in ((1, stride), (0, padding), (1, dilation))
        )
        return cls(steps, added, spread, bool(transposed), int(groups))


class Convolutions(Correction):
    """Records what the forward and the backward of a convolution hold besides results.

    `_most` is the most bytes of each device that would be allocated during a convolution with a workspace,
    `_answered` and `_refused` the calls for which cuDNN has an answer and those for which it has none,
    `_asked` the cuDNN that is asked; None before the first convolution. `_tried` are the calls for which
    PyTorch has a kernel.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._most: dict[int, int] = {}
        self._answered = self._refused = 0
        self._asked: Cudnn | None = None
        self._tried: set[Convolution] = set()

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Add the note when the run ends, since only then is the peak known."""
        patches.on_undo(lambda: self._tell(mode))

    def rules(self) -> dict[Any, Rule]:
        """Return rules for the forward and the backward, which allocate copies before their results."""
        return {aten.convolution.default: self._forward, aten.convolution_backward.default: self._backward}

    def _forward(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        result = mode.quietly(func, *args, **kwargs)
        if result is NotImplemented or result.device.type != "cuda":
            return result
        call = _Call(self, mode, func, result.device, Layer.of(args[3:], args[0].dim() - 2))
        weight = _image(args[1])
        with call.sequence(args[0]) as data:
            last = reads_channels_last(data, weight)
            with call.copied(data, last) as read:
                mode.see([result], func)
                out = _image(result).dense(last)
                with call.copied(weight, last) as filters:
                    call.compute("input" if call.layer.transposed else "forward", read, filters, out)
        return result

    def _backward(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        results = mode.quietly(func, *args, **kwargs)
        if results is NotImplemented or args[0].device.type != "cuda":
            return results
        call = _Call(self, mode, func, args[0].device, Layer.of(args[4:], args[0].dim() - 2))
        gradient, weight = _image(args[0]), _image(args[2])
        with call.sequence(args[1]) as data:
            if is_pytorchs_own(data, weight, call.layer):
                mode.see(results[:2], func)
                for view in (gradient, data):
                    call.passing(0 if view.dense(channels_last=False) is view else view.bytes)
            else:
                self._gradients(call, results, gradient, data, weight)
        if results[2] is not None:
            mode.see(results[2:], func)
            kept = [axis for axis in range(args[0].dim()) if axis != 1]
            sums = reduction(Layout.of(args[0]), self.target.gpu or ANY_GPU, kept)
            mode.hold(sums, func, call.scope, call.row)
        return results

    def _gradients(
        self, call: _Call, results: Sequence[Any], gradient: View, data: View, weight: View
    ) -> None:
        """Record that cuDNN computes the gradients of input and weight, one after the other."""
        transposed = call.layer.transposed
        with ExitStack() as copies:
            if results[1] is not None:
                data = copies.enter_context(call.copied(data, reads_channels_last(data, weight)))
            last = data.is_channels_last
            if transposed or gradient.is_channels_last != last:
                gradient = copies.enter_context(call.copied(gradient, last))
            if results[0] is not None:
                last = reads_channels_last(gradient, weight)
                call.mode.see(results[:1], call.func)
                out = _image(results[0]).dense(last)
                with call.copied(weight, last) as filters, call.copied(gradient, last) as read:
                    call.compute("forward" if transposed else "input", read, filters, out)
            if results[1] is not None:
                last = reads_channels_last(data, gradient)
                y, x = (data, gradient) if transposed else (gradient, data)
                with call.copied(y, last) as y_read, call.copied(x, last) as x_read:
                    call.mode.see(results[1:2], call.func)
                    call.compute("weight", x_read, _image(results[1]).dense(last), y_read)

    def workspace(self, call: _Call, computes: str, x: View, w: View, y: View) -> int:
        """Return the bytes of the workspace of a call of cuDNN, as it answers; 0 if it does not."""
        if not torch.backends.cudnn.enabled:
            self.target.note(_OFF)
            return 0
        if self._asked is None:
            self._asked = installed()
        if self.target.gpu is None or not self._asked.version or x.dtype not in _DTYPES:
            return 0
        last = reads_channels_last(x, w)
        x_read, w_read, y_read = (
            Operand(view.shape, view.described_strides(last), view.alignment) for view in (x, w, y)
        )
        question = Convolution(
            computes,
            _DTYPES[x.dtype],
            x_read,
            w_read,
            y_read,
            call.layer.padding,
            call.layer.stride,
            call.layer.dilation,
            tf32=allows_tf32(),
            deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        )
        if question not in self._tried:
            self._tried.add(question)
            if torch.backends.cudnn.benchmark:
                self._try_all(call, question, self.target.gpu)
        size = self._asked.workspace_bytes(self.target.gpu, question)
        self._answered += size is not None
        self._refused += size is None
        return size or 0

    def _try_all(self, call: _Call, question: Convolution, gpu: GpuSpec) -> None:
        """Record that all kernels are tried in one workspace (Conv_v8.cpp: run_single_conv)."""
        assert self._asked is not None
        free = gpu.memory_bytes - call.mode.ledger.allocated[call.row]
        call.passing(self._asked.workspace_bytes(gpu, replace(question, fits_bytes=free)) or 0)
        call.mode.ledger.empty_cache(call.scope)

    def remember(self, row: int, level: int) -> None:
        """Remember how many bytes a device would have allocated with a workspace of the usual size."""
        self._most[row] = max(level, self._most.get(row, 0))

    def _tell(self, mode: CountingFakeMode) -> None:
        if self._asked is None:
            return
        if self._answered:
            note = _COUNTED.format(self._asked.version)
            missing = self._asked.missing
            note += _LEFT_OUT.format(" and ".join(missing)) if missing else ""
            note += _REFUSED.format(self._refused, self._asked.refusal) if self._refused else ""
            self.target.note(note + (_BENCHMARK if torch.backends.cudnn.benchmark else ""))
        else:
            more = max((most - mode.ledger.peaks[row] for row, most in self._most.items()), default=0)
            why = "no GPU is named" if self.target.gpu is None else self._asked.refusal
            self.target.not_counted_bytes = max(more, 0)
            self.target.note(_UNKNOWN.format(why, self.target.not_counted_bytes))


class _Call:
    """A convolution that runs: where it is recorded, and its numbers."""

    def __init__(
        self, owner: Convolutions, mode: CountingFakeMode, func: Any, device: torch.device, layer: Layer
    ) -> None:
        self.owner, self.mode, self.func, self.layer = owner, mode, func, layer
        self.scope: Scope = mode.layers.scope()
        self.row = mode.ledger.device_row(device)

    @contextmanager
    def sequence(self, tensor: torch.Tensor) -> Iterator[View]:
        """Hold a copy of a sequence that is not contiguous; images are left as they are."""
        if tensor.dim() != 3:
            yield View.of(tensor)
            return
        with self.copied(View.of(tensor), channels_last=False) as read:
            yield read.with_height()

    @contextmanager
    def copied(self, view: View, channels_last: bool) -> Iterator[View]:
        """Hold a copy of a tensor in a memory format, unless it has it."""
        read = view.dense(channels_last)
        if read is view:
            yield view
            return
        block = self.mode.allocate(view.bytes, self.func, self.scope, Category.TEMPORARY, self.row)
        yield read
        self.mode.ledger.free(block, self.scope)

    def passing(self, size: int) -> None:
        """Record memory that is freed at once."""
        self.mode.passing([size], self.func, self.scope, self.row)

    def compute(self, computes: str, read: View, weight: View, out: View) -> None:
        """Record the workspace of one call of cuDNN.

        Args:
            computes: "forward", "input" or "weight", as in `Convolution`.
            read: what is convolved: the input, or for a gradient of the input, the gradient that comes in.
            weight: the filters, or their gradient.
            out: the result; for the gradient of the filters, the gradient that comes in.
        """
        x, y = (out, read) if computes == "input" else (read, out)
        if not (x.bytes and weight.bytes and y.bytes) or is_pytorchs_own(x, weight, self.layer):
            return
        size = self.owner.workspace(self, computes, x, weight, y)
        usual = usual_bytes(x, weight, y)
        self.owner.remember(self.row, self.mode.ledger.allocated[self.row] + usual)
        self.passing(size)


def _image(tensor: torch.Tensor) -> View:
    """Return how a tensor is read: a sequence as an image of one row."""
    view = View.of(tensor)
    return view.with_height() if len(view.shape) == 3 else view


def is_pytorchs_own(data: View, weight: View, layer: Layer) -> bool:
    """Whether a kernel of PyTorch computes a convolution, without a workspace.

    That is so for depthwise ones in the usual format, but for some in float16 (Convolution.cpp,
    use_cudnn_depthwise).
    """
    channels = data.shape[1]
    if layer.transposed or not 1 < layer.groups == channels or reads_channels_last(data, weight):
        return False
    if data.dtype is not torch.float16 or len(data.shape) != 4 or channels < 32:
        return True
    first, second = layer.stride
    height, width = data.shape[2:]
    if set(layer.dilation) != {1} or not (first == second or height == 1):
        return True
    return not _cudnn_is_faster(data.shape[0], channels, height, width, weight.shape[2:], second)


def _cudnn_is_faster(
    batch: int, channels: int, height: int, width: int, filters: tuple[int, ...], stride: int
) -> bool:
    """Whether a depthwise convolution in float16 is cuDNN's (check_cudnn_depthwise_workload_with_filter)."""
    if height == 1 and stride == 1:
        return True
    size = filters[1]
    if filters[0] != size or size not in (1, 3, 5) or width < 7 or stride not in (1, 2):
        return False
    if stride == 1:
        return True
    if batch == 1:
        return size > 1 or width <= 28
    if size == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def allows_tf32() -> bool:
    """Whether convolutions may be computed in TensorFloat-32."""
    settings = getattr(torch.backends.cudnn, "conv", None)
    if settings is not None:
        return bool(settings.fp32_precision == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)


def usual_bytes(data: View, weight: View, result: View) -> int:
    """Return the bytes that a workspace usually has at most, but for 16 MiB: those of copies of all three.

    Kernels for channels-last in half precision need no copies.
    """
    if reads_channels_last(data, weight) and data.dtype in HALVES:
        return 0
    return data.bytes + weight.bytes + result.bytes


@dataclass(frozen=True, slots=True)
class View(Layout):
    """The layout of an image, of filters or of a sequence."""

    @property
    def bytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """The largest power of two up to 32 that divides the address in bytes (Conv_v8.cpp)."""
        address = self.offset * self.dtype.itemsize
        return min(address & -address, 32) if address else 32

    @property
    def is_channels_last(self) -> bool:
        """Whether the strides are those of channels-last, which shapes of one element in a row leave open."""
        if len(self.shape) < 4 or self.strides[1] == 0:
            return False
        least = 0
        for axis in (1, *range(len(self.shape) - 1, 1, -1), 0):
            size, stride = self.shape[axis], self.strides[axis]
            if size == 0 or stride < least or (axis == 0 and least == self.strides[1]):
                return False
            least = stride * max(size, 1)
        return True

    def with_height(self) -> View:
        """Return a sequence as an image of one row."""
        (batch, channels, length), (far, middle, near) = self.shape, self.strides
        strides = (far, middle, near * length, near)
        return View((batch, channels, 1, length), strides, self.dtype, self.offset)

    def dense(self, channels_last: bool) -> View:
        """Return this view if it is contiguous in a memory format, else that of a copy in the format."""
        wanted = dense_strides(self.shape, channels_last)
        if not prod(self.shape) or all(
            size == 1 or stride == other
            for size, stride, other in zip(self.shape, self.strides, wanted, strict=True)
        ):
            return self
        return View(self.shape, wanted, self.dtype)

    def described_strides(self, channels_last: bool) -> tuple[int, ...]:
        """Return the strides as cuDNN is told: dimensions of one element get those of a dense tensor."""
        wanted = dense_strides(self.shape, channels_last)
        return tuple(
            other if size == 1 else stride
            for size, stride, other in zip(self.shape, self.strides, wanted, strict=True)
        )


def dense_strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps; with `channels_last`, dimension 1 is the fastest."""
    return (make_channels_last_strides_for if channels_last else make_contiguous_strides_for)(shape)


def reads_channels_last(first: View, second: View) -> bool:
    """Whether cuDNN reads a convolution's operands in channels-last: one has it, and neither is float64."""
    if torch.float64 in (first.dtype, second.dtype):
        return False
    return first.is_channels_last or second.is_channels_last
