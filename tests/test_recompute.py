"""What checkpointing is foretold to save, held against really checkpointing it: never less, on any model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile, schedule
from torch.utils.checkpoint import checkpoint

from tb_memplugin import load, memory_trace_handler
from tb_memplugin.analysis.advice_rules.checkpointing import Activations, Recomputed
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.steps import highest_step
from tb_memplugin.trace import MemoryTrace


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + self.drop(inner))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.stages = nn.Sequential(*(nn.Sequential(Residual(), Residual()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(32, 64, batch_first=True)
        self.second = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x)[0])[0][:, -1])
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


def perceptron() -> nn.Module:
    layers = (
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))
        for _ in range(4)
    )
    return nn.Sequential(*layers, nn.Linear(256, 10))


MODELS = {"resnet": ResNet, "recurrent": Recurrent, "encoder": Encoder, "perceptron": perceptron}
INPUTS = {
    "resnet": (8, 3, 32, 32),
    "recurrent": (64, 40, 32),
    "encoder": (16, 64, 64),
    "perceptron": (512, 256),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only get slower when threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(name: str, recompute: str, folder: Path) -> MemoryTrace:
    torch.manual_seed(0)
    model = MODELS[name]()
    rows = folds([key for key, _ in model.named_modules()])
    for key, module in model.named_modules():
        if recompute and rows[key] == recompute:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.rand(INPUTS[name])
    labels = torch.zeros(len(x), dtype=torch.long)
    with profile(
        schedule=schedule(skip_first=2, wait=0, warmup=1, active=1, repeat=1),
        profile_memory=True,
        on_trace_ready=memory_trace_handler(folder, "rank0", model=model, optimizer=optimizer),
    ) as profiler:
        for _ in range(4):
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return load(next(folder.rglob("*.mem")))


def foretold(trace: MemoryTrace, name: str) -> Recomputed:
    folded = folds([module.key for module in trace.modules])
    rows = [row for row, module in enumerate(trace.modules) if folded[module.key] == name]
    return Activations(trace, 0, highest_step(trace, 0)).recomputed(np.array(rows, np.int64))


@pytest.mark.parametrize(
    ("name", "recompute", "saves"),
    [
        ("resnet", "stages.*", True),
        ("resnet", "stages.*.*", True),
        ("resnet", "stages.*.*.drop", False),
        ("recurrent", "first", True),
        ("encoder", "encoder.layers.*.dropout", True),
        ("encoder", "encoder.layers.*.dropout1", False),
        ("perceptron", "*", True),
        ("perceptron", "*.*", False),
    ],
)
def test_no_checkpoint_saves_less_than_foretold(
    name: str, recompute: str, saves: bool, tmp_path: Path
) -> None:
    usual = trained(name, "", tmp_path / "usual")
    told = foretold(usual, recompute)
    peak = highest_step(trained(name, recompute, tmp_path / "checkpointed"), 0).peak_bytes
    random_state = told.calls * torch.get_rng_state().nbytes
    assert peak <= told.peak_bytes + random_state
    assert (told.saved_bytes > 0.05 * highest_step(usual, 0).peak_bytes) == saves
