"""Layers that ask a stand-in for a GPU's allocator for memory, while they run on the CPU."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import torch
from torch import nn

from tests.allocators import StandIn


class Asks(torch.autograd.Function):
    """Asks the stand-in for memory in forward and in backward, as a kernel would ask a GPU's allocator."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        layer.ask(layer.forward_bytes)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        layer = ctx.layer
        layer.ask(layer.backward_bytes)
        layer.give_back()
        return gradient * 1, None


class Layer(nn.Module):
    def __init__(self, gpu, forward_bytes, backward_bytes):
        super().__init__()
        self.gpu, self.forward_bytes, self.backward_bytes = gpu, forward_bytes, backward_bytes
        self.mine: list[tuple[int, int]] = []

    def ask(self, size):
        self.gpu.count += 1
        address = 0x10000 * self.gpu.count
        self.mine.append((address, size))
        self.gpu.note("alloc", address, size, time.time_ns() // 1000)
        time.sleep(0.0002)  # the history's clock counts microseconds

    def give_back(self):
        while self.mine:
            address, size = self.mine.pop()
            for action in ("free_requested", "free_completed"):
                self.gpu.note(action, address, size, time.time_ns() // 1000)
        time.sleep(0.0002)

    def forward(self, x):
        time.sleep(0.0002)
        return Asks.apply(x, self)


class Gpu(StandIn):
    """An allocator without marks, as before PyTorch 2.10."""

    count = 0

    def as_allocator(self, *, observes=True):
        return replace(super().as_allocator(observes=observes), set_mark=None, mark=None)


class ThreadsGpu(Gpu):
    """Marks are per thread and stand in the entries, as in torch's history."""

    def __init__(self, **given):
        super().__init__(**given)
        self.here = threading.local()

    def set_mark(self, mark):
        self.here.mark = mark

    def mark_here(self):
        return getattr(self.here, "mark", "")

    def as_allocator(self, *, observes=True):
        allocator = super().as_allocator(observes=observes)
        return replace(allocator, set_mark=self.set_mark, mark=self.mark_here)

    def note(self, *given):
        super().note(*given)
        for entry in self.entries[-1:]:
            entry["user_metadata"] = self.mark_here()
