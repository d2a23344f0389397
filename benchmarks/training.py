"""The training that benchmarks measure: a 6-block transformer with AdamW on random tokens, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

VOCABULARY, WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 500, 128, 4, 6, 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.ln1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step, so that the optimizer's state exists."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run one training step."""
    tokens, targets = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def profiled(
    ready: Callable[[profile], None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 10,
    **options: Any,
) -> None:
    """Train under the profiler: one step of warm-up, then `steps` recorded ones."""
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        profile_memory=True,
        on_trace_ready=ready,
        **options,
    ) as prof:
        for _ in range(steps + 1):
            step(model, optimizer)
            prof.step()
