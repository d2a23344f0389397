"""The role that a torch.profiler event has, by its name and kind."""

from __future__ import annotations

import re

from tb_memplugin.record.torch_private.profiler import CallFields, Event, OperatorFields, RecordScope
from tb_memplugin.trace.kinds import ColumnEnum

NODE_PREFIX = "autograd::engine::evaluate_function: "
STEP_PREFIX = "ProfilerStep#"
SHARDING_PREFIXES = ("FSDP::all_gather", "FSDP::post_backward_reduce")
_STEP = re.compile(r"ProfilerStep#[0-9]{1,18}\Z")
"""Matches the names of steps only: `ProfilerStep#warmup` would be a range that the user opened."""
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
"""The function that adds a gradient to a parameter's, in which that parameter's hooks run."""
OPTIMIZER_PREFIX = "Optimizer.step#"
MODULE_PREFIX = "nn.Module: "
_PLAIN_PREFIXES = ("aten::", "prims::", "quantized::", "c10d::")


class Role(ColumnEnum):
    """The role of an event that has a duration."""

    PLAIN = 0
    """An operator that never calls a module, so that only allocations are searched inside it."""
    OPERATOR = 1
    NODE = 2
    """An autograd node being evaluated."""
    STEP = 3
    OPTIMIZER = 4
    MODULE = 5
    """The Python frame of a module call (only with `with_stack`)."""
    RANGE = 6
    """Another kind of event. Events inside count as if it were not there."""
    CALL = 7
    """A Python function (only with `with_stack`). Events inside count as if it were not there."""
    SHARDING = 8
    """FSDP2 gathers parameters or reduces gradients."""
    ACCUMULATE = 9
    """A gradient is added to a parameter's: an operator, unless hooks run in it. A hook may be a whole
    optimizer, so then events inside count as if it were not there."""
    ANNOTATION = 10
    """A range that the user opened (`record_function`). Events inside count as if it were not there."""


def role_of(name: str, event: Event) -> Role:
    """Return the role of an event that has a duration."""
    if name.startswith(NODE_PREFIX):
        return Role.NODE
    if _STEP.match(name):
        return Role.STEP
    if name.startswith(OPTIMIZER_PREFIX):
        return Role.OPTIMIZER
    if name.startswith(_PLAIN_PREFIXES):
        return Role.PLAIN
    if name == "PythonDispatchMode":  # such as FlopCounterMode; ranges of steps and optimizers may be inside
        return Role.RANGE
    if name == ACCUMULATE_GRAD:
        return Role.ACCUMULATE
    if name.startswith(SHARDING_PREFIXES):
        return Role.SHARDING
    fields = event.extra_fields
    if isinstance(fields, OperatorFields):
        user = fields.scope == RecordScope.USER_SCOPE and not name.startswith("Torch-Compiled Region")
        return Role.ANNOTATION if user else Role.OPERATOR
    if not isinstance(fields, CallFields):
        return Role.RANGE
    return Role.MODULE if name.startswith(MODULE_PREFIX) else Role.CALL
