"""A step of training on the GPU, for the models of tests/training.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    x, y = (tensor.cuda() for tensor in model.batch())
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
