"""Small trainings with one planted fault each, and the same without it: the peaks differ by its bytes.

A program builds its tensors on a device and returns the step that is recorded; `broken` plants the fault.
On CUDA, `python -m tests.planted_faults FOLDER` writes a snapshot of every program and variant, and
`truth.json`: the highest requested bytes by the allocator's own counter.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]
HEADS, LENGTH, WIDTH = 4, 256, 64
PARTS = 64


class Attention(nn.Module):
    """Self-attention, written out or by the fused kernel."""

    def __init__(self, stores_scores: bool) -> None:
        super().__init__()
        self.stores_scores = stores_scores
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if not self.stores_scores:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Attention and a perceptron, both with residuals."""

    def __init__(self, stores_scores: bool = False, wide: int = 4) -> None:
        super().__init__()
        self.attention = Attention(stores_scores)
        self.up, self.down = nn.Linear(WIDTH, wide * WIDTH), nn.Linear(wide * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden)


class Stack(nn.Module):
    """Layers one after the other, recomputed in backward or not."""

    def __init__(self, *layers: nn.Module, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


@dataclass(frozen=True)
class Program:
    """A step to record. `warm_up` steps run before, `steps` steps are recorded."""

    step: Step
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    warm_up: int = 1
    steps: int = 1


def training(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Program:
    """The usual step, with plain SGD by default."""
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        model(x).square().mean().backward()
        chosen.step()
        chosen.zero_grad()

    return Program(step, model, chosen)


def size(device: str, on_cuda: int, on_cpu: int) -> int:
    """On the CPU, where kernels run, programs are small; on CUDA, cuBLAS keeps 64 MiB beside them."""
    return on_cuda if device == "cuda" else on_cpu


def batch(device: str, count: int) -> Tensor:
    return torch.rand(count, LENGTH, WIDTH, device=device)


def attention_scores(device: str, broken: bool) -> Program:
    model = Stack(*(Layer(broken) for _ in range(size(device, 8, 4)))).to(device)
    return training(model, batch(device, size(device, 17, 2)))


class LossInParts(torch.autograd.Function):
    """Cross-entropy in float32 of bfloat16 logits, of some tokens at a time; its gradient replaces them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for piece, target in zip(logits.chunk(PARTS), targets.chunk(PARTS), strict=True):
            wide = piece.float()
            losses.append(F.cross_entropy(wide, target))
            piece.copy_(F.softmax(wide, -1))
        ctx.gradient = logits.detach()
        return torch.stack(losses).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Head(nn.Module):
    """A last layer in bfloat16 and its loss in float32, over all tokens at once or over parts of them."""

    def __init__(self, words: int, in_parts: bool) -> None:
        super().__init__()
        self.in_parts = in_parts
        self.output = nn.Linear(WIDTH, words, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(x)
        if self.in_parts:
            return LossInParts.apply(logits, targets)
        return F.cross_entropy(logits.float(), targets)


def loss_logits(device: str, broken: bool) -> Program:
    words, tokens = size(device, 5000, 500), size(device, 2048, 512)
    model = Head(words, in_parts=not broken).to(device)
    x = torch.rand(tokens, WIDTH, device=device, dtype=torch.bfloat16)
    targets = torch.zeros(tokens, dtype=torch.long, device=device)

    def step() -> None:
        model(x, targets).backward()
        model.zero_grad()

    return Program(step, model)


def perceptron(device: str, dtype: torch.dtype = torch.float32, depth: int = 8) -> nn.Module:
    wide = size(device, 1024, 128)
    sizes = [WIDTH, *(wide + 8 * number for number in range(depth)), WIDTH]
    pairs = pairwise(sizes)
    return nn.Sequential(*(nn.Linear(a, b, dtype=dtype) for a, b in pairs)).to(device)


def ema_weights(device: str, broken: bool) -> Program:
    model = perceptron(device)
    program = training(model, torch.rand(16, WIDTH, device=device))
    if not broken:
        return program
    averaged = copy.deepcopy(model)

    def step() -> None:
        program.step()
        for mean, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(parameter.data, 0.1)

    return Program(step, model, program.optimizer, warm_up=0)


def master_weights(device: str, broken: bool) -> Program:
    model = perceptron(device, torch.bfloat16)
    program = training(model, torch.rand(16, WIDTH, device=device, dtype=torch.bfloat16))
    if not broken:
        return program
    masters = [parameter.detach().float() for parameter in model.parameters()]

    def step() -> None:
        program.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)

    return Program(step, model, program.optimizer, warm_up=0)


def kept_gradients(device: str, broken: bool) -> Program:
    model = nn.Sequential(perceptron(device), nn.Linear(WIDTH, size(device, 2048, 512), device=device))
    program = training(model, torch.rand(1024, WIDTH, device=device))
    assert program.optimizer is not None
    optimizer = program.optimizer

    def step() -> None:
        loss = model(torch.rand(1024, WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not broken)

    return Program(step, model, optimizer, steps=3)


class WideMomentum(torch.optim.Optimizer):
    """Momentum in float32, or in the dtype of the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
        super().__init__(parameters, {})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter not in self.state:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=self.dtype)
            self.state[parameter]["momentum"].mul_(1)


def optimizer_state(device: str, broken: bool) -> Program:
    """Broken: 4 bytes per element of state beside 2 of parameters. Fixed: 1 byte."""
    model = perceptron(device, torch.bfloat16, depth=24)
    optimizer = WideMomentum(model.parameters(), torch.float32 if broken else torch.uint8)
    return training(model, torch.rand(16, WIDTH, device=device, dtype=torch.bfloat16), optimizer)


def unused_graph(device: str, broken: bool) -> Program:
    model = Stack(*(Layer() for _ in range(24))).to(device)
    x = batch(device, size(device, 8, 1))

    def step() -> None:
        with torch.set_grad_enabled(broken):
            model(x)

    return Program(step, model)


def checkpointing(device: str, broken: bool) -> Program:
    model = Stack(*(Layer(wide=8) for _ in range(12)), recompute=not broken).to(device)
    return training(model, batch(device, size(device, 8, 1)))


def growth(device: str, broken: bool) -> Program:
    program = training(perceptron(device), torch.rand(16, WIDTH, device=device))
    kept: list[Tensor] = []

    def step() -> None:
        program.step()
        if broken:
            kept.append(torch.ones(1 << 16, device=device))

    return Program(step, program.model, program.optimizer, steps=5)


def previous_result(device: str, broken: bool) -> Program:
    model = Stack(*(Layer() for _ in range(2)), nn.Linear(WIDTH, 4 * WIDTH)).to(device)
    x = batch(device, size(device, 128, 4))
    kept: list[Tensor] = []

    @torch.no_grad()
    def step() -> None:
        output = model(x)
        kept[:] = [output] if broken else []

    return Program(step, model, steps=2)


def old_copies(device: str, broken: bool) -> Program:
    """Caches that grow by `cat`, all new ones beside all old ones, or that are written in parts."""
    rows, heads, steps = size(device, 2000, 200), 8, 8
    full = [torch.zeros(heads, rows + steps, WIDTH, device=device) for _ in range(0 if broken else 8)]

    def step() -> None:
        caches = [torch.zeros(heads, rows, WIDTH, device=device) for _ in range(8 if broken else 0)]
        for at in range(steps):
            if broken:
                caches = [
                    torch.cat([cache, torch.zeros(heads, 1, WIDTH, device=device)], 1) for cache in caches
                ]
            for cache in full:
                cache[:, rows + at] = torch.zeros(heads, WIDTH, device=device)

    return Program(step)


class Ranker(nn.Module):
    """A large table of which few rows are looked up."""

    def __init__(self, rows: int, dense: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, sparse=not dense)
        self.output = nn.Linear(WIDTH, 1)

    def forward(self, items: Tensor) -> Tensor:
        return self.output(self.table(items))


def dense_embedding_gradient(device: str, broken: bool) -> Program:
    model = Ranker(size(device, 500_000, 20_000), broken).to(device)
    return training(model, torch.zeros(64, dtype=torch.long, device=device))


class Gate(nn.Module):
    """A gate, in float64 or not."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.wide:
            y = y.double()
        return (y * torch.sigmoid(y)).to(torch.float32)


def wide_tensors(device: str, broken: bool) -> Program:
    model = Stack(*(Gate(broken) for _ in range(6))).to(device)
    return training(model, batch(device, size(device, 512, 8)))


def frozen(device: str, broken: bool) -> Program:
    """The optimizer changes only the last layer; the others are not frozen."""
    body = perceptron(device, depth=12).requires_grad_(broken)
    model = nn.Sequential(body, nn.Linear(WIDTH, 10, device=device))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, foreach=False)
    return replace(training(model, torch.rand(16, WIDTH, device=device), optimizer), steps=3)


def undetached(device: str, broken: bool) -> Program:
    """A discriminator's step whose backward runs through the generator, too."""
    generator = nn.Sequential(perceptron(device, depth=16))
    critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, foreach=False)
    noise = torch.rand(size(device, 8192, 512), WIDTH, device=device)

    def step() -> None:
        with torch.set_grad_enabled(broken):
            made = generator(noise)
        critic(made).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, nn.ModuleList([generator, critic]), optimizer, steps=3)


class Masked(nn.Module):
    """Scores with a mask that is broadcast, or stored for all heads."""

    def __init__(self, expanded: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.expanded = expanded

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.expanded:
            mask = mask.expand(len(x), HEADS, -1, -1).clone()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def repeated_values(device: str, broken: bool) -> Program:
    layers = nn.ModuleList(Masked(broken) for _ in range(4)).to(device)
    x, mask = batch(device, size(device, 40, 8)), torch.zeros(1, 1, LENGTH, LENGTH, device=device)

    def step() -> None:
        y = x
        for layer in layers:
            y = y + layer(y, mask)
        y.square().mean().backward()
        layers.zero_grad()

    return Program(step, layers)


def one_hot_vectors(device: str, broken: bool) -> Program:
    words, tokens = size(device, 8000, 2000), size(device, 4096, 512)
    table = nn.Parameter(torch.rand(words, WIDTH, device=device))
    items = torch.zeros(tokens, dtype=torch.long, device=device)

    def step() -> None:
        rows = F.one_hot(items, words).float() @ table if broken else F.embedding(items, table)
        rows.square().mean().backward()
        table.grad = None

    return Program(step)


def summed_losses(device: str, broken: bool) -> Program:
    """Four microbatches, with a backward over the sum of their losses or with one for each."""
    model = Stack(*(Layer() for _ in range(size(device, 4, 2)))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    parts = [batch(device, size(device, 16, 2)) for _ in range(4)]

    def step() -> None:
        losses: list[Tensor] = []
        for part in parts:
            losses.append(model(part).square().mean())
            if not broken:
                losses.pop().backward()
        if broken:
            torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, model, optimizer)


def teacher_graph(device: str, broken: bool) -> Program:
    """A student learns what a teacher returns, detached; but the teacher records a graph."""
    teacher = Stack(*(Layer() for _ in range(12))).to(device)
    student = Stack(*(Layer() for _ in range(4))).to(device)
    x = batch(device, size(device, 32, 1))

    def step() -> None:
        with torch.set_grad_enabled(broken):
            aim = teacher(x)
        F.mse_loss(student(x), aim.detach()).backward()
        student.zero_grad()

    return Program(step, nn.ModuleList([teacher, student]))


def retained_graph(device: str, broken: bool) -> Program:
    """The last loss is kept, with a graph that backward retained or without."""
    model = Stack(*(Layer() for _ in range(8))).to(device)
    x = batch(device, size(device, 32, 1))
    last: list[Tensor] = []

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward(retain_graph=broken)
        last[:] = [loss]
        model.zero_grad()

    return Program(step, model, steps=3)


def float64_model(device: str, broken: bool) -> Program:
    dtype = torch.float64 if broken else torch.float32
    return training(perceptron(device, dtype, depth=24), torch.rand(4096, WIDTH, device=device, dtype=dtype))


def replaced_optimizer(device: str, broken: bool) -> Program:
    """From the second step on, a new Adam updates the parameters, and the old one stays alive."""
    model = perceptron(device, depth=24)
    optimizers = [torch.optim.Adam(model.parameters(), foreach=False) for _ in range(1 + broken)]
    number = 0

    def step() -> None:
        nonlocal number
        model(torch.rand(8192, WIDTH, device=device)).square().mean().backward()
        optimizers[min(number, len(optimizers) - 1)].step()
        model.zero_grad()
        number += 1

    return Program(step, model, optimizers[-1], steps=2)


class Whole(nn.Module):
    """Layers in one checkpoint."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return y


def one_checkpoint(device: str, broken: bool) -> Program:
    """All layers in one checkpoint, or each in one."""
    layers = Stack(*(Layer(wide=8) for _ in range(12)), recompute=not broken)
    return training((Whole(layers) if broken else layers).to(device), batch(device, size(device, 32, 1)))


def kept_caches(device: str, broken: bool) -> Program:
    """Each request gets caches for its keys; broken: they are kept with the request."""
    model = Stack(*(Layer() for _ in range(2))).to(device)
    requests: list[list[Tensor]] = []

    @torch.no_grad()
    def step() -> None:
        caches = [torch.zeros(size(device, 64, 4), LENGTH, WIDTH, device=device) for _ in model.layers]
        for cache in caches:
            cache[:1] = model(batch(device, 1))
        requests[:] = [*requests, caches] if broken else []

    return Program(step, model, steps=6)


def hidden_states(device: str, broken: bool) -> Program:
    """A forward returns what each layer computed, or what the last did."""

    class Returning(Stack):
        def forward(self, x: Tensor) -> Any:
            states = [x]
            for layer in self.layers:
                x = layer(x)
                states = [*states, x] if broken else [x]
            return states

    model = Returning(*(Layer() for _ in range(16))).to(device)
    x = batch(device, size(device, 64, 4))

    @torch.no_grad()
    def step() -> None:
        _ = model(x)

    return Program(step, model)


class Dropped(nn.Module):
    """A layer and a mask, of numbers or of bool."""

    def __init__(self, of_numbers: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.of_numbers = of_numbers

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        mask = torch.rand_like(y) > 0.1
        return y * (mask.float() if self.of_numbers else mask)


def mask_of_numbers(device: str, broken: bool) -> Program:
    model = Stack(*(Dropped(broken) for _ in range(6))).to(device)
    return training(model, batch(device, size(device, 256, 8)))


class Adapted(nn.Module):
    """A frozen weight with LoRA's product, which is added to it or to the result."""

    def __init__(self, width: int, merged: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.rand(4, width)), nn.Parameter(torch.rand(width, 4))
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.weight + self.b @ self.a)
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b)


def merged_weights(device: str, broken: bool) -> Program:
    width = size(device, 1024, 128)
    model = Stack(*(Adapted(width, broken) for _ in range(16))).to(device)
    return training(model, torch.rand(16, width, device=device))


def reordered_caches(device: str, broken: bool) -> Program:
    """A beam search puts all caches into another order, or each in turn."""
    model = Stack(*(Layer() for _ in range(2))).to(device)
    beams = size(device, 16, 4)
    order = torch.zeros(beams, dtype=torch.long, device=device)

    @torch.no_grad()
    def step() -> None:
        caches = [torch.zeros(beams, LENGTH, WIDTH, device=device) for _ in range(16)]
        for _ in range(5):
            _ = model(batch(device, 1))
            if broken:
                caches = [cache.index_select(0, order) for cache in caches]
            else:
                for at, cache in enumerate(caches):
                    caches[at] = cache.index_select(0, order)

    return Program(step, model)


def wide_perceptron(device: str) -> nn.Module:
    return perceptron(device, depth=24)


def earlier_folds(device: str, broken: bool) -> Program:
    """Cross validation; broken: each fold's model and optimizer stay until the next fold has trained."""
    folds: list[object] = []
    width = size(device, 2048, 128)

    def step() -> None:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3))).to(device)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(2):
            model(torch.rand(16, width, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        folds[:] = [model, optimizer] if broken else []

    return Program(step)


def reloaded_model(device: str, broken: bool) -> Program:
    """A server gets new weights; broken: while the old ones are there."""
    models = {"served": wide_perceptron(device)}

    @torch.inference_mode()
    def step() -> None:
        models["served"](torch.rand(16, WIDTH, device=device))
        if not broken:
            del models["served"]
        models["served"] = wide_perceptron(device)

    return Program(step)


def reference_model(device: str, broken: bool) -> Program:
    """An adapter is trained beside frozen weights; broken: their results are those of a second model."""
    base = wide_perceptron(device).requires_grad_(False)
    adapter = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
    reference = copy.deepcopy(base) if broken else base
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        x = torch.rand(16, WIDTH, device=device)
        (base(x) + adapter(x) - reference(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, nn.ModuleList([base, adapter]), optimizer)


def all_pairs(device: str, broken: bool) -> Program:
    """A loss over the distances of all rows of a batch, by their differences or not."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))).to(device)
    x = torch.rand(size(device, 1024, 256), WIDTH, device=device)

    def step() -> None:
        y = model(x)
        distance = (y[:, None] - y[None]).square().sum(-1) if broken else torch.cdist(y, y)
        distance.mean().backward()
        model.zero_grad()

    return Program(step, model)


def evaluation_graph(device: str, broken: bool) -> Program:
    """A training, and an evaluation of more data that needs no gradients, but records a graph."""
    program = training(Stack(*(Layer() for _ in range(6))).to(device), batch(device, 1))
    data = batch(device, size(device, 32, 8))

    def evaluate() -> Tensor:
        assert program.model is not None
        return program.model(data).argmax(-1)

    def step() -> None:
        program.step()
        with torch.set_grad_enabled(broken):
            evaluate()

    return Program(step, program.model, program.optimizer)


def similarities(device: str, broken: bool) -> Program:
    """A loss over the similarities of all pairs of two batches, by broadcasting or by a product."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
    count = size(device, 1024, 128)

    def step() -> None:
        a, b = (model(torch.rand(count, WIDTH, device=device)) for _ in range(2))
        if broken:
            F.cosine_similarity(a[:, None], b[None], dim=-1).mean().backward()
        else:
            (F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T).mean().backward()
        model.zero_grad()

    return Program(step, model)


class Quantised(nn.Module):
    """A weight in 8 bits, computed in 16 in each forward, and kept or not."""

    narrow: Tensor

    def __init__(self, width: int, keeps: bool) -> None:
        super().__init__()
        self.register_buffer("narrow", torch.zeros(width, width, dtype=torch.int8))
        self.keeps = keeps
        self.weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.narrow.to(x.dtype)
        self.weight = weight if self.keeps else None
        return F.linear(x, weight)


def dequantised_weights(device: str, broken: bool) -> Program:
    width = size(device, 2048, 128)
    model = Stack(*(Quantised(width, broken) for _ in range(16))).to(device)

    @torch.no_grad()
    def step() -> None:
        model(torch.zeros(8, width, device=device, dtype=torch.float16))

    return Program(step, model, warm_up=0, steps=2)


def growing_predictions(device: str, broken: bool) -> Program:
    """An evaluation appends what it predicts by `cat`, or writes it into a tensor of the final size."""
    classes, count, batches = size(device, 2048, 256), size(device, 2048, 256), 12
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, classes)).to(device)

    @torch.no_grad()
    def step() -> None:
        predictions = torch.empty(0 if broken else batches * count, classes, device=device)
        for at in range(0, batches * count, count):
            x = torch.rand(count, WIDTH, device=device)
            if broken:
                predictions = torch.cat([predictions, model(x)])
            else:
                predictions[at : at + count] = model(x)

    return Program(step, model)


def stored_outputs(device: str, broken: bool) -> Program:
    """Hooks store what each module returned until it runs again."""
    model = Stack(*(Layer() for _ in range(8))).to(device)
    outputs: dict[nn.Module, Tensor] = {}
    for module in model.modules() if broken else ():
        if isinstance(module, Layer | nn.Linear):
            module.register_forward_hook(lambda own, _, output: outputs.update({own: output.detach()}))
    x = batch(device, size(device, 32, 2))

    @torch.no_grad()
    def step() -> None:
        model(x)

    return Program(step, model, steps=3)


def reference_graph(device: str, broken: bool) -> Program:
    """A loss of preferences whose reference is not frozen, so its backward runs, too."""
    policy, reference = (Stack(*(Layer() for _ in range(6))).to(device) for _ in range(2))
    reference.requires_grad_(broken)
    optimizer = torch.optim.AdamW(policy.parameters(), foreach=False)

    def step() -> None:
        chosen, rejected = (batch(device, size(device, 16, 4)) for _ in range(2))
        own = [policy(x).square().mean((1, 2)) for x in (chosen, rejected)]
        others = [reference(x).square().mean((1, 2)) for x in (chosen, rejected)]
        F.softplus(own[1] - own[0] + others[0] - others[1]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, policy, optimizer, steps=2)


PROGRAMS: dict[str, Callable[[str, bool], Program]] = {
    "attention_scores": attention_scores,
    "loss_logits": loss_logits,
    "ema_weights": ema_weights,
    "master_weights": master_weights,
    "kept_gradients": kept_gradients,
    "optimizer_state": optimizer_state,
    "unused_graph": unused_graph,
    "checkpointing": checkpointing,
    "growth": growth,
    "previous_result": previous_result,
    "old_copies": old_copies,
    "dense_embedding_gradient": dense_embedding_gradient,
    "wide_tensors": wide_tensors,
    "frozen": frozen,
    "undetached": undetached,
    "repeated_values": repeated_values,
    "one_hot_vectors": one_hot_vectors,
    "summed_losses": summed_losses,
    "teacher_graph": teacher_graph,
    "retained_graph": retained_graph,
    "float64_model": float64_model,
    "replaced_optimizer": replaced_optimizer,
    "one_checkpoint": one_checkpoint,
    "kept_caches": kept_caches,
    "hidden_states": hidden_states,
    "mask_of_numbers": mask_of_numbers,
    "merged_weights": merged_weights,
    "reordered_caches": reordered_caches,
    "all_pairs": all_pairs,
    "earlier_folds": earlier_folds,
    "reloaded_model": reloaded_model,
    "reference_model": reference_model,
    "evaluation_graph": evaluation_graph,
    "similarities": similarities,
    "dequantised_weights": dequantised_weights,
    "growing_predictions": growing_predictions,
    "stored_outputs": stored_outputs,
    "reference_graph": reference_graph,
}


ALLOWED = 0.1
"""The most by which a finding's bytes may differ from the truth, as a share of it."""

KINDS = {
    "ema_weights": "parameter_copies",
    "master_weights": "parameter_copies",
    "frozen": "unused_gradients",
    "undetached": "unused_gradients",
    "teacher_graph": "unused_graph",
    "retained_graph": "unused_graph",
    "float64_model": "wide_tensors",
    "replaced_optimizer": "optimizer_state",
    "one_checkpoint": "checkpointing",
    "kept_caches": "previous_result",
    "hidden_states": "previous_result",
    "mask_of_numbers": "wide_tensors",
    "merged_weights": "parameter_copies",
    "reordered_caches": "old_copies",
    "all_pairs": "outsized_tensor",
    "earlier_folds": "parameter_copies",
    "reloaded_model": "parameter_copies",
    "reference_model": "parameter_copies",
    "evaluation_graph": "unused_graph",
    "similarities": "outsized_tensor",
    "dequantised_weights": "parameter_copies",
    "growing_predictions": "old_copies",
    "stored_outputs": "previous_result",
    "reference_graph": "unused_gradients",
}
"""The rule that finds a fault, where its name is another."""

NEEDS_OPERATORS = {
    "old_copies",
    "repeated_values",
    "one_hot_vectors",
    "dense_embedding_gradient",
    "undetached",
    "wide_tensors",
    "teacher_graph",
    "retained_graph",
    "float64_model",
    "one_checkpoint",
    "mask_of_numbers",
    "merged_weights",
    "reordered_caches",
    "all_pairs",
    "dequantised_weights",
}
"""Faults of which Python stacks alone show less, or nothing."""

PER_STEP = {"growth": 1 << 18}
"""Bytes of faults that grow: 65,536 float32 in every step."""


def run(program: Program, before_recorded: Step, after_step: Step = lambda: None, extra: int = 0) -> None:
    """Run all steps in one loop, as trainings do; call a function between warm-up and recorded steps."""
    for number in range(program.warm_up + extra + program.steps):
        if number == program.warm_up:
            before_recorded()
        program.step()
        after_step()


def record_snapshot(name: str, broken: bool, stacks: str, path: Path) -> int:
    """Write a snapshot of a program on CUDA; return the highest requested bytes of the recorded steps."""
    gc.collect()
    torch.cuda.memory.empty_cache()
    torch.cuda.memory._record_memory_history(stacks=stacks)
    run(PROGRAMS[name]("cuda", broken), torch.cuda.reset_peak_memory_stats)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(None)
    return int(peak)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    truth = {
        f"{name}.{'broken' if broken else 'fixed'}.{stacks}": record_snapshot(
            name, broken, stacks, folder / f"{name}.{'broken' if broken else 'fixed'}.{stacks}.pickle"
        )
        for name in PROGRAMS
        for stacks in ("python", "all")
        for broken in (True, False)
    }
    (folder / "truth.json").write_text(json.dumps(truth, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
