"""A training without one of torch's private names. It imports nothing of ours but their table."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.torch_private import table


def trained(recorder: Callable[[nn.Module], AbstractContextManager[Any]]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with recorder(model):
        for _ in range(2):
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def profiled(model: nn.Module) -> AbstractContextManager[Any]:
    from tb_memplugin import memory_trace_handler

    handler = memory_trace_handler(tempfile.mkdtemp(), "worker", model=model)
    return torch.profiler.profile(profile_memory=True, with_stack=True, on_trace_ready=handler)


def traced(model: nn.Module) -> AbstractContextManager[Any]:
    from tb_memplugin import MemoryTracer

    return MemoryTracer().trace(model)


def train_without(missing: str, answer: Any) -> None:
    """Send the losses of a training alone, with the handler and with a tracer; the error if one ends."""
    logging.disable()
    resolve = table.resolve

    def gone(path: str) -> Any:
        if path == missing:
            raise AttributeError(f"torch has no {path}")
        return resolve(path)

    table.resolve = gone
    try:
        answer.send([trained(nullcontext), trained(profiled), trained(traced)])
    except BaseException as error:  # noqa: BLE001  # sent to the test
        answer.send(repr(error))
