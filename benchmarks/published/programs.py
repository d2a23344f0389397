"""The programs of which others published peaks, written from their sources; each returns what it would print.

A program runs inside `MemoryEstimator`, so `torch.cuda` answers as on the GPU. They repeat a loop as often as
it takes for the peak to be that of every later round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

Config = Mapping[str, str]
ROUNDS = 3
EIGHT = 8
"""The batch of every attention in CS336's assignment."""


def _highest(of_each: Callable[[], object]) -> int:
    """Return the peak of allocated bytes of the last of some rounds, as Liger's `_test_memory` does."""
    for _ in range(ROUNDS):
        torch.cuda.reset_peak_memory_stats()
        of_each()
    return torch.cuda.max_memory_allocated()


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, states: Tensor) -> Tensor:
        dtype = states.dtype
        states = states.to(torch.float32)
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + 1e-6)
        return self.weight * states.to(dtype)


def rms_norm(config: Config) -> int:
    hidden = int(config["hidden"])
    beside = LlamaRMSNorm(hidden).cuda()  # Liger's own, which the script builds, too
    norm = LlamaRMSNorm(hidden).cuda()
    peak = _normalized(norm, (2048, hidden), torch.bfloat16)
    del beside
    return peak


def layer_norm(config: Config) -> int:
    hidden = int(config["hidden"])
    beside = nn.LayerNorm(hidden).cuda()
    peak = _normalized(nn.LayerNorm(hidden, eps=1e-6).cuda(), (4096, hidden), torch.float32)
    del beside
    return peak


def _normalized(norm: nn.Module, shape: tuple[int, int], dtype: torch.dtype) -> int:
    x = torch.randn(shape, dtype=dtype, device="cuda")
    dy = torch.randn_like(x)
    x.requires_grad_(True)

    def full() -> None:
        norm(x).backward(dy, retain_graph=True)

    return _highest(full)


def rope(config: Config) -> int:
    hidden, length, heads, kv_heads = int(config["hidden"]), int(config["sequence"]), 32, 8
    head = hidden // heads
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, head, 2, device="cuda").float() / head)
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q = make((1, length, heads, head)).transpose(1, 2)
    k = make((1, length, kv_heads, head)).transpose(1, 2)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device="cuda", dtype=torch.long).unsqueeze(0)
    with torch.no_grad():  # transformers 4.48 multiplies matrices here; since 5 it does not
        angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos().to(k.dtype), both.sin().to(k.dtype)
        del angles, both

    def full() -> None:
        out = apply_rotary_pos_emb(q, k, cos, sin)
        torch.autograd.grad(out, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return _highest(full)


def cross_entropy(config: Config) -> int:
    vocabulary = int(config["vocabulary"])
    logits = torch.randn(8 * 2048, vocabulary, requires_grad=True, device="cuda")
    target = torch.randint(vocabulary, (8 * 2048, 1), device="cuda").squeeze(1)
    loss = nn.CrossEntropyLoss()

    def full() -> None:
        loss(logits, target).backward()

    return _highest(full)


def gated(act: str, batch: int, config: Config) -> int:
    """Run the MLP of a Llama: `swiglu` and `geglu`."""
    x = torch.randn(
        batch, int(config["sequence"]), 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    llama = LlamaConfig(hidden_size=4096, intermediate_size=11008, hidden_act=act)
    layer = LlamaMLP(config=llama).cuda().to(torch.bfloat16)

    def full() -> None:
        y = layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return _highest(full)


def _queries(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    shape = (EIGHT, int(config["sequence"]), int(config["width"]))
    q, k, v = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3))
    return q, k, v


def _backward_alone(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = attend(q, k, v)
    loss = out.sum()
    loss.backward()
    q.grad = k.grad = v.grad = None
    return out, loss


def attention(config: Config) -> int:
    """Attention by a softmax of torch: the peak of forward and backward rounds, the last output alive."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        return torch.matmul(F.softmax(scores, dim=-1), v)

    q, k, v = _queries(config)
    for _ in range(ROUNDS):
        out, loss = _backward_alone(attend, q, k, v)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS):
        out = attend(q, k, v)
    for _ in range(ROUNDS):
        out = attend(q, k, v)
        loss = out.sum()
        q.grad = k.grad = v.grad = None
        loss.backward()
    return torch.cuda.max_memory_allocated()


def _softmax(x: Tensor) -> Tensor:
    """Return the softmax of the assignment's own code, which writes its steps out."""
    rescaled = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentiated = torch.exp(rescaled)
    return exponentiated / torch.sum(exponentiated, dim=-1, keepdim=True)


def attention_by_parts(config: Config) -> int:
    """Attention by the assignment's own code: the peaks of forward and of backward rounds apart."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(k.shape[-1])
        weights = _softmax(scores)
        return torch.einsum("bqk,bkd->bqd", weights, v)

    q, k, v = _queries(config)
    for _ in range(ROUNDS):
        out, loss = _backward_alone(attend, q, k, v)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS):
        attend(q, k, v).sum()
    forward = torch.cuda.max_memory_allocated()
    out = attend(q, k, v)
    loss = out.sum()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS):
        _backward_alone(attend, q, k, v)
    backward = torch.cuda.max_memory_allocated()
    del out, loss
    return forward if config["part"] == "forward" else backward


class OwnAttention(nn.Module):
    """The attention of the book: its own steps, with a mask that is kept or, from change 1 on, made anew."""

    mask: Tensor

    def __init__(self, width: int, heads: int, length: int, change: int) -> None:
        super().__init__()
        self.heads, self.change = heads, change
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        if not change:
            self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys, queries, values = (one.view(shape).transpose(1, 2) for one in (keys, queries, values))
        scores = queries @ keys.transpose(2, 3)
        if self.change:
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        else:
            mask = self.mask.bool()[:length, :length]
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch, length, width)
        out: Tensor = self.out(context)
        return out


class FlashAttention(nn.Module):
    """Attention from change 7 on: one projection, and torch's own kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        context = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=0.1 if self.training else 0.0, is_causal=True
        )
        out: Tensor = self.out(context.transpose(1, 2).contiguous().view(batch, length, width))
        return out


class OwnLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(var + 1e-5)
        return self.scale * normed + self.shift


class OwnGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int, change: int) -> None:
        super().__init__()
        own = change < 6
        self.att = OwnAttention(width, heads, length, change) if change < 7 else FlashAttention(width, heads)
        gelu = OwnGelu() if own else nn.GELU(approximate="tanh")
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        norm = OwnLayerNorm if own else nn.LayerNorm
        self.norm1, self.norm2, self.dropout = norm(width), norm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.att(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        x = self.dropout(x)
        return x + shortcut


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, change: int) -> None:
        super().__init__()
        width, heads, length = 768, 12, 1024
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*[GptBlock(width, heads, length, change) for _ in range(12)])
        self.norm = OwnLayerNorm(width) if change < 6 else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits


def gpt(change: int) -> nn.Module:
    return Gpt(50_304 if change >= 9 else 50_257, change)


def train_gpt(model: nn.Module, change: int, begin: Callable[[], object] = int) -> None:
    """Train the book's GPT-2 for some steps, evaluated after the first; `begin` precedes each forward."""
    batch = 32 if change >= 10 else 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=change >= 3 or None)

    def loss_of() -> Tensor:
        begin()
        ids, targets = (torch.zeros(batch, 1024, dtype=torch.long).cuda() for _ in range(2))
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for step in range(ROUNDS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        if not step:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    loss_of()
            model.train()
    model.eval()
    begin()
    ids = torch.zeros(1, 4, dtype=torch.long).cuda()
    with torch.no_grad():  # the book's 50 tokens need less than a step
        torch.argmax(model(ids)[:, -1, :], dim=-1, keepdim=True)


def gpt_from_scratch(config: Config) -> int:
    """The book's training of GPT-2 with the first so many changes: reserved bytes after an epoch."""
    change = int(config["change"])
    model = gpt(change)
    if change >= 8:
        model = torch.compile(model)  # type: ignore[assignment]
    model.cuda()
    if change >= 5:
        model.to(torch.bfloat16)
    train_gpt(model, change)
    return torch.cuda.memory_reserved()


PROGRAMS: dict[str, Callable[[Config], int]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rope": rope,
    "cross_entropy": cross_entropy,
    "swiglu": partial(gated, "silu", 4),
    "geglu": partial(gated, "gelu_pytorch_tanh", 8),
    "attention": attention,
    "attention_by_parts": attention_by_parts,
    "gpt_from_scratch": gpt_from_scratch,
}
"""By name, a program: from a row's configuration to the bytes that it would print."""
