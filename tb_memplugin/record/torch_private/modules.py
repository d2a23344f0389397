"""Private names of `nn.Module` and of the wrappers around modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.tensors_inside import subclasses
from tb_memplugin.record.torch_private.table import TABLE, getter, name, private

Tensors = dict[str, torch.Tensor | None]

_MORE_CALLS = "a profile with stacks has one event more for each module at each step"

parameters_of: Callable[[nn.Module], Tensors] = getter(
    "torch.nn.Module._parameters",
    "a module's own parameters, read without a Python call",
    _MORE_CALLS,
    instead=lambda module: dict(module.named_parameters(recurse=False)),
)
buffers_of: Callable[[nn.Module], Tensors] = getter(
    "torch.nn.Module._buffers",
    "a module's own buffers, read without a Python call",
    _MORE_CALLS,
    instead=lambda module: dict(module.named_buffers(recurse=False)),
)
children_of: Callable[[nn.Module], dict[str, nn.Module]] = getter(
    "torch.nn.Module._modules",
    "the modules in a module, read without a Python call",
    _MORE_CALLS,
    instead=lambda module: dict(module.named_children()),
)


def modules_in(
    model: nn.Module, prefix: str = "", *, every_name: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (FQN, module) of a model and of all below it, parents first, in the order of `named_modules`.

    That, and `children`, `parameters` and their kin, may be a model's own: they may raise, or never end.

    Args:
        prefix: its FQN.
        every_name: yield a module again under each other name that it has; else once, under its first.
    """
    pending: list[tuple[str, nn.Module, tuple[int, ...]]] = [(prefix, model, ())]
    visited: set[int] = set()
    while pending:
        fqn, module, above = pending.pop()
        if id(module) in above or (id(module) in visited and not every_name):
            continue
        visited.add(id(module))
        yield fqn, module
        pending += [
            (f"{fqn}.{key}" if fqn else key, child, (*above, id(module)))
            for key, child in reversed(items_of(children_of(module)))
            if child is not None
        ]


def items_of(table: Any) -> list[tuple[str, Any]]:
    """Return the items of a module's table; a scripted module has tables of another kind."""
    return list(dict.items(table) if issubclass(type(table), dict) else table.items())


def parameters_in(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model, each once."""
    return _tensors_in(model, parameters_of)


def buffers_in(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a model, each once."""
    return _tensors_in(model, buffers_of)


def _tensors_in(model: nn.Module, table_of: Callable[[nn.Module], Tensors]) -> list[Any]:
    tensors = (tensor for _, module in modules_in(model) for _, tensor in items_of(table_of(module)))
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


MODULE_TABLES = tuple(
    TABLE[f"torch.nn.Module.{table}"].name for table in ("_parameters", "_buffers", "_modules")
)
"""The attributes of a module whose keys are names of what it holds."""

_NO_CALLS = "calls of modules are not seen, so nothing is known of layers"
CALL = name(
    "torch.nn.Module._call_impl",
    "the attribute that each call of a module reads, in whose place calls are watched",
    _NO_CALLS,
)
CALLER: CodeType | None = getattr(
    getattr(nn.Module, name("torch.nn.Module._wrapped_call_impl", "who reads it", _NO_CALLS), None),
    "__code__",
    None,
)
COMPILED_CALL = name(
    "torch.nn.Module._compiled_call_impl",
    "the same of a module that is compiled in place",
    "calls of modules compiled in place are not seen",
)
FORWARD_HOOKS = name(
    "torch.nn.Module._forward_hooks",
    "the attribute that a replica of `nn.DataParallel` shares with its module; others end as it does",
    "calls of replicas are not seen; torch.compile may trace a patched call",
)
HOOKS = FORWARD_HOOKS.removeprefix("_forward")
"""The ending of the names of all dicts of a module's hooks."""
IS_REPLICA = name(
    "torch.nn.Module._replicate_for_data_parallel:_is_replica",
    "marks the replicas that `nn.DataParallel` makes of a module",
    "calls of replicas are not seen",
)
_WRAPPED = "a segment of FQNs that a wrapper inserts, left out of names"
_LONG_NAMES = "names of layers have a segment more"
WRAPPERS = frozenset(
    {
        name("torch._dynamo.eval_frame.OptimizedModule.__init__:_orig_mod", _WRAPPED, _LONG_NAMES),
        name("torch.distributed.fsdp._common_utils:_fsdp_wrapped_module", _WRAPPED, _LONG_NAMES),
        name(
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:_checkpoint_wrapped_module",
            _WRAPPED,
            _LONG_NAMES,
        ),
    }
)
"""Path segments that torch.compile, FSDP and checkpoint wrappers insert into names."""
_NOT_FOUND = "what scripted modules hold, and no variable, is missing in what was alive before"
ScriptedModule: Any = private(
    "torch.jit._script.RecursiveScriptModule",
    "the class of scripted modules, by which they are found",
    _NOT_FOUND,
    instead=torch.jit.ScriptModule,
)
_NODES = name(
    "torch._C.Graph.findAllNodes",
    "the tensors that a scripted or frozen module has in its code",
    _NOT_FOUND,
)


def tensors_of_scripted(module: Any) -> list[torch.Tensor]:
    """Return a scripted module's own parameters and buffers, and the tensors in its code.

    Python may have none of them: they are in a C++ object, and `torch.jit.freeze` puts weights into the code.
    """
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    try:
        find = getattr(module.graph, _NODES, None)
    except RuntimeError:  # it has no `forward`
        return own
    nodes = [] if find is None else find("prim::Constant")
    constants = (node for node in nodes if node.hasAttribute("value") and node.kindOf("value") == "t")
    return [*own, *(node.t("value") for node in constants)]


_LOGGING_DATA = name(
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
    "the sizes of the buckets of gradients",
    "buckets have no category",
)


def bucket_figures(module: nn.parallel.DistributedDataParallel) -> Mapping[str, Any]:
    """Return what a DistributedDataParallel says of itself, its buckets among it; nothing if it says none."""
    read: Callable[[], Mapping[str, Any]] | None = getattr(module, _LOGGING_DATA, None)
    return {} if read is None else read()


_HOOKED = name(
    "torch.optim.Optimizer._patch_step_function:hooked",
    "marks the `step` of a class of optimizers that has had an instance, so that training is known",
    "the first calls of models are taken for the steps of a program that does not train",
)


def is_any_constructed() -> bool:
    """Whether the process has, or had, an optimizer. No object is asked."""
    kinds: Iterator[type[torch.optim.Optimizer]] = subclasses(torch.optim.Optimizer)
    return any(getattr(kind.step, _HOOKED, False) for kind in kinds)
