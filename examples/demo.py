"""Train a small language model twice, keeping its activations and recomputing them, and record its memory.

    python examples/demo.py
    tensorboard --logdir runs/demo

The model reads bytes, and the text is Python's own standard library, so nothing is downloaded. Both runs
start from the same weights and see the same batches, so their losses agree and only their use of memory
differs.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from tb_memplugin import memory_trace_handler


@dataclass(frozen=True)
class Config:
    """The shape of a run's model and of its batches."""

    name: str
    recompute: bool = False
    vocabulary: int = 256  # one token per byte
    context: int = 256
    width: int = 128
    heads: int = 4
    depth: int = 4
    batch: int = 16


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position attends to itself and to earlier positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """A feed-forward network, applied to each position, with a hidden layer of four times the width."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and an MLP, each with layer normalization before it and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width)
        self.attn = CausalSelfAttention(config)
        self.ln2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class Transformer(nn.Module):
    """A small GPT: embeddings, blocks, and a head that predicts the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.ln = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library() -> Tensor:
    """Read the sources of Python's standard library as bytes, in an order that every run shares."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, config: Config, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and the tokens that follow them, both (batch, context), from random places, endlessly."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - config.context - 1, (config.batch, 1), generator=generator)
        piece = text[starts + torch.arange(config.context + 1)].long()
        yield piece[:, :-1], piece[:, 1:]


def train(config: Config, text: Tensor, logdir: Path, steps: int) -> Iterator[float]:
    """Train, yield the loss of each step, and record the memory of a few under `logdir/<run>`."""
    torch.manual_seed(0)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = str(logdir / config.name)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=steps // 3 - 3, warmup=1, active=2, repeat=3),
        profile_memory=True,
        record_shapes=True,
        with_stack=True,
        on_trace_ready=memory_trace_handler(run, worker_name="rank0", model=model, optimizer=optimizer),
    ) as profiler:
        for tokens, targets in islice(batches(text, config), steps):
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
            yield loss.item()


@click.command()
@click.option("--logdir", type=click.Path(path_type=Path), default="runs/demo", show_default=True)
@click.option("--steps", type=click.IntRange(min=12), default=60, show_default=True, help="in each run")
def main(logdir: Path, steps: int) -> None:
    """Train a small language model twice and record where its memory goes."""
    console = Console(highlight=False)
    text = standard_library()
    console.print(f"Training on {len(text) / 1e6:.1f} MB of Python's standard library, byte by byte.")
    results = Table("run", "first loss", "last loss", "median seconds a step")
    columns = ("{task.description:>12}", BarColumn(), MofNCompleteColumn(), "{task.fields[loss]}")
    with Progress(*columns, console=console) as progress:
        for config in (Config("baseline"), Config("checkpointed", recompute=True)):
            task = progress.add_task(config.name, total=steps, loss="")
            losses: list[float] = []
            times = [time.perf_counter()]
            for loss in train(config, text, logdir, steps):
                losses.append(loss)
                times.append(time.perf_counter())
                progress.update(task, advance=1, loss=f"loss {loss:.3f}")
                if len(losses) % 10 == 0:
                    progress.console.print(f"{config.name:>12}  step {len(losses):>3}  loss {loss:.3f}")
            seconds = median(end - start for start, end in pairwise(times))
            results.add_row(config.name, f"{losses[0]:.3f}", f"{losses[-1]:.3f}", f"{seconds:.3f}")
    console.print(results)
    console.print(f"Both are in the Memory tab: tensorboard --logdir {logdir}", soft_wrap=True)


if __name__ == "__main__":
    main()
