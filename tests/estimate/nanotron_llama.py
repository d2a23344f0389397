"""Nanotron's Llama as one rank of its benchmark runs it, with the memory that each operation keeps.

The configuration is from huggingface/bench_cluster (create_configs.py, base_config.py), the operations from
huggingface/nanotron (models/llama.py, parallel/tensor_parallel, optim/gradient_accumulator.py): tensor
parallelism that gathers sequences before a product and scatters sums after it, flash attention, gradients
summed in float32, a fused AdamW on float32 copies of the weights. Shapes are [sequence, batch, width], as in
nanotron.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tb_memplugin import MemoryEstimator

HIDDEN, INNER, HEADS, LAYERS, LENGTH, VOCABULARY = 2048, 4096, 32, 24, 4096, 50_257
"""llama-1B of create_configs.py, with the tokenizer of GPT-2."""

ROWS = 132
"""Partial sums of a norm's gradient, one for each multiprocessor of an H100 (flash_attn, layer_norm.py)."""


@dataclass(frozen=True)
class Row:
    """A row of the table, with the allocated and reserved peaks of its run in MiB."""

    dp: int
    tp: int
    pp: int
    batch: int
    allocated: float
    reserved: int

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary, padded so that ranks get equal parts."""
        return -(-VOCABULARY // self.tp) * self.tp

    @property
    def layers(self) -> int:
        """The number of blocks in the first stage, whose last one exceeds the stage's share of the cost."""
        block = 4 * HIDDEN * HIDDEN + 3 * INNER * HIDDEN
        share = (LAYERS * block + self.vocabulary * HIDDEN) / self.pp
        costs = enumerate(accumulate([block] * LAYERS), 1)
        return next((count for count, cost in costs if cost > share), LAYERS)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        return gathered(part)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return scattered(grads[0])


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> torch.Tensor:
        return scattered(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return gathered(grads[0])


def gathered(part: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    if world == 1:
        return part
    whole = part.new_empty(part.shape[0] * world, *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous())
    return whole


def scattered(whole: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    if world == 1:
        return whole
    part = whole.new_empty(whole.shape[0] // world, *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole.contiguous())
    return part


class _Normed(torch.autograd.Function):
    """flash_attn's RMSNorm, which keeps its input and a float32 number for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        sums = x.new_empty(ROWS, x.shape[-1], dtype=torch.float32)
        return torch.empty_like(x), sums.sum(0).to(weight.dtype)


class _CrossEntropy(torch.autograd.Function):
    """The loss of logits with a sharded vocabulary: the softmax is kept and becomes the gradient in place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        highest = logits.max(dim=-1)[0]
        dist.all_reduce(highest)
        softmax = logits - highest.unsqueeze(-1)
        elsewhere = target < 0
        index = target.clone().view(-1)
        found = softmax.view(-1, softmax.shape[-1])[torch.arange(len(index)), index].clone().view_as(target)
        dist.all_reduce(found)
        softmax.exp_()
        total = softmax.sum(-1)
        dist.all_reduce(total)
        loss = total.log() - found
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, elsewhere, index)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        softmax, *_ = ctx.saved_tensors
        return softmax.mul_(grads[0].unsqueeze(-1)), None


class _Sent(torch.autograd.Function):
    """Sends a result to the next stage: it is not kept here, and its gradient comes from that stage."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        ctx.shape = result.shape
        return result.new_empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty(ctx.shape, dtype=grads[0].dtype, device="cuda")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Normed.apply(x, self.weight)


class Attention(nn.Module):
    def __init__(self, row: Row) -> None:
        super().__init__()
        self.heads, self.size = HEADS // row.tp, HIDDEN // HEADS
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // row.tp, bias=False)
        self.out = nn.Linear(HIDDEN // row.tp, HIDDEN, bias=False)
        self.register_buffer("cos", torch.empty(LENGTH, self.size // 2))  # rotated in place: no copies
        self.register_buffer("sin", torch.empty(LENGTH, self.size // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.qkv(_Gather.apply(x))
        length, batch, _ = made.shape
        made = made.view(length, batch, 3, self.heads, self.size).permute(2, 1, 0, 3, 4).contiguous()
        query, key, value = made
        pair = torch.cat([key.unsqueeze(0), value.unsqueeze(0)]).permute(1, 2, 0, 3, 4).contiguous()
        key, value = (one.squeeze(2) for one in pair.split(1, dim=2))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            seen = F.scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
            )
        seen = seen.transpose(1, 2).reshape(batch, length, self.heads * self.size).transpose(0, 1)
        return _Scatter.apply(self.out(seen))


class Block(nn.Module):
    def __init__(self, row: Row) -> None:
        super().__init__()
        self.before_attention, self.attention, self.before_mlp = Norm(), Attention(row), Norm()
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER // row.tp, bias=False)
        self.down = nn.Linear(INNER // row.tp, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.before_attention(x)) + x
        gate, up = self.gate_up(_Gather.apply(self.before_mlp(x))).chunk(2, -1)
        return _Scatter.apply(self.down(F.silu(gate) * up)) + x


class FirstStage(nn.Module):
    """Embedding and blocks; if there is only one stage, also the head and the loss."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.embedding = nn.Embedding(row.vocabulary // row.tp, HIDDEN)
        self.blocks = nn.ModuleList(Block(row) for _ in range(row.layers))
        self.last = Norm() if row.pp == 1 else None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outside = ids.t() < 0
        x = self.embedding(ids.t().clone())
        if dist.get_world_size() > 1:
            x = x * ~outside.unsqueeze(-1)
        x = _Scatter.apply(x)
        for block in self.blocks:
            x = block(x)
        if self.last is None:
            return _Sent.apply(x)
        logits = F.linear(_Gather.apply(self.last(x)), self.embedding.weight).float()
        return _CrossEntropy.apply(logits, labels.t().contiguous()).mean()


def train(row: Row, estimator: MemoryEstimator, steps: int = 2) -> None:
    """Run steps of the first stage, where 1F1B holds as many micro-batches as there are stages."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = FirstStage(row).cuda()
        trained = list(model.parameters())
        total = sum(one.numel() for one in trained)
        sums = torch.zeros(total, dtype=torch.float32, device="cuda")
        copies = nn.Parameter(torch.empty(total // row.dp, dtype=torch.float32, device="cuda"))
        optimizer = torch.optim.AdamW([copies], fused=True)
        estimator.watch(model, optimizer)
        for _ in range(steps):
            flying: list[torch.Tensor] = []
            for _ in range(row.pp + 1 if row.pp > 1 else 1):
                tokens = torch.zeros(row.batch, LENGTH, dtype=torch.long, device="cuda")
                flying.append(model(tokens, tokens.clone()))
                if len(flying) == row.pp:
                    _backward(flying.pop(0), trained)
            while flying:
                _backward(flying.pop(0), trained)
            copies.grad = sums[: len(copies)]
            optimizer.step()
            copies.grad = None
            sums.zero_()
            estimator.step()
    finally:
        torch.set_default_dtype(torch.float32)


def _backward(result: torch.Tensor, trained: list[nn.Parameter]) -> None:
    """Compute 2-byte gradients, which are added to 4-byte sums and freed."""
    result.backward()
    for parameter in trained:
        parameter.grad = None
