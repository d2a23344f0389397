"""Programs of `benchmarks.layers` with structures that the rules were not written for.

Modules in dictionaries in lists, shared and called in loops, functional calls, custom functions, several
models, checkpointing inside a module, and families of transformers that no other file here has.
"""

# Modules return what calls of modules give, which has no type.
# mypy: disable-error-code="no-any-return, operator, union-attr, index, attr-defined, misc, no-untyped-call"
# mypy: disable-error-code="assignment, import-not-found, import-untyped, arg-type, has-type, return-value"
# mypy: disable-error-code="possibly-undefined"
# Loops and names as people write them.
# ruff: noqa: ARG001, ARG005, B007, B905, E731, E741, UP028

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.layers.programs import DEVICE, ENCODER, VIT, Built, language, speech, tokens


def ce(net: Any) -> Any:
    ids = tokens(2, 64)
    return F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())


def imgs(n: int = 4, size: int = 32) -> Any:
    return torch.ones(n, 3, size, size, device=DEVICE)


# ModuleDict in lists, in dicts
class Branches(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.paths = nn.ModuleList(
            [
                nn.ModuleDict(
                    {"norm": nn.LayerNorm(w), "mix": nn.Linear(w, 2 * w), "out": nn.Linear(2 * w, w)}
                )
                for _ in range(3)
            ]
        )

    def forward(self, x: Any) -> Any:
        for path in self.paths:
            h = path["norm"](x)
            h = F.gelu(path["mix"](h))
            x = x + path["out"](h)
        return x


class DictNet(nn.Module):
    def __init__(self, w: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, w)
        self.streams = nn.ModuleDict({"fast": Branches(w), "slow": Branches(w)})
        self.heads = nn.ModuleDict({"lm": nn.Linear(w, 200), "aux": nn.Linear(w, 200)})

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        outs = []
        for name, stream in self.streams.items():
            outs.append(stream(x))
        y = sum(outs)
        return self.heads["lm"](y) + self.heads["aux"](x)


def dictnet() -> Built:
    return DictNet(), ce


# modules from generators, zips, reversed, slices, getattr
class Zip(nn.Module):
    def __init__(self, w: int = 64, n: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, w)
        self.mixers = nn.ModuleList(nn.Linear(w, w) for _ in range(n))
        self.norms = nn.ModuleList(nn.LayerNorm(w) for _ in range(n))
        for i in range(3):
            setattr(self, f"ff{i}", nn.Sequential(nn.Linear(w, 3 * w), nn.SiLU(), nn.Linear(3 * w, w)))
        self.head = nn.Linear(w, 200)

    def each(self) -> Any:
        for mix, norm in zip(self.mixers, self.norms):
            yield mix, norm

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for mix, norm in self.each():
            x = x + torch.tanh(mix(norm(x)))
        for i in range(3):
            x = x + getattr(self, f"ff{i}")(x)
        for mix in reversed(self.mixers):
            x = torch.relu(mix(x))
        for norm in self.norms[1:]:
            x = norm(x) * 2
        return self.head(x)


def zipped() -> Built:
    return Zip(), ce


# custom autograd function, functional calls with own parameters
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(x, scale)
        return x * torch.sigmoid(x * scale)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, scale = ctx.saved_tensors
        s = torch.sigmoid(x * scale)
        gx = g * (s + x * scale * s * (1 - s))
        return gx, (g * x * x * s * (1 - s)).sum(0).sum(0)


class RawLinear(nn.Module):
    def __init__(self, a: Any, b: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(b, a) * 0.02)
        self.b = nn.Parameter(torch.zeros(b))

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.w, self.b)


class Act(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(w))

    def forward(self, x: Any) -> Any:
        return Swish.apply(x, self.scale)


class Custom(nn.Module):
    def __init__(self, w: int = 64, n: int = 3) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(200, w) * 0.02)
        self.blocks = nn.ModuleList()
        for _ in range(n):
            self.blocks.append(nn.Sequential(RawLinear(w, 2 * w), Act(2 * w), RawLinear(2 * w, w)))
        self.gain = nn.ParameterList([nn.Parameter(torch.ones(w)) for _ in range(n)])

    def forward(self, ids: Any) -> Any:
        x = F.embedding(ids, self.table)
        for gain, block in zip(self.gain, self.blocks):
            x = x + gain * block(x)
        return x @ self.table.T


def custom() -> Built:
    return Custom(), ce


# one encoder, called twice by one line; a target network that copies it
class Encoder(nn.Module):
    def __init__(self, w: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, w, 3, 2, 1), nn.BatchNorm2d(w), nn.ReLU())
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(w, w, 3, 1, 1), nn.BatchNorm2d(w), nn.ReLU()) for _ in range(3)]
        )
        self.out = nn.Linear(w, 64)

    def forward(self, x: Any) -> Any:
        return self.out(self.body(self.stem(x)).mean((2, 3)))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = Encoder()
        self.target = Encoder()
        self.predict = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        for p in self.target.parameters():
            p.requires_grad_(False)

    def forward(self, a: Any, b: Any) -> Any:
        p, q = self.predict(self.online(a)), self.predict(self.online(b))
        with torch.no_grad():
            s, t = self.target(a), self.target(b)
        return -(F.cosine_similarity(p, t).mean() + F.cosine_similarity(q, s).mean())


def siamese() -> Built:
    return Siamese(), lambda net: net(imgs(), imgs() * 0.5)


# checkpoint inside a block, in both forms
class Part(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(w)
        self.up = nn.Linear(w, 4 * w)
        self.gate = nn.Linear(w, 4 * w)
        self.down = nn.Linear(4 * w, w)

    def _inner(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Any) -> Any:
        return x + checkpoint(self._inner, self.norm(x), use_reentrant=False)


class Reentrant(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(w, 3 * w)
        self.proj = nn.Linear(w, w)
        self.norm = nn.LayerNorm(w)

    def forward(self, x: Any) -> Any:
        def attend(y: Any) -> Any:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
            return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)

        return x + self.proj(checkpoint(attend, self.norm(x), use_reentrant=True))


class Inside(nn.Module):
    def __init__(self, w: int = 64, n: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, w)
        self.layers = nn.ModuleList([nn.ModuleList([Reentrant(w), Part(w)]) for _ in range(n)])
        self.tail = nn.Sequential(*[nn.Sequential(nn.Linear(w, w), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(w, 200)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for attn, ff in self.layers:
            x = ff(attn(x))
        x = checkpoint_sequential(self.tail, 2, x, use_reentrant=False)
        return self.head(x)


def inside() -> Built:
    return Inside(), ce


# torch.func: a functional call, a vmap over an ensemble
class Small(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.a = nn.Linear(w, 2 * w)
        self.b = nn.Linear(2 * w, w)

    def forward(self, x: Any) -> Any:
        return x + self.b(torch.relu(self.a(x)))


class Functional(nn.Module):
    def __init__(self, w: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, w)
        self.one = Small(w)
        self.members = nn.ModuleList([Small(w) for _ in range(3)])
        self.head = nn.Linear(w, 200)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        weights = {k: v * 1.01 for k, v in self.one.named_parameters()}
        x = torch.func.functional_call(self.one, weights, (x,))
        stacked = {
            k: torch.stack([dict(m.named_parameters())[k] for m in self.members])
            for k in ("a.weight", "a.bias", "b.weight", "b.bias")
        }
        call = lambda p, y: torch.func.functional_call(self.members[0], p, (y,))
        x = torch.vmap(call, in_dims=(0, None))(stacked, x).mean(0)
        return self.head(x)


def functional() -> Built:
    return Functional(), ce


# dense blocks and two optimizers, SGD with momentum, accumulated twice, clipped
class DenseLayer(nn.Module):
    def __init__(self, a: Any, g: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(a)
        self.conv = nn.Conv2d(a, g, 3, padding=1, bias=False)

    def forward(self, xs: Any) -> Any:
        return self.conv(F.relu(self.norm(torch.cat(xs, 1))))


class DenseBlock(nn.ModuleDict):
    def __init__(self, n: Any, a: Any, g: Any) -> None:
        super().__init__()
        for i in range(n):
            self.add_module(f"denselayer{i + 1}", DenseLayer(a + i * g, g))

    def forward(self, x: Any) -> Any:
        xs = [x]
        for _, layer in self.items():
            xs.append(layer(xs))
        return torch.cat(xs, 1)


class DenseNet(nn.Module):
    def __init__(self, g: int = 12) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, 24, 3, padding=1))
        a = 24
        for i, n in enumerate((3, 4)):
            self.features.add_module(f"denseblock{i + 1}", DenseBlock(n, a, g))
            a += n * g
            self.features.add_module(
                f"transition{i + 1}",
                nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, a // 2, 1), nn.AvgPool2d(2)),
            )
            a //= 2
        self.classifier = nn.Linear(a, 10)

    def forward(self, x: Any) -> Any:
        f = self.features(x)
        return self.classifier(F.adaptive_avg_pool2d(F.relu(f), 1).flatten(1))


def with_sgd(net: Any, loss_of: Any, truth: Any) -> None:
    net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(2):
        for _ in range(2):
            loss = loss_of(net) / 2
            truth.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        truth.step(optimizer)
        optimizer.zero_grad()
        del loss


def densenet() -> Built:
    net = DenseNet()
    net.train_as_user = partial(with_sgd, net)
    return net, lambda net: F.cross_entropy(net(imgs()), torch.ones(4, dtype=torch.long, device=DEVICE))


# a wrapper; forward hooks that allocate; autocast to bfloat16; no foreach
class Wrapper(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Rms(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(w))

    def forward(self, x: Any) -> Any:
        return x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt().mul(x).type_as(x) * self.weight


class GQA(nn.Module):
    def __init__(self, w: Any, h: int = 8, kv: int = 2) -> None:
        super().__init__()
        self.h, self.kv, self.d = h, kv, w // h
        self.wq, self.wk = nn.Linear(w, w, bias=False), nn.Linear(w, kv * w // h, bias=False)
        self.wv, self.wo = nn.Linear(w, kv * w // h, bias=False), nn.Linear(w, w, bias=False)

    def forward(self, x: Any) -> Any:
        b, l, _ = x.shape
        q = self.wq(x).view(b, l, self.h, self.d).transpose(1, 2)
        k = self.wk(x).view(b, l, self.kv, self.d).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
        v = self.wv(x).view(b, l, self.kv, self.d).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, l, -1)
        )


class LLM(nn.Module):
    def __init__(self, w: int = 128, n: int = 3) -> None:
        super().__init__()
        self.tok = nn.Embedding(256, w)
        self.h = nn.Sequential(*[nn.Sequential(Rms(w), GQA(w), Rms(w), nn.Linear(w, w)) for _ in range(n)])
        self.final = Rms(w)
        self.out = nn.Linear(w, 256, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.tok(ids)
        for group in self.h:
            n1, attn, n2, ff = group
            x = x + attn(n1(x))
            x = x + ff(n2(x))
        return self.out(self.final(x)).float()


def amp(net: Any, loss_of: Any, truth: Any) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    net.cuda()
    for m in net.modules():
        if isinstance(m, GQA):
            m.register_forward_hook(lambda m, i, o: o * 1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(net)
        truth.backward(loss)
        truth.step(optimizer)


def wrapped_amp() -> Built:
    net = Wrapper(Wrapper(LLM()))
    net.train_as_user = partial(amp, net)
    return net, ce


# recurrences: LSTM, GRU cells in a loop over time, attention over them
class Seq2Seq(nn.Module):
    def __init__(self, w: int = 64) -> None:
        super().__init__()
        self.src = nn.Embedding(200, w)
        self.enc = nn.GRU(w, w, 2, batch_first=True, bidirectional=True)
        self.squash = nn.Linear(2 * w, w)
        self.cells = nn.ModuleList([nn.GRUCell(w if i else 2 * w, w) for i in range(2)])
        self.out = nn.Linear(w, 200)

    def step(self, y: Any, hs: Any, memory: Any) -> Any:
        a = torch.softmax((memory @ hs[-1][:, :, None]).squeeze(-1), -1)
        c = (a[:, None] @ memory).squeeze(1)
        x = torch.cat([y, c], -1)
        new = []
        for cell, h in zip(self.cells, hs):
            x = cell(x, h)
            new.append(x)
        return self.out(x), new

    def forward(self, ids: Any) -> Any:
        memory = self.squash(self.enc(self.src(ids))[0])
        hs = [memory[:, 0], memory[:, -1]]
        ys = []
        for t in range(8):
            y, hs = self.step(self.src(ids[:, t]), hs, memory)
            ys.append(y)
        return torch.stack(ys, 1)


def seq2seq() -> Built:
    def loss(net: Any) -> Any:
        ids = tokens(2, 64)
        return F.cross_entropy(net(ids).flatten(0, 1), ids[:, :8].flatten())

    return Seq2Seq(), loss


# GAN: two nets, two optimizers in turn
class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up = lambda a, b: [nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU(True)]
        down = lambda a, b: [nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        self.g = nn.Sequential(
            nn.Linear(16, 64 * 16),
            nn.Unflatten(1, (64, 4, 4)),
            *up(64, 32),
            *up(32, 16),
            nn.Conv2d(16, 3, 3, padding=1),
            nn.Tanh(),
        )
        self.d = nn.Sequential(*down(3, 16), *down(16, 32), nn.Flatten(), nn.Linear(32 * 16, 1))


def gan_train(net: Any, loss_of: Any, truth: Any) -> None:
    net.cuda()
    og = torch.optim.Adam(net.g.parameters(), lr=1e-4)
    od = torch.optim.Adam(net.d.parameters(), lr=1e-4)
    for _ in range(2):
        z = torch.randn(4, 16, device="cuda")
        fake = net.g(z)
        ld = (
            F.softplus(-net.d(torch.ones(4, 3, 16, 16, device="cuda"))).mean()
            + F.softplus(net.d(fake.detach())).mean()
        )
        truth.backward(ld)
        truth.step(od)
        lg = F.softplus(-net.d(fake)).mean()
        truth.backward(lg)
        truth.step(og)
        og.zero_grad()
        od.zero_grad()


def gan() -> Built:
    net = Gan()
    net.train_as_user = partial(gan_train, net)
    return net, None


# diffusion U-Net in diffusers' way: down and up blocks with lists of resnets, attentions, samplers
class Resnet(nn.Module):
    def __init__(self, a: Any, b: Any, t: int = 64) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, padding=1)
        self.time_emb_proj = nn.Linear(t, b)
        self.norm2, self.conv2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.conv_shortcut = nn.Conv2d(a, b, 1) if a != b else None

    def forward(self, x: Any, temb: Any) -> Any:
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        h = h + self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        h = self.conv2(self.nonlinearity(self.norm2(h)))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        return x + h


class CrossAttention(nn.Module):
    def __init__(self, c: Any, ctx: int = 32) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(c, c, bias=False),
            nn.Linear(ctx, c, bias=False),
            nn.Linear(ctx, c, bias=False),
        )
        self.to_out = nn.ModuleList([nn.Linear(c, c), nn.Dropout(0.1)])

    def forward(self, x: Any, ctx: Any) -> Any:
        q, k, v = self.to_q(x), self.to_k(ctx), self.to_v(ctx)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return self.to_out[1](self.to_out[0](y))


class Spatial(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, c)
        self.attn = CrossAttention(c)

    def forward(self, x: Any, ctx: Any) -> Any:
        h = self.norm(x).flatten(2).mT
        return x + self.attn(h, ctx).mT.reshape(x.shape)


class Down(nn.Module):
    def __init__(self, a: Any, b: Any, last: Any) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(a if i == 0 else b, b) for i in range(2)])
        self.attentions = nn.ModuleList([Spatial(b) for _ in range(2)])
        self.downsamplers = nn.ModuleList([nn.Conv2d(b, b, 3, 2, 1)]) if not last else None

    def forward(self, x: Any, temb: Any, ctx: Any) -> Any:
        outs = ()
        for resnet, attn in zip(self.resnets, self.attentions):
            x = attn(resnet(x, temb), ctx)
            outs += (x,)
        if self.downsamplers is not None:
            for sampler in self.downsamplers:
                x = sampler(x)
            outs += (x,)
        return x, outs


class Up(nn.Module):
    def __init__(self, skip: Any, a: Any, b: Any, last: Any) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(s + (a if i == 0 else b), b) for i, s in enumerate(skip)])
        self.upsamplers = nn.ModuleList([nn.Conv2d(b, b, 3, padding=1)]) if not last else None

    def forward(self, x: Any, skips: Any, temb: Any) -> Any:
        for resnet in self.resnets:
            x = resnet(torch.cat([x, skips.pop()], 1), temb)
        if self.upsamplers is not None:
            for sampler in self.upsamplers:
                x = sampler(F.interpolate(x, scale_factor=2.0))
        return x


class UNet2D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 16, 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64))
        self.down_blocks = nn.ModuleList([Down(16, 16, False), Down(16, 32, True)])
        self.mid_block = Resnet(32, 32)
        self.up_blocks = nn.ModuleList([Up([32, 32, 16], 32, 32, False), Up([16, 16], 32, 16, True)])
        self.conv_norm_out = nn.GroupNorm(8, 16)
        self.conv_out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Any, t: Any, ctx: Any) -> Any:
        temb = self.time_embedding(torch.cos(t[:, None] * torch.arange(16, device=t.device)))
        x = self.conv_in(x)
        skips = [x]
        for block in self.down_blocks:
            x, outs = block(x, temb, ctx)
            skips += outs
        x = self.mid_block(x, temb)
        for block in self.up_blocks:
            x = block(x, skips, temb)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


def diffusion() -> Built:
    def loss(net: Any) -> Any:
        noise = torch.randn(2, 3, 32, 32, device=DEVICE)
        return F.mse_loss(
            net(imgs(2) + noise, torch.ones(2, device=DEVICE), torch.ones(2, 7, 32, device=DEVICE)), noise
        )

    return UNet2D(), loss


# detection: a backbone, a pyramid with lists, heads shared over levels
class FPN(nn.Module):
    def __init__(self, ins: Any, c: Any) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(i, c, 1) for i in ins])
        self.smooth = nn.ModuleList([nn.Conv2d(c, c, 3, padding=1) for _ in ins])

    def forward(self, xs: Any) -> Any:
        ys = [l(x) for l, x in zip(self.lateral, xs)]
        for i in range(len(ys) - 1, 0, -1):
            ys[i - 1] = ys[i - 1] + F.interpolate(ys[i], size=ys[i - 1].shape[-2:])
        return [s(y) for s, y in zip(self.smooth, ys)]


class Head(nn.Module):
    def __init__(self, c: Any, n: Any) -> None:
        super().__init__()
        tower = []
        for _ in range(2):
            tower += [nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(4, c), nn.ReLU()]
        self.tower = nn.Sequential(*tower)
        self.out = nn.Conv2d(c, n, 3, padding=1)

    def forward(self, xs: Any) -> Any:
        return torch.cat([self.out(self.tower(x)).flatten(2) for x in xs], -1)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stage = lambda a, b: nn.Sequential(
            nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU(inplace=True)
        )
        self.backbone = nn.ModuleList([stage(3, 16), stage(16, 24), stage(24, 32)])
        self.fpn = FPN([16, 24, 32], 24)
        self.cls, self.box = Head(24, 5), Head(24, 4)

    def forward(self, x: Any) -> Any:
        xs = []
        for stage in self.backbone:
            x = stage(x)
            xs.append(x)
        xs = self.fpn(xs)
        return self.cls(xs), self.box(xs)


def detector() -> Built:
    def loss(net: Any) -> Any:
        a, b = net(imgs(2, 64))
        return F.binary_cross_entropy_with_logits(a, torch.ones_like(a)) + F.smooth_l1_loss(
            b, torch.zeros_like(b)
        )

    return Detector(), loss


# lists in a list, as a loop unpacks them; the loop is all that its forward does, or is in another
class Pairs(nn.Module):
    def __init__(self, w: int = 64, n: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(n):
            self.layers.append(nn.ModuleList([nn.Linear(w, 2 * w), nn.Linear(2 * w, w)]))

    def forward(self, x: Any) -> Any:
        for up, down in self.layers:
            h = torch.relu(up(x))
            x = x + down(h)
        return x


class Nested(nn.Module):
    def __init__(self, w: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, w)
        self.blocks = nn.ModuleList([Pairs(w, 2) for _ in range(3)])
        self.head = nn.Linear(w, 200)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nested() -> Built:
    return Nested(), ce


# Sequentials with names, and a list of which some allocate nothing
class Named(nn.Module):
    def __init__(self, w: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, w)
        parts = [("up", nn.Linear(w, 2 * w)), ("act", nn.ReLU(inplace=True)), ("down", nn.Linear(2 * w, w))]
        self.body = nn.Sequential(OrderedDict(parts))
        self.list = nn.ModuleList([nn.Linear(w, w), nn.Identity(), nn.Linear(w, w), nn.Dropout(0.0)])
        self.trunk = nn.ModuleList()
        for _ in range(3):
            self.trunk.append(nn.Sequential(nn.Linear(w, w), nn.LayerNorm(w), nn.ReLU()))
        self.head = nn.Linear(w, 200)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = x + self.body(x)
        for layer in self.list:
            x = torch.tanh(layer(x))
        for block in self.trunk:
            x = x + block(x)
        return self.head(x)


def named() -> Built:
    return Named(), ce


def library(module: str, kind: str, *arguments: Any, **options: Any) -> Callable[[], Built]:
    """A classifier of images of torchvision or timm, where they are installed."""

    def build() -> Built:
        net = getattr(import_module(module), kind)(*arguments, **options).train()
        return net, lambda net: F.cross_entropy(
            net(imgs(2, 64)), torch.ones(2, dtype=torch.long, device=DEVICE)
        )

    return build


def diffusers(kind: str, inputs: Callable[[], tuple[Any, ...]], **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        net = getattr(import_module("diffusers"), kind)(norm_num_groups=4, **options)
        return net, lambda net: net(*inputs()).sample.square().mean()

    return build


def latents(*more: Any) -> tuple[Any, ...]:
    return torch.ones(2, 4, 16, 16, device=DEVICE), *more


def model(
    config: str, kind: str, loss: Callable[[nn.Module], torch.Tensor], **options: Any
) -> Callable[[], Built]:
    """A model of transformers with a loss of its own."""

    def build() -> Built:
        import transformers

        return getattr(transformers, kind)(getattr(transformers, config)(**options)).train(), loss

    return build


def pixels(**more: Any) -> Callable[[nn.Module], torch.Tensor]:
    return lambda net: net(pixel_values=torch.ones(2, 3, 64, 64, device=DEVICE), **more).loss


def classes(net: nn.Module) -> torch.Tensor:
    return pixels(labels=torch.ones(2, dtype=torch.long, device=DEVICE))(net)


def features(net: nn.Module) -> torch.Tensor:
    return net(pixel_values=torch.ones(2, 3, 64, 64, device=DEVICE)).last_hidden_state.square().mean()


def waves(net: nn.Module) -> torch.Tensor:
    return net.decoder(net.encoder(torch.ones(1, 1, 8000, device=DEVICE))).square().mean()


def series(net: nn.Module) -> torch.Tensor:
    past, future = torch.ones(4, 64, 5, device=DEVICE), torch.ones(4, 24, 5, device=DEVICE)
    return net(past_values=past, future_values=future).loss


def adapted(program: Callable[[], Built], **options: Any) -> Built:
    from peft import LoraConfig, get_peft_model

    net, loss = program()
    return get_peft_model(net, LoraConfig(r=8, **options)), loss


def adapted_with_checkpoints() -> Built:
    qwen = language("Qwen3Config", num_key_value_heads=2, head_dim=32)
    net, loss = adapted(qwen, lora_dropout=0.1, target_modules="all-linear")
    net.enable_input_require_grads()
    net.gradient_checkpointing_enable({"use_reentrant": False})
    return net, loss


END = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ODD: dict[str, Callable[[], Built]] = {
    "modernbert": language(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        **END,
        cls_token_id=1,
        sep_token_id=2,
        attn_implementation="eager",
    ),
    "roformer": language("RoFormerConfig", "RoFormerForMaskedLM", **ENCODER),
    "funnel": model(
        "FunnelConfig",
        "FunnelForMaskedLM",
        lambda net: net(input_ids=(x := tokens()), labels=x).loss,
        vocab_size=512,
        block_sizes=[2, 2],
        d_model=128,
        n_head=4,
        d_head=32,
        d_inner=256,
    ),
    "efficientnet": model(
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        classes,
        width_coefficient=0.5,
        depth_coefficient=0.5,
        hidden_dim=640,
        image_size=64,
    ),
    "levit": model(
        "LevitConfig",
        "LevitForImageClassification",
        classes,
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 2, 1],
        key_dim=[16, 16, 16],
    ),
    "focalnet": model(
        "FocalNetConfig",
        "FocalNetForImageClassification",
        classes,
        image_size=64,
        embed_dim=16,
        depths=[1, 1, 2, 1],
    ),
    "resnet": model(
        "ResNetConfig",
        "ResNetForImageClassification",
        classes,
        embedding_size=16,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 2, 2, 1],
    ),
    "vitmae": model(
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        pixels(),
        **VIT,
        decoder_num_attention_heads=4,
        decoder_hidden_size=64,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=128,
    ),
    "patchtst": model(
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        series,
        num_input_channels=5,
        context_length=64,
        prediction_length=24,
        patch_length=8,
        patch_stride=4,
        d_model=64,
        num_attention_heads=4,
        ffn_dim=128,
    ),
    "rwkv": language("RwkvConfig", attention_hidden_size=128, context_length=256),
    "jamba": language(
        "JambaConfig",
        **END,
        num_key_value_heads=2,
        num_experts=4,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "deepseek": language(
        "DeepseekV3Config",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    ),
    "gpt_oss": language(
        "GptOssConfig",
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        sliding_window=64,
    ),
    "lfm2": language("Lfm2Config", num_key_value_heads=2, full_attn_idxs=[1, 3]),
    "gemma3": language("Gemma3TextConfig", num_key_value_heads=2, head_dim=32, sliding_window=64),
    "siglip": model("SiglipVisionConfig", "SiglipVisionModel", features, **VIT),
    "data2vec_audio": speech(
        "Data2VecAudioConfig",
        "Data2VecAudioModel",
        conv_dim=[32] * 7,
        mask_time_prob=0.0,
        num_conv_pos_embeddings=3,
        conv_pos_kernel_size=5,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
    ),
    "encodec": model("EncodecConfig", "EncodecModel", waves, num_filters=8, hidden_size=32, codebook_dim=32),
    "peft_gpt2": partial(
        adapted,
        language("GPT2Config", n_embd=128, n_layer=3, n_head=4),
        target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=True,
    ),
    "peft_dora": partial(
        adapted,
        language("LlamaConfig", num_key_value_heads=2),
        use_dora=True,
        target_modules=["q_proj", "v_proj", "down_proj"],
    ),
    "peft_checkpoint": adapted_with_checkpoints,
    "dictionaries": dictnet,
    "zipped": zipped,
    "custom": custom,
    "siamese": siamese,
    "inside": inside,
    "functional": functional,
    "densenet": densenet,
    "wrapped": wrapped_amp,
    "seq2seq": seq2seq,
    "gan": gan,
    "diffusion": diffusion,
    "detector": detector,
    "nested": nested,
    "pairs": lambda: (Pairs(), lambda net: net(torch.ones(8, 32, 64, device=DEVICE)).square().mean()),
    "named": named,
    "torchvision_resnet18": library("torchvision.models", "resnet18"),
    "torchvision_mobilenet": library("torchvision.models", "mobilenet_v3_small"),
    "torchvision_densenet": library("torchvision.models", "DenseNet", 8, (2, 2, 2), 16),
    "torchvision_vit": library("torchvision.models", "VisionTransformer", 64, 16, 3, 4, 64, 128),
    "torchvision_swin": library("torchvision.models", "SwinTransformer", [4, 4], 32, [2, 2], [2, 4], [4, 4]),
    "timm_mobilenet": library("timm", "create_model", "mobilenetv3_small_050"),
    "timm_convnext": library(
        "timm", "create_model", "convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)
    ),
    "diffusers_unet": diffusers(
        "UNet2DConditionModel",
        lambda: latents(torch.ones(2, device=DEVICE), torch.ones(2, 7, 32, device=DEVICE)),
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "diffusers_dit": diffusers(
        "DiTTransformer2DModel",
        lambda: latents(*[torch.ones(2, dtype=torch.long, device=DEVICE)] * 2),
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=3,
        sample_size=16,
        num_embeds_ada_norm=100,
    ),
    "dpt": model(
        "DPTConfig",
        "DPTForDepthEstimation",
        lambda net: net(pixel_values=imgs(1, 64)).predicted_depth.square().mean(),
        **VIT | {"image_size": 64, "patch_size": 16, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 32, 48, 64],
        fusion_hidden_size=32,
    ),
    "longformer": language("LongformerConfig", "LongformerForMaskedLM", attention_window=16, **ENCODER),
    "mixtral": language("MixtralConfig", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "phi3": language("Phi3Config", num_key_value_heads=2, pad_token_id=0),
}
