"""Small models trained for real under torch.profiler, with every oracle written down beside them."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.trace import MemoryTrace


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
        )
        self.head = nn.Linear(16 * 6 * 6, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))

    @staticmethod
    def batch():
        return torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))


class Block(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.ln1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    def __init__(self, checkpointing: str | None = None, blocks=2, width=32, vocabulary=60):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.checkpointing = checkpointing

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)

    @staticmethod
    def batch():
        return torch.randint(0, 60, (4, 16)), torch.randint(0, 60, (64,))


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(60, 24),
            nn.LSTM(24, 32, batch_first=True),
            nn.Linear(32, 60),
        )

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0]).flatten(0, 1)

    batch = staticmethod(Transformer.batch)


MODELS: dict[str, Callable[[], Any]] = {
    "cnn": CNN,
    "transformer": Transformer,
    "lstm": LSTM,
    "checkpointed": lambda: Transformer("non-reentrant"),
    "reentrant": lambda: Transformer("reentrant"),
}


@dataclass
class Cycle:
    """One profiled window: the trace, and what others say of it.

    `reported` are the profiler's own memory events as it exports them, in time order:
    (ns, address, signed bytes, total allocated). `alive` are (address, bytes) of all storages that
    Python's garbage collector could find when the window ended.
    """

    trace: MemoryTrace
    reported: list[tuple[int, int, int, int]]
    alive: dict[int, int]
    start: dict[int, int]
    chrome: dict[str, Any] = field(repr=False)
    tree: Any = field(repr=False)
    memory_profile: Any = field(repr=False, default=None)


def storages_alive() -> dict[int, int]:
    """(address -> bytes) of the storages of all tensors that are alive in Python."""
    found = {}
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided:
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def reported_events(path: Path) -> tuple[list[tuple[int, int, int, int]], dict[str, Any]]:
    """The `[memory]` instants of an exported trace, in time order."""
    chrome = json.loads(path.read_text())
    memory = [event for event in chrome["traceEvents"] if event.get("name") == "[memory]"]
    memory.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))
    base = chrome["baseTimeNanoseconds"]
    args = [(round(event["ts"] * 1000) + base, event["args"]) for event in memory]
    return [(time, int(a["Addr"]), int(a["Bytes"]), int(a["Total Allocated"])) for time, a in args], chrome


def train(
    model: Any,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None,
    steps: int = 4,
    plan: Callable[[int], Any] | None = None,
    given: bool = True,
    zero_first: bool = False,
    step: Callable[..., Any] | None = None,
    with_memory_profile: bool = False,
    **options: Any,
) -> list[Cycle]:
    """Train a model under the profiler and return one `Cycle` for each profiled window.

    The model is a module, or one compiled; without `batch` it brings its own.
    """
    torch.manual_seed(0)
    gc.collect()
    mine = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    others = storages_alive().keys() - mine  # of earlier tests
    steps_with = optimizer(model.parameters(), lr=0.01)
    recorder = WindowRecorder({"": model} if given else {}, [steps_with] if given else [], finds_all=False)
    watch(recorder)
    cycles: list[Cycle] = []

    def ready(prof: profile) -> None:
        window = recorder.take()
        alive = {address: size for address, size in storages_alive().items() if address not in others}
        assert window is not None
        trace = trace_from_profile(prof, window, len(cycles))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(path))
            reported, chrome = reported_events(path)
        assert prof.profiler is not None
        assert prof.profiler.kineto_results is not None
        tree = prof.profiler.kineto_results.experimental_event_tree()
        start = {seen.address: seen.bytes for seen in window.start}
        cycles.append(Cycle(trace, reported, alive, start, chrome, tree))
        if with_memory_profile:
            cycles[-1].memory_profile = prof._memory_profile()

    batch = batch or model.batch
    plan = plan or schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, profile_memory=True, on_trace_ready=ready, **options
    ) as prof:
        for _ in range(steps):
            (step or _step)(model, steps_with, batch, zero_first)
            prof.step()
    return cycles


def _step(model, optimizer, batch, zero_first) -> None:
    x, y = batch()
    if zero_first:
        optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if not zero_first:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
