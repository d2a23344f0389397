"""Private names of `nn.Module` and of the wrappers around modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.torch_private.table import TABLE, getter, name

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
_LOGGING_DATA = name(
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
    "the sizes of the buckets of gradients",
    "buckets have no category",
)


def bucket_figures(module: nn.parallel.DistributedDataParallel) -> Mapping[str, Any]:
    """Return what a DistributedDataParallel says of itself, its buckets among it; nothing if it says none."""
    read: Callable[[], Mapping[str, Any]] | None = getattr(module, _LOGGING_DATA, None)
    return {} if read is None else read()
