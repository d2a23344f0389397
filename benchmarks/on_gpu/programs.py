"""The trainings to measure: a CNN, a transformer and an LSTM, in several precisions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Optimizer = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Size:
    """The size of the programs: for a GPU with 16 GB or more, or for a trial on the CPU."""

    images: int
    pixels: int
    width: int
    blocks: int
    tokens: int
    vocabulary: int
    batch: int


LARGE = Size(images=32, pixels=128, width=1024, blocks=8, tokens=512, vocabulary=32_000, batch=8)
SMALL = Size(images=2, pixels=16, width=32, blocks=2, tokens=16, vocabulary=100, batch=2)


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def cnn(size: Size) -> nn.Module:
    """Return a network that classifies images."""
    layers = [Residual(64) for _ in range(size.blocks)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


class Transformer(nn.Module):
    """A transformer over tokens, with optional activation checkpointing."""

    def __init__(self, size: Size, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.width // 16 if size.width < 64 else size.width // 64, 4 * size.width, 0.0,
                batch_first=True, norm_first=True,
            )
            for _ in range(size.blocks)
        )  # fmt: skip
        self.head = nn.Linear(size.width, size.vocabulary)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        out: Tensor = self.head(x)
        return out.flatten(0, 1)


class Recurrent(nn.Module):
    """An LSTM over tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.LSTM(size.width, size.width, 2, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embed(tokens))[0])
        return out.flatten(0, 1)


MODELS: dict[str, Callable[[Size], nn.Module]] = {
    "CNN": cnn,
    "transformer": Transformer,
    "transformer, checkpointed": partial(Transformer, checkpointing=True),
    "LSTM": Recurrent,
}

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": torch.optim.Adam,
    "fused Adam": partial(torch.optim.Adam, fused=True),
}


@dataclass(frozen=True)
class Program:
    """One training. `precision`: fp32, bf16 (the model itself) or AMP (autocast to bf16)."""

    model: str
    precision: str
    optimizer: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}, {self.optimizer}{', compiled' if self.compiled else ''}"

    def step(self, device: str, size: Size) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
        """Return a function that trains one step, and the model and the optimizer that it uses."""
        model = MODELS[self.model](size).to(device)
        model = model.bfloat16() if self.precision == "bf16" else model
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        called = torch.compile(model) if self.compiled else model
        inputs, targets = self._batch(device, size)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16, enabled=self.precision == "AMP"):
                loss = F.cross_entropy(called(inputs).float(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step, model, optimizer

    def train(self, device: str, size: Size, steps: int = 3) -> None:
        """Create the model, train it for some steps, and delete it."""
        step = self.step(device, size)[0]
        for _ in range(steps):
            step()

    def _batch(self, device: str, size: Size) -> tuple[Tensor, Tensor]:
        if self.model == "CNN":
            images = torch.zeros(size.images, 3, size.pixels, size.pixels, device=device)
            targets = torch.zeros(size.images, dtype=torch.int64, device=device)
            return images.bfloat16() if self.precision == "bf16" else images, targets
        tokens = torch.zeros(size.batch, size.tokens, dtype=torch.int64, device=device)
        return tokens, torch.zeros(size.batch * size.tokens, dtype=torch.int64, device=device)


PROGRAMS = (
    Program("CNN", "fp32", "SGD"),
    Program("CNN", "fp32", "Adam"),
    Program("CNN", "fp32", "fused Adam"),
    Program("CNN", "AMP", "SGD"),
    Program("CNN", "AMP", "Adam"),
    Program("CNN", "bf16", "Adam"),
    Program("CNN", "fp32", "SGD", compiled=True),
    Program("transformer", "fp32", "SGD"),
    Program("transformer", "fp32", "Adam"),
    Program("transformer", "fp32", "fused Adam"),
    Program("transformer", "AMP", "Adam"),
    Program("transformer", "bf16", "Adam"),
    Program("transformer", "bf16", "fused Adam"),
    Program("transformer", "bf16", "Adam", compiled=True),
    Program("transformer, checkpointed", "fp32", "Adam"),
    Program("transformer, checkpointed", "bf16", "fused Adam"),
    Program("LSTM", "fp32", "SGD"),
    Program("LSTM", "fp32", "Adam"),
    Program("LSTM", "AMP", "Adam"),
    Program("LSTM", "bf16", "fused Adam"),
)


def clean(device: str) -> None:
    """Free what earlier programs left: compiled code, cuBLAS workspaces, the allocator's cache."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
