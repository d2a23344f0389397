"""The list of programs, and what several of them use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.certificate.run import Run

PROGRAMS: dict[str, CertifiedProgram] = {}
"""By name, in the order of the table."""


@dataclass(frozen=True)
class CertifiedProgram:
    """A program.

    Attributes:
        name, kind: its name, and its heading in the table.
        run: the program itself.
        world: how many processes run it at once.
        observed: whether torch's observer of operators can watch it where no profile does.
        stacks: whether a profile can record its stacks: while torch compiles, it makes millions of calls.
        differs_uncompiled: whether compiled code in it computes other bits than the same code uncompiled.
        has_trainer: whether it uses a Trainer, which takes callbacks.
    """

    name: str
    kind: str
    run: Callable[[Run], None]
    world: int = 1
    observed: bool = True
    stacks: bool = True
    differs_uncompiled: bool = False
    has_trainer: bool = False


def program(kind: str, **options: Any) -> Callable[[Callable[[Run], None]], Any]:
    """Register a function as a program; its name is the function's. See `CertifiedProgram`."""

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        name = function.__name__.replace("_", " ")
        PROGRAMS[name] = CertifiedProgram(name, kind, function, **options)
        return function

    return register


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    steps: int = 2,
) -> None:
    """Train one step before the window and some in it, and keep the losses."""

    def train_step() -> torch.Tensor:
        optimizer.zero_grad()
        computed = loss()
        computed.backward()
        optimizer.step()
        return computed

    train_step()
    with run.window(model, optimizer) as step:
        for _ in range(steps):
            run.value(train_step())
            step()
