"""Our categories beside those of torch's `_memory_profile()`, block by block at the peak.

python -m tests.sources.agreement     # prints the table of docs/categories.md
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler._memory_profiler import Action

from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.trace import Category
from tests.training import CNN, MODELS, Transformer, train


class GRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 32), nn.Linear(48, 60)
        self.gru = nn.GRU(32, 48, num_layers=2, batch_first=True)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0]).flatten(0, 1)

    batch = staticmethod(Transformer.batch)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.inner, self.up = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 10, 1)

    def forward(self, x):
        wide = F.silu(self.norm(self.down(x)))
        return self.out(torch.cat([wide, self.up(F.relu(self.inner(wide)))], 1)).mean((2, 3))

    batch = staticmethod(CNN.batch)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(768, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256),
            nn.BatchNorm1d(256), nn.SiLU(), nn.Linear(256, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)

    batch = staticmethod(CNN.batch)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(60, 32), nn.Linear(32, 4), nn.Linear(32, 60)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(x[row]) * weight[row, place, None])
        return self.head(x + out)

    batch = staticmethod(Transformer.batch)


UNTUNED = {"gru": GRU, "unet": UNet, "mlp": MLP, "experts": MixtureOfExperts}
"""Models that nobody looked at while the rules were written."""


@dataclass
class Agreement:
    """Bytes at the peak: all, those torch gives a category, those it gives the same one, and the rest."""

    total: int = 0
    named_by_torch: int = 0
    same: int = 0
    differ: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    unnamed: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Of the bytes that torch names, how many it names as we do."""
        return self.same / self.named_by_torch


def agreement(model: nn.Module, optimizer: Any = torch.optim.AdamW) -> Agreement:
    """Train a model and compare at the highest peak."""
    (cycle,) = train(
        model, optimizer=optimizer, with_memory_profile=True, record_shapes=True, with_stack=True
    )
    trace, blocks = cycle.trace, cycle.trace.allocations
    top = max(step_stats(trace, 0), key=lambda step: step.peak_bytes)
    theirs = _torch_state(cycle.memory_profile, top.peak_time_ns)
    found = Agreement(total=top.peak_bytes)
    for row in blocks.alive_at(top.peak_event, 0).tolist():
        size, ours = int(blocks.bytes[row]), Category(blocks.category[row]).key
        operator = trace.operators[blocks.operator[row]] if blocks.operator[row] >= 0 else "before the window"
        other = theirs.get(int(blocks.address[row]))
        if other is None:
            found.unnamed[ours, operator] += size
            continue
        found.named_by_torch += size
        if other == ours:
            found.same += size
        else:
            found.differ[ours, other, operator] += size
    return found


def _torch_state(profile: Any, until_ns: int) -> dict[int, str]:
    """Address -> category of the blocks that torch knows and names at a time."""
    live: dict[int, tuple[int, str | None]] = {}
    for when, action, (key, version), _ in profile.timeline:
        if when > until_ns:
            break
        if not hasattr(key, "storage"):
            continue  # torch saw no tensor in it
        block = key.storage.allocation_id
        if action is Action.DESTROY:
            live.pop(block, None)
            continue
        category = profile._categories.get(key, version + (action is Action.INCREMENT_VERSION))
        live[block] = key.storage.ptr, category.name.lower() if category else None
    return {address: name for address, name in live.values() if name is not None}


def table() -> str:
    """All models' agreement as a table in Markdown."""
    lines = ["| model | bytes at the peak | torch names | the same | differences |", "|---|---|---|---|---|"]
    models: dict[str, Any] = {**UNTUNED, **MODELS}
    for name, make in models.items():
        found = agreement(make())
        rows = "; ".join(
            f"{ours} (torch: {other}) in `{operator}` {size:,} B"
            for (ours, other, operator), size in found.differ.most_common(4)
        )
        share = f"{found.named_by_torch / found.total:.1%} | {found.share:.1%}"
        lines.append(f"| {name} | {found.total:,} | {share} | {rows or 'none'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
