"""transformer-engine: its own layers run, and only its compiled functions are replaced.

`Kernels` has functions with the names and the positional arguments of those in `transformer_engine_torch`,
versions 2.2 to 2.20. They follow its C++ (pytorch/csrc/extensions): the results, and the buffers that are
freed again. What the library keeps between calls (workspaces, FP8 scales, answers about the GPU) is put aside
while an estimate runs, so that no fake tensor stays in it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.run.patches import do_nothing, replaced

_ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")
_SOFTMAXES = (
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
    "scaled_aligned_causal_masked_softmax",
)
_NOTHING = (
    *("fused_amax_and_scale_update_after_reduction", "compute_amax", "multi_tensor_scale"),
    *("multi_tensor_adam", "multi_tensor_adam_param_remainder", "multi_tensor_adam_fp8"),
    *("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_sgd"),
    "multi_tensor_compute_scale_and_scale_inv",
)
"""Functions that write into tensors they are given, allocate nothing, and return nothing."""

_CURRENT = "Float8CurrentScalingQuantizer"
_PER_TENSOR = ("Float8Quantizer", _CURRENT)
"""The classes of quantizers (delayed and current scaling) whose FP8 tensors have one scale."""


class Kernels:
    """The compiled functions of the library, for fake tensors.

    Args:
        dtypes: the library's `TE_DType`, its number of each dtype.
        attention: what the library calls the backend of attention for 16 bits and any length.
    """

    def __init__(self, dtypes: Mapping[torch.dtype, Any], attention: Any) -> None:
        self._dtypes = {int(number): dtype for dtype, number in dtypes.items()}
        self._attention = attention

    def all(self) -> dict[str, Callable[..., Any]]:
        """Return each replacement under the name of the function that it replaces."""
        kernels: dict[str, Callable[..., Any]] = {
            "generic_gemm": self.generic_gemm,
            "layernorm_fwd": self.layernorm_fwd,
            "rmsnorm_fwd": self.rmsnorm_fwd,
            "layernorm_bwd": layernorm_bwd,
            "rmsnorm_bwd": rmsnorm_bwd,
            "rmsnorm_bwd_add": lambda dz, x, _add, rsigma, gamma, *_: rmsnorm_bwd(dz, x, rsigma, gamma),
            "quantize": self.quantize,
            "bgrad_quantize": self.bgrad_quantize,
            "dequantize": self.dequantize,
            "create_empty_quantized_tensor": lambda quantizer, shape, dtype, device, *_: self.empty(
                quantizer, shape, dtype, device
            ),
            "fp8_transpose": fp8_transpose,
            "get_fused_attn_backend": self.get_fused_attn_backend,
            "fused_attn_fwd": fused_attn_fwd,
            "fused_attn_bwd": fused_attn_bwd,
        }
        kernels |= {name: self._activation(1) for name in _ACTIVATIONS}
        kernels |= {name: self._activation(2) for name in (*_GATED, "clamped_swiglu")}
        kernels |= {f"d{name}": self.dactivation for name in (*_ACTIVATIONS, *_GATED)}
        kernels |= {"clamped_dswiglu": self.dactivation}
        kernels |= {f"dbias_d{name}": self.dbias_dactivation for name in _ACTIVATIONS}
        for name in _SOFTMAXES:
            kernels[f"{name}_forward"] = lambda scores, *_: torch.empty_like(scores)
            kernels[f"{name}_backward"] = lambda grad, *_: grad.contiguous()  # computed in place
        return kernels | dict.fromkeys(_NOTHING, do_nothing)

    def empty(self, quantizer: Any, shape: Iterable[int], dtype: torch.dtype, device: Any) -> Any:
        """Return an empty tensor of `dtype`, or what the quantizer would make of it.

        Raises:
            MemPluginError: the quantizer is not one of per-tensor FP8 scaling.
        """
        shape = list(shape)
        if quantizer is None:
            return torch.empty(shape, dtype=dtype, device=device)
        kind = type(quantizer).__name__
        if kind not in _PER_TENSOR:
            raise MemPluginError(
                f"The estimate does not know what transformer-engine's {kind} allocates.",
                where="the plugin transformer-engine",
                fix="Use DelayedScaling() or Float8CurrentScaling() as the recipe, or estimate without FP8.",
            )
        both = _has_all_layouts()
        scale_inv = None if kind == _CURRENT else torch.empty(1, dtype=torch.float32, device=device)
        data = transposed = None
        if quantizer.rowwise_usage or both:
            data = torch.empty(shape, dtype=torch.uint8, device=device)
        if quantizer.columnwise_usage and not both:
            transposed = torch.empty(shape[-1:] + shape[:-1], dtype=torch.uint8, device=device)
        if scale_inv is None:
            scale_inv = torch.empty(1, dtype=torch.float32, device=device)
        parts = {
            "data": data,
            "fp8_scale_inv": scale_inv,
            "fp8_dtype": quantizer.dtype,
            "data_transpose": transposed,
            "quantizer": quantizer,
        }
        module: Any = inspect.getmodule(type(quantizer))
        if quantizer.internal:
            names = ("Float8TensorStorage", "Float8TensorBase")
            storage = next(getattr(module, name) for name in names if hasattr(module, name))
            takes = inspect.signature(storage.__new__).parameters
            return storage(**parts, **({"fake_dtype": dtype} if "fake_dtype" in takes else {}))
        placed = (
            {"device": device}
            if "device" in inspect.signature(module.QuantizedTensor.__new__).parameters
            else {}
        )
        return module.Float8Tensor(shape=shape, dtype=dtype, **placed, **parts)

    def generic_gemm(
        self,
        a: Any,
        transa: bool,
        b: Any,
        transb: bool,
        out: Any,
        quantizer: Any,
        out_dtype: Any,
        bias: torch.Tensor | None,
        bias_type: Any,
        gelu: bool,
        gelu_in: torch.Tensor | None,
        grad: bool,
        workspace: torch.Tensor,
        *_: Any,
        extra_output: Any = None,
        **__: Any,
    ) -> list[Any]:
        """Return [out, gradient of the bias, input of GELU, extra output]."""
        rows, columns = _flat(a)
        shape = [_flat(b)[1]] if transb else list(b.size()[:-1])
        shape.append(rows if transa else columns)
        dtype = self._dtype(out_dtype, workspace.dtype) if out is None else out.dtype
        device = workspace.device
        if out is None:
            out = self.empty(quantizer, shape, dtype, device)
        fused = _is_per_tensor(a, b) and type(quantizer).__name__ == "Float8Quantizer"
        unquantized = torch.empty(shape, dtype=dtype, device=device) if quantizer and not fused else None
        bias_grad = None
        if bias is not None and grad:
            bias_grad = torch.empty(b.size()[-1], dtype=dtype, device=device)
        if gelu and not grad:
            kind = self._dtype(bias_type, dtype) if _is_per_tensor(a, b) else dtype
            gelu_in = torch.empty(shape, dtype=kind, device=device)
        del unquantized
        return [out, bias_grad, gelu_in if gelu else None, extra_output]

    def layernorm_fwd(
        self, x: Any, _weight: Any, _bias: Any, _eps: float, out: Any, quantizer: Any, out_dtype: Any, *_: Any
    ) -> list[Any]:
        """Return [out, mean, reciprocal standard deviation]; the last two are float32, one for each row."""
        mean, rsigma = _row_values(x), _row_values(x)
        return [self._normalised(x, out, quantizer, out_dtype), mean, rsigma]

    def rmsnorm_fwd(
        self, x: Any, _weight: Any, _eps: float, out: Any, quantizer: Any, out_dtype: Any, *_: Any
    ) -> list[Any]:
        """Return [out, None, reciprocal root mean square]; the last is float32, one for each row."""
        rsigma = _row_values(x)
        return [self._normalised(x, out, quantizer, out_dtype), None, rsigma]

    def quantize(self, tensor: torch.Tensor, quantizer: Any, output: Any = None, *_: Any) -> Any:
        """Return the given output, or a new quantized tensor."""
        source = tensor.contiguous()
        if output is None:
            output = self.empty(quantizer, source.shape, source.dtype, source.device)
        scratch = _amax_and_scale(quantizer, source)
        del scratch
        return output

    def bgrad_quantize(self, grad_output: torch.Tensor, quantizer: Any) -> list[Any]:
        """Return [gradient of the bias, quantized gradient]."""
        source = grad_output.contiguous()
        if quantizer is None:
            return [_sum_rows(source), source]
        quantized = self.empty(quantizer, source.shape, source.dtype, source.device)
        if _has_all_layouts() or (not _is_current_scaling(quantizer) and quantizer.columnwise_usage):
            bias_grad = source.new_empty(source.shape[-1])
            workspace = _tile_sums(source)
            del workspace
        else:
            bias_grad = _sum_rows(source)
            self.quantize(source, quantizer, quantized)
        return [bias_grad, quantized]

    def dequantize(self, tensor: Any, dtype: Any) -> torch.Tensor:
        """Return a tensor of the same shape in `dtype`."""
        return torch.empty(tensor.size(), dtype=self._dtype(dtype, tensor.dtype), device=tensor.device)

    def dactivation(self, grad: torch.Tensor, x: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
        """Return the gradient of an activation function's input."""
        grad, x = grad.contiguous(), x.contiguous()
        return self._computed(x, x.shape, quantizer)

    def dbias_dactivation(self, grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> list[Any]:
        """Return [gradient of the bias, gradient of an activation function's input]."""
        grad, x = grad.contiguous(), x.contiguous()
        input_grad = self.empty(quantizer, x.shape, grad.dtype, grad.device)
        bias_grad = grad.new_empty(x.shape[-1])
        workspace = _tile_sums(x)
        del workspace
        return [bias_grad, input_grad]

    def get_fused_attn_backend(self, *args: Any) -> Any:
        """Return the backend for any length in 16 bits; since 2.20 (one argument), with an empty message."""
        return (self._attention, "") if len(args) == 1 else self._attention

    def _activation(self, divisor: int) -> Callable[..., Any]:
        def run(x: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
            x = x.contiguous()
            return self._computed(x, (*x.shape[:-1], x.shape[-1] // divisor), quantizer)

        return run

    def _computed(self, x: torch.Tensor, shape: Sequence[int], quantizer: Any) -> Any:
        """Return a result in the dtype of `x`, quantized afterwards if the kernel cannot do it."""
        out = self.empty(quantizer, shape, x.dtype, x.device)
        high = x.new_empty(shape) if _is_current_scaling(quantizer) else None
        del high
        return out

    def _normalised(self, x: Any, out: Any, quantizer: Any, out_dtype: Any) -> Any:
        dtype = self._dtype(out_dtype, x.dtype)
        if out is None:
            out = self.empty(quantizer, x.size(), dtype, x.device)
        high = torch.empty(x.size(), dtype=dtype, device=x.device) if _is_current_scaling(quantizer) else None
        workspace = torch.empty(1, dtype=torch.uint8, device=x.device)
        del workspace, high
        return out

    def _dtype(self, number: Any, otherwise: torch.dtype) -> torch.dtype:
        if isinstance(number, torch.dtype):
            return number
        return otherwise if number is None else self._dtypes[int(number)]


def layernorm_bwd(dz: Any, x: Any, _mean: Any, _rsigma: Any, gamma: torch.Tensor, *_: Any) -> list[Any]:
    """Return the gradients of [input, gamma, beta]."""
    return _norm_gradients(dz, x, gamma, 2)


def rmsnorm_bwd(dz: Any, x: Any, _rsigma: Any, gamma: torch.Tensor, *_: Any) -> list[Any]:
    """Return the gradients of [input, gamma]."""
    return _norm_gradients(dz, x, gamma, 1)


def fp8_transpose(data: torch.Tensor, _dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `out`, or a new tensor with the last dimension first."""
    return data.new_empty((data.shape[-1], *data.shape[:-1])) if out is None else out


def fused_attn_fwd(*args: Any, **_: Any) -> list[Any]:
    """Return [output, softmax statistics (float32, one for each row and head), state of the generator].

    cuDNN's workspace is not known and not counted.
    """
    query, _key, value = _wide(args)[:3]
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    state = torch.empty(2, dtype=torch.int64, device=query.device)
    statistics = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    return [out, statistics, state]


def fused_attn_bwd(*args: Any, **_: Any) -> list[Any]:
    """Return the gradients of [query, key, value], in one block if these are views of one."""
    inputs = _wide(args)[:3]
    blocks: dict[Any, torch.Tensor] = {}
    gradients = []
    for tensor in inputs:
        storage = tensor.untyped_storage()
        if storage not in blocks:
            blocks[storage] = torch.empty(
                storage.nbytes() // tensor.element_size(), dtype=tensor.dtype, device=tensor.device
            )
        gradients.append(blocks[storage].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return [*gradients, *[None] * 2]


def _wide(args: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors with at least 3 dimensions: query, key and value come first."""
    return [argument for argument in args if isinstance(argument, torch.Tensor) and argument.dim() >= 3]


def _flat(tensor: Any) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix, whose columns are its last dimension."""
    size = tuple(tensor.size())
    return math.prod(size[:-1]), size[-1]


def _row_values(x: Any) -> torch.Tensor:
    return torch.empty(_flat(x)[0], dtype=torch.float32, device=x.device)


def _norm_gradients(dz: Any, x: Any, gamma: torch.Tensor, parameters: int) -> list[Any]:
    """Return the gradients of a norm's input and parameters.

    The workspace has float32 sums of each multiprocessor, for each parameter. The kernel is taken to run one
    block on each. Only the GPU knows how many there are.
    """
    dz, x = dz.contiguous(), x.contiguous()
    gradients = [torch.empty_like(x), *(torch.empty_like(gamma) for _ in range(parameters))]
    processors: int = torch.cuda.get_device_properties(gamma.device).multi_processor_count
    sums = parameters * processors * gamma.numel()
    workspace = torch.empty(sums, dtype=torch.float32, device=gamma.device)
    del workspace
    return gradients


def _tile_sums(matrix: torch.Tensor) -> torch.Tensor:
    """Return the workspace of a kernel that also sums rows: a float32 sum for each column of 128 rows."""
    rows, columns = _flat(matrix)
    return torch.empty(math.ceil(rows / 128) * columns, dtype=torch.float32, device=matrix.device)


def _sum_rows(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.reshape(-1, matrix.shape[-1]).sum(0)


def _has_all_layouts() -> bool:
    """Whether the GPU multiplies FP8 matrices of any layout, so that none keeps a transposed copy."""
    capability = torch.cuda.get_device_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def _is_per_tensor(*tensors: Any) -> bool:
    return any(type(tensor).__name__.startswith("Float8Tensor") for tensor in tensors)


def _is_current_scaling(quantizer: Any) -> bool:
    return type(quantizer).__name__ == _CURRENT


def _amax_and_scale(quantizer: Any, source: torch.Tensor) -> torch.Tensor | None:
    if not _is_current_scaling(quantizer):
        return None
    return torch.empty(2, dtype=torch.float32, device=source.device)


_MODULE = "transformer_engine.pytorch"
_COMPILED = "transformer_engine_torch"

_KEPT: dict[str, Any] = {
    "_cublas_workspace": lambda: None,
    "_multi_stream_cublas_workspace": list,
    "_dummy_wgrads": dict,
    "_cu_seqlens_cache": dict,
    "_default_causal_mask": dict,
}
"""Variables of the library's modules that hold tensors between calls, and what each is at first."""


class TransformerEngine:
    """The plugin for transformer_engine.pytorch, which must be imported before the estimate begins."""

    name = "transformer-engine"

    def applies(self) -> bool:
        """Return whether transformer_engine.pytorch is imported."""
        return _MODULE in sys.modules

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Replace the compiled functions everywhere in the library, and put aside what it keeps.

        Raises:
            MemPluginError: the library is older than version 2.
        """
        compiled: Any = sys.modules.get(_COMPILED)
        _check(compiled)
        constants: Any = importlib.import_module(f"{_MODULE}.constants")
        attention: Any = importlib.import_module(f"{_MODULE}.cpp_extensions.fused_attn")
        all_kernels = Kernels(constants.TE_DType, attention.FusedAttnBackend["F16_arbitrary_seqlen"]).all()
        kernels = {name: new for name, new in all_kernels.items() if hasattr(compiled, name)}
        changes: list[tuple[object, str, object]] = [(compiled, *item) for item in kernels.items()]
        new_of = {id(getattr(compiled, name)): new for name, new in kernels.items()}
        for module in _modules():
            for name, value in list(vars(module).items()):
                if name in _KEPT:
                    changes.append((module, name, _KEPT[name]()))
                elif isinstance(value, functools._lru_cache_wrapper):
                    new_of.setdefault(id(value), functools.lru_cache(maxsize=None)(value.__wrapped__))
                if id(value) in new_of:
                    changes.append((module, name, new_of[id(value)]))
        linear: Any = sys.modules[_MODULE].Linear
        if hasattr(linear, "_prealloc_cublas_workspace"):
            changes.append((linear, "_prealloc_cublas_workspace", _take_workspace))
        with replaced(*changes), _without_fp8_state():
            yield


def _take_workspace(layer: Any) -> None:
    """Allocate the workspace of products when a layer is made: the library leaves fake tensors out."""
    weight = getattr(layer, layer.weight_names[0], None)
    if weight is not None and weight.device.type == "cuda":
        gemm: Any = importlib.import_module(f"{_MODULE}.cpp_extensions.gemm")
        gemm.get_cublas_workspace(weight.device.index, False, False)


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("transformer_engine.")]


def _check(compiled: Any) -> None:
    if not hasattr(compiled, "generic_gemm"):
        raise MemPluginError(
            "This version of transformer-engine is too old for estimates.",
            where="the plugin transformer-engine",
            fix="Install transformer-engine 2.2 or newer, or leave the plugin out with plugins=().",
        )


@contextmanager
def _without_fp8_state() -> Iterator[None]:
    """Give the library's FP8 state its first values inside this context, and restore it afterwards."""
    managers = (getattr(module, "FP8GlobalStateManager", None) for module in _modules())
    manager = next((candidate for candidate in managers if candidate is not None), None)
    if manager is None:
        yield
        return
    before = {name: value for name, value in vars(manager).items() if not _is_method(value)}
    manager.reset()
    try:
        yield
    finally:
        for name, value in before.items():
            if not name.startswith("__"):
                setattr(manager, name, value)


def _is_method(value: object) -> bool:
    return isinstance(value, (classmethod, staticmethod)) or callable(value)
