"""Models of other kinds than those that the rules for categories were written on, to judge the rules by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.training import CNN, Transformer


class ResNet(nn.Module):
    """Residual blocks with batch normalisation."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))

    batch = staticmethod(CNN.batch)


class DenseNet(nn.Module):
    """Every layer sees what all earlier ones made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 8 * number, 8, 3, padding=1) for number in range(4))
        self.head = nn.Linear(35, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, F.elu(layer(x))], 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    batch = staticmethod(CNN.batch)


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, hard swishes, squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.wide, self.depth = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.squeeze, self.narrow = nn.Linear(24, 24), nn.Conv2d(24, 16, 1)
        self.norm, self.head = nn.InstanceNorm2d(24, affine=True), nn.Linear(16, 10)

    def forward(self, x):
        x = F.hardswish(self.norm(self.depth(self.wide(x))))
        x = x * self.squeeze(x.mean((2, 3))).sigmoid()[:, :, None, None]
        return self.head(self.narrow(x).amax((2, 3)))

    batch = staticmethod(CNN.batch)


class VisionTransformer(nn.Module):
    """Patches, a class token, and torch's own encoder layers."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.first, self.place = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(1, 17, 32))
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.layers(x)[:, 0])

    batch = staticmethod(CNN.batch)


class Mixer(nn.Module):
    """Linear layers over places and over channels in turn."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(60, 32), nn.LayerNorm(32), nn.Linear(32, 60)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.places(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.channels(self.norm(x))).flatten(0, 1)

    batch = staticmethod(Transformer.batch)


class Translator(nn.Module):
    """An encoder and a decoder with attention between them; the embedding is the head's weight, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 32), nn.Linear(32, 60, bias=False)
        self.head.weight = self.embed.weight
        self.encoder, self.cell = nn.GRU(32, 32, batch_first=True), nn.GRUCell(32, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, ids):
        seen, state = self.encoder(self.embed(ids))
        state, out = state[0], []
        for place in range(ids.shape[1]):
            state = self.cell(self.embed(ids[:, place]), state)
            out.append(state + self.attention(state[:, None], seen, seen)[0][:, 0])
        return self.head(torch.stack(out, 1)).flatten(0, 1)

    batch = staticmethod(Transformer.batch)


class TextCNN(nn.Module):
    """Convolutions of several widths over a text, pooled."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        self.convs = nn.ModuleList(nn.Conv1d(32, 16, width) for width in (2, 3, 4))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(48, 10)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        pooled = [F.relu(conv(x)).amax(2) for conv in self.convs]
        return self.head(self.drop(torch.cat(pooled, 1)))

    @staticmethod
    def batch():
        return torch.randint(0, 60, (16, 16)), torch.randint(0, 10, (16,))


class Fourier(nn.Module):
    """Complex weights between a Fourier transform and its inverse."""

    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(1, 16), nn.Linear(16, 10)
        self.weight = nn.Parameter(torch.randn(16, 16, 17, dtype=torch.cfloat) / 16)

    def forward(self, x):
        x = self.lift(x[..., None]).transpose(1, 2)
        modes = torch.einsum("bim,iom->bom", torch.fft.rfft(x), self.weight)
        return self.head(F.gelu(torch.fft.irfft(modes, n=32) + x).mean(2))

    @staticmethod
    def batch():
        return torch.randn(32, 32), torch.randint(0, 10, (32,))


class Autoencoder(nn.Module):
    """A variational one, of which the classes are read from the sample; normalised by weight."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.LeakyReLU(), nn.Linear(64, 16))
        self.decoder = nn.utils.parametrizations.weight_norm(nn.Linear(8, 10))

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp())

    batch = staticmethod(CNN.batch)


class Recurrent(nn.Module):
    """Cells of an LSTM called in a Python loop."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(60, 24), nn.LSTMCell(24, 32), nn.Linear(32, 60)

    def forward(self, ids):
        state, out = None, []
        for place in range(ids.shape[1]):
            state = self.cell(self.embed(ids[:, place]), state)
            out.append(state[0])
        return self.head(torch.stack(out, 1)).flatten(0, 1)

    batch = staticmethod(Transformer.batch)


MORE_UNTUNED: dict[str, Callable[[], Any]] = {
    "resnet": ResNet,
    "densenet": DenseNet,
    "separable": Separable,
    "vit": VisionTransformer,
    "mixer": Mixer,
    "translator": Translator,
    "textcnn": TextCNN,
    "fourier": Fourier,
    "autoencoder": Autoencoder,
    "lstm cells": Recurrent,
}
