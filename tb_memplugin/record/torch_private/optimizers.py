"""Private names of `torch.optim.Optimizer`."""

from __future__ import annotations

import torch

from tb_memplugin.record.torch_private.table import name

_HOOKED = name(
    "torch.optim.Optimizer._patch_step_function:hooked",
    "marks the `step` of a class of optimizers that has had an instance, so that training is known",
    "the first calls of models are taken for the steps of a program that does not train",
)


def is_any_constructed() -> bool:
    """Whether the process has, or had, an optimizer. No object is asked."""
    pending = [torch.optim.Optimizer]
    while pending:
        optimizer = pending.pop()
        if getattr(optimizer.step, _HOOKED, False):
            return True
        pending += type.__subclasses__(optimizer)
    return False
