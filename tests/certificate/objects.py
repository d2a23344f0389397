"""What an object holds, as text that two processes can compare: no addresses, no ids."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

DEEPEST = 6


def bits(tensor: torch.Tensor) -> str:
    """Return type, shape and a hash of a tensor's bytes."""
    kind = f"{_name(type(tensor))} {tensor.dtype} {list(tensor.shape)} {tensor.layout}"
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda") or tensor.is_quantized:
        return f"{kind} {tensor!r}" if tensor.device.type != "meta" else kind
    if flatten := getattr(tensor, "__tensor_flatten__", None):  # it wraps others, and perhaps a mesh
        inner = (getattr(tensor, name) for name in flatten()[0])
        return f"{kind} {[bits(part) for part in inner if isinstance(part, torch.Tensor)]}"
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{kind} {hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()}"


def outline(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return what each module of a model has in its own dictionary, in order, and its class: no values.

    Hooks are described, and those of its parameters. Reads dictionaries only: no property runs.
    """
    seen: dict[str, dict[str, str]] = {}
    for name, module in model.named_modules():
        held = object.__getattribute__(module, "__dict__")
        seen[name or "(root)"] = {key: _kind(value) for key, value in held.items()} | {
            "": _name(type(module))
        }
        for key, parameter in held.get("_parameters", {}).items():
            if isinstance(parameter, torch.Tensor):
                seen[f"{name}.{key}"] = {"": _name(type(parameter)), "hooks": _hooks_of(parameter)}
    return seen


def description(value: Any, depth: int = 0) -> Any:
    """Return what a value holds: text, or dictionaries and lists of it."""
    if depth > DEEPEST:
        return _name(type(value))
    if isinstance(value, torch.export.ExportedProgram):
        return str(value.graph)
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return _script(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, torch.optim.Optimizer):
        held = {key: description(part, depth + 1) for key, part in vars(value).items() if key != "state"}
        return {"class": _name(type(value)), "held": held, "state": _state(value, depth)}
    if isinstance(value, torch.Tensor):
        return f"{bits(value)} {_hooks_of(value)}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes {hashlib.blake2b(value, digest_size=8).hexdigest()}"
    if isinstance(value, Mapping):
        return {_short(key): description(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [description(part, depth + 1) for part in value]
    return _short(value)


def _state(optimizer: torch.optim.Optimizer, depth: int) -> list[Any]:
    """Return an optimizer's state by the number of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [description(optimizer.state.get(parameter), depth + 1) for parameter in parameters]


def _module(model: nn.Module) -> dict[str, Any]:
    graph = getattr(model, "code", "") if isinstance(model, torch.fx.GraphModule) else ""
    tensors = {**_tensors(model, "_parameters"), **_tensors(model, "_buffers")}
    return {"outline": outline(model), "tensors": tensors, "code": graph}


def _tensors(model: nn.Module, kind: str) -> dict[str, str]:
    seen = {}
    for name, module in model.named_modules():
        for key, tensor in object.__getattribute__(module, "__dict__").get(kind, {}).items():
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, UninitializedTensorMixin):
                grad = f" gradient {bits(tensor.grad)}" if tensor.is_leaf and tensor.grad is not None else ""
                seen[f"{name}.{key}"] = bits(tensor) + grad
    return seen


def _script(value: Any) -> dict[str, Any]:
    held = {name: bits(tensor) for name, tensor in getattr(value, "state_dict", dict)().items()}
    return {"code": getattr(value, "code", ""), "graph": str(getattr(value, "graph", "")), "tensors": held}


def _hooks_of(tensor: torch.Tensor) -> str:
    """Return a tensor's hooks and attributes, without the marks that dynamo puts on what it has compiled."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    attributes = [name for name in vars(tensor) if not name.startswith("_dynamo")]
    return " ".join(f"{name}={_kind(getattr(tensor, name, None))}" for name in names) + f" {attributes}"


def _kind(value: Any) -> str:
    """Return the type of a value; of hooks and other functions, which they are."""
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        return f"hooks [{', '.join(_function(hook) for hook in value.values())}]"
    if isinstance(value, Mapping):
        return f"{_name(type(value))} {_keys(value)}"
    return _function(value) if callable(value) and not isinstance(value, nn.Module) else _name(type(value))


def _keys(keys: Iterable[Any]) -> str:
    return f"[{', '.join(_short(key) for key in keys)}]"


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | torch.Size):
        return repr(value)
    return _function(value) if callable(value) else _name(type(value))


def _function(value: Any) -> str:
    wrapped = getattr(value, "func", None) or getattr(value, "__func__", None)
    if wrapped is not None and not isinstance(value, types.FunctionType):
        return f"{_name(type(value))} of {_function(wrapped)}"
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if isinstance(name, str) else _name(type(value))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
