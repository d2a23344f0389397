"""Ordinary programs of many kinds and sizes, the small ones included, whose windows the benchmarks record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import training


@dataclass(frozen=True)
class Running:
    """A program that was set up: a function that runs one step, its model and its optimizer."""

    step: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class Program:
    """A program, and how many steps are recorded in a window of it."""

    name: str
    start: Callable[[], Running]
    steps: int


def _trained(
    model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer
) -> Running:
    """Return a program that trains a classifier; its first step has run, so that all state exists."""

    def step() -> None:
        x, y = batch()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    return Running(step, model, optimizer)


def _mlp() -> Running:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    batch = lambda: (torch.randn(32, 64), torch.randint(10, (32,)))  # noqa: E731
    return _trained(model, batch, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def _cnn() -> Running:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32), (32, 64)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    batch = lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))  # noqa: E731
    return _trained(model, batch, torch.optim.Adam(model.parameters()))


class _Encoder(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(tokens)))
        return out


def _tokens(rows: int, length: int, vocabulary: int = 200) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (2, rows, length))
    return tokens[0], tokens[1]


def _small_transformer() -> Running:
    model = _Encoder(32, 2)
    return _trained(model, partial(_tokens, 4, 16), torch.optim.AdamW(model.parameters()))


def _large_transformer() -> Running:
    model, optimizer = training.make()
    return Running(lambda: training.step(model, optimizer), model, optimizer)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(200, 64),
            nn.GRU(64, 64, 2, batch_first=True),
            nn.Linear(64, 200),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.embed(tokens))[0])
        return out


def _gru() -> Running:
    model = _Recurrent()
    return _trained(model, partial(_tokens, 8, 32), torch.optim.Adam(model.parameters()))


def _gpt2() -> Running:
    from transformers import GPT2Config, GPT2LMHeadModel  # heavy

    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens = torch.randint(500, (4, 64))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return Running(step, model, optimizer)


def _dqn() -> Running:
    """A loop of tiny operators: for each action one of a network, then a batch out of a replay buffer."""
    policy, target = (nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(2))
    optimizer = torch.optim.Adam(policy.parameters())
    replay: deque[tuple[Tensor, Tensor, Tensor, Tensor]] = deque(maxlen=500)
    state = torch.randn(4)

    def step() -> None:
        nonlocal state
        for _ in range(20):
            with torch.no_grad():
                action = policy(state[None]).argmax(1)
            following = state * 0.9 + 0.1 * torch.randn(4)
            replay.append((state, action, following.sum()[None], following))
            state = following
        rows = [replay[row] for row in torch.randint(len(replay), (32,)).tolist()]
        states, actions, rewards, followers = (torch.stack(column) for column in zip(*rows, strict=True))
        with torch.no_grad():
            wanted = rewards.squeeze(1) + 0.99 * target(followers).max(1).values
        loss = F.smooth_l1_loss(policy(states).gather(1, actions).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    return Running(step, policy, optimizer)


def _evaluation() -> Running:
    model = _Encoder(64, 3).eval()

    def step() -> None:
        with torch.no_grad():
            tokens, targets = _tokens(8, 32)
            (model(tokens).argmax(-1) == targets).float().mean().item()

    step()
    return Running(step, model)


def _autoencoder() -> Running:
    """Two models in one module, gradients that are set to zero instead of None, and a loss of two parts."""
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU())
    decoder = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = torch.optim.RMSprop(model.parameters())

    def step() -> None:
        images = torch.rand(8, 1, 28, 28)
        code = encoder(images)
        loss = F.mse_loss(decoder(code), images) + 1e-3 * code.square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    step()
    return Running(step, model, optimizer)


PROGRAMS = (
    Program("MLP, 1 step", _mlp, 1),
    Program("autoencoder, 1 step", _autoencoder, 1),
    Program("CNN, 3 steps", _cnn, 3),
    Program("small transformer, 3 steps", _small_transformer, 3),
    Program("GRU, 3 steps", _gru, 3),
    Program("GPT-2 of 4 layers, 3 steps", _gpt2, 3),
    Program("DQN, 3 steps", _dqn, 3),
    Program("evaluation, 5 steps", _evaluation, 5),
    Program("MLP, 10 steps", _mlp, 10),
    Program("transformer of 6 blocks, 10 steps", _large_transformer, 10),
)
"""By events in a window: from 271 to 71,754."""
