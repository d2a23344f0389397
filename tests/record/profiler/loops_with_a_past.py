"""Loops with much alive before a profiled window, and what a counter of the allocator says of them.

    LD_PRELOAD=oracle.so python -m tests.record.profiler.loops_with_a_past FOLDER

Print a line of JSON for each window: the loop, and the bytes at the window's start, peak and end, by the
counter and by the recording; and one for each loop that `MemoryTracer` recorded.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import gc
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, schedule
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from tb_memplugin import MemoryTracer, load, memory_trace_handler

distributed: Any = torch.distributed
dlpack: Any = torch.utils.dlpack
oracle: Any = ctypes.CDLL(None)
"""The preloaded counter."""

Loop = tuple[nn.Module, torch.optim.Optimizer | None, Callable[[int], None]]


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


def train(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def data_set_in_tensors() -> Loop:
    rows, labels, model = torch.randn(2000, 64), torch.randint(10, (2000,)), mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> None:
        chosen = torch.randint(2000, (32,))
        train(optimizer, F.cross_entropy(model(rows[chosen]), labels[chosen]))

    return model, optimizer, step


def data_shared_with_numpy_and_from_a_file() -> Loop:
    """torch lets nobody resize these storages, though they are its own."""
    written = io.BytesIO()
    torch.save({"rows": torch.randn(2000, 64), "labels": torch.randint(10, (2000,))}, written)
    written.seek(0)
    data, drawn, model = torch.load(written), torch.randn(1500, 64).numpy(), mlp()
    del written
    optimizer = torch.optim.Adam(model.parameters())
    outputs: list[Any] = []

    def step(_: int) -> None:
        chosen = torch.randint(1500, (32,))
        output = model(data["rows"][chosen] + torch.from_numpy(drawn)[chosen])
        outputs.append(output.detach().numpy())
        train(optimizer, F.cross_entropy(output, data["labels"][chosen]))

    return model, optimizer, step


class ReplayBuffer:
    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory: collections.deque[Any] = collections.deque(maxlen=120)

    def push(self) -> None:
        self.memory.append((torch.randn(64), torch.tensor(random.randrange(10)), torch.tensor(0.5)))


def replay_buffer() -> Loop:
    buffer, model = ReplayBuffer(), mlp()
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters())
    for _ in range(100):
        buffer.push()

    def step(_: int) -> None:
        buffer.push()
        state, action, reward = map(torch.stack, zip(*random.sample(list(buffer.memory), 16), strict=True))
        with torch.no_grad():
            goal = reward + 0.9 * target(state).max(1).values
        train(optimizer, F.mse_loss(model(state).gather(1, action[:, None])[:, 0], goal))

    return model, optimizer, step


def averaged_weights_and_validation() -> Loop:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    averaged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(6)]

    def step(_: int) -> None:
        train(optimizer, model(torch.randn(8, 64)).square().mean())
        for name, tensor in model.state_dict().items():
            averaged[name].mul_(0.9).add_(tensor, alpha=0.1)
        with torch.no_grad():
            for rows, labels in batches:
                F.cross_entropy(model(rows), labels)

    return model, optimizer, step


def last_logits_stay() -> Loop:
    model, kept = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 500)).eval(), {}

    def step(_: int) -> None:
        with torch.no_grad():
            kept["logits"] = model(torch.randint(500, (4, 16)))
            kept["top"] = kept["logits"].argmax(-1)

    return model, None, step


def last_loss_and_output_stay() -> Loop:
    model, kept = mlp(), {}
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_: int) -> None:
        kept["rows"] = torch.randn(32, 64)
        kept["output"] = model(kept["rows"])
        kept["loss"] = kept["output"].square().mean()
        train(optimizer, kept["loss"])

    return model, optimizer, step


def graph_of_the_step_before() -> Loop:
    model, losses = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number: int) -> None:
        losses.append(model(torch.randn(32, 64)).exp().mean())
        if number % 2:
            train(optimizer, torch.stack(losses).sum())
            losses.clear()

    return model, optimizer, step


class Marked(torch.Tensor):
    """A tensor's subclass, as libraries make them."""


def state_of_a_recurrent_model() -> Loop:
    model = nn.LSTM(32, 64, 2)
    optimizer, history = torch.optim.AdamW(model.parameters()), []
    batches = [torch.randn(10, 4, 32).as_subclass(Marked) for _ in range(3)]
    state: Any = None

    def step(number: int) -> None:
        nonlocal state
        output, state = model(batches[number % 3].as_subclass(torch.Tensor), state)
        state = tuple(one.detach() for one in state)
        loss = output.square().mean()
        train(optimizer, loss)
        history.append(loss.detach())

    return model, optimizer, step


def frozen_model_that_was_not_given() -> Loop:
    """Its weights are constants of its code, which no Python object holds."""
    teacher, model = torch.jit.freeze(torch.jit.script(nn.Linear(64, 64).eval())), mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> None:
        with torch.no_grad():
            batch = teacher(torch.randn(16, 64))
        train(optimizer, model(batch).square().mean())

    return model, optimizer, step


def data_parallel() -> Loop:
    if not distributed.is_initialized():
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(_: int) -> None:
        train(optimizer, model(torch.randn(8, 64)).square().mean())

    for number in range(3):
        step(number)
    return model, optimizer, step


def nested_checkpoints() -> Loop:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow, self.head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 10)

        def block(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.wide(x).relu()).tanh()

        def blocks(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, checkpoint(self.block, x, use_reentrant=False), use_reentrant=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(checkpoint(self.blocks, x, use_reentrant=False))

    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, lambda _: train(optimizer, model(torch.randn(32, 64)).square().mean())


def sparse_gradients_and_matrices() -> Loop:
    embed, head = nn.Embedding(300, 32, sparse=True), nn.Linear(32, 10)
    model, kept = nn.ModuleList([embed, head]), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    coordinates = torch.eye(64).to_sparse()
    rows = coordinates.to_sparse_csr()

    def step(_: int) -> None:
        mixed = rows @ (coordinates @ embed(torch.randint(300, (64,))))
        train(optimizer, head(mixed).square().mean())
        assert embed.weight.grad is not None
        kept["gradient"] = embed.weight.grad.coalesce()

    return model, optimizer, step


class Wrapping(torch.Tensor):
    """Has another tensor, on which all operators run."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Any:
        made: Any = torch.Tensor
        wrapper = made._make_wrapper_subclass(
            cls,
            wrapped.shape,
            dtype=wrapped.dtype,
            device=wrapped.device,
            requires_grad=wrapped.requires_grad,
        )
        wrapper.wrapped = wrapped
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map_only(Wrapping, lambda one: one.wrapped, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapping, func(*plain[0], **plain[1]))


def tensors_that_wrap_others() -> Loop:
    model, kept = mlp(), {}
    for layer in (model[0], model[2]):
        for name, parameter in [*layer.named_parameters()]:
            setattr(layer, name, nn.Parameter(Wrapping(parameter.detach())))
    batches = [Wrapping(torch.randn(32, 64)) for _ in range(3)]

    def step(number: int) -> None:
        kept["output"] = model(batches[number % 3])
        model.zero_grad()
        kept["output"].square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad * 0.1)  # type: ignore[operator]

    return model, None, step


def memory_that_others_hold() -> Loop:
    """In a capsule of DLPack, and in an array of NumPy."""
    model, kept = mlp(), {}
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> None:
        kept["capsule"] = dlpack.to_dlpack(torch.randn(32, 64))
        kept["array"] = np.from_dlpack(torch.randn(64, 64))
        train(optimizer, model(dlpack.from_dlpack(torch.randn(32, 64))).square().mean())

    return model, optimizer, step


def storages_that_are_exchanged() -> Loop:
    model, own = mlp(), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    others = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def step(number: int) -> None:
        own.set_(torch.randn(32 + number, 64))  # type: ignore[call-overload]
        train(optimizer, model(own).square().mean())
        before = {name: parameter.data for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.data = others[name].clone()
        with torch.no_grad():
            model(own)
        for name, parameter in model.named_parameters():
            parameter.data = before[name]

    return model, optimizer, step


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError


def errors_that_are_kept() -> Loop:
    """Their tracebacks hold what was computed."""
    model, errors = mlp(), {}
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> None:
        try:
            train(optimizer, Refuses.apply(model(torch.randn(48, 64))).mean())
        except ValueError as error:
            errors["last"] = error
        train(optimizer, model(torch.randn(32, 64)).square().mean())

    return model, optimizer, step


def a_generator_trains() -> Loop:
    model, losses = mlp(), []
    optimizer = torch.optim.Adam(model.parameters())

    def training() -> Iterator[torch.Tensor]:
        while True:
            batch = torch.randn(32, 64)
            loss = model(batch).square().mean()
            train(optimizer, loss)
            yield loss

    running = training()
    return model, optimizer, lambda _: losses.append(next(running))


def checkpoints_on_disk() -> Loop:
    """Written and read in each step; the data is a file that is mapped into memory."""
    folder, model = tempfile.TemporaryDirectory(), mlp()
    optimizer, kept = torch.optim.Adam(model.parameters()), {}
    torch.save(torch.randn(500, 64), f"{folder.name}/data.pt")
    data = torch.load(f"{folder.name}/data.pt", mmap=True)

    def step(number: int) -> None:
        train(optimizer, model(data[number : number + 32]).square().mean())
        torch.save([model.state_dict(), optimizer.state_dict()], f"{folder.name}/state.pt")
        kept["model"], state = torch.load(f"{folder.name}/state.pt")
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(state)

    return model, optimizer, step


def gradients_of_gradients() -> Loop:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> None:
        rows = torch.randn(32, 64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        (bend,) = torch.autograd.grad(slope.square().sum(), rows, create_graph=True)
        train(optimizer, bend.square().mean())

    return model, optimizer, step


def hooks_that_keep_tensors() -> Loop:
    model = mlp()
    optimizer, kept = torch.optim.Adam(model.parameters()), collections.deque[Any](maxlen=5)
    model[0].register_forward_hook(lambda *call: kept.append(call[2]))
    model[0].weight.register_hook(lambda gradient: kept.append(gradient.clone()))  # type: ignore[operator]
    model[2].register_full_backward_hook(lambda *call: kept.append(call[2][0]))
    return model, optimizer, lambda _: train(optimizer, model(torch.randn(32, 64)).square().mean())


def optimizer_and_layers_are_replaced() -> Loop:
    model = mlp()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]

    def step(number: int) -> None:
        if number % 2:
            model[2] = nn.Linear(64, 10)
            optimizers[0] = torch.optim.Adam(model.parameters())
        train(optimizers[0], model(torch.randn(32, 64)).square().mean())

    return model, None, step


LOOPS = (
    data_set_in_tensors,
    data_shared_with_numpy_and_from_a_file,
    replay_buffer,
    averaged_weights_and_validation,
    last_logits_stay,
    last_loss_and_output_stay,
    graph_of_the_step_before,
    state_of_a_recurrent_model,
    frozen_model_that_was_not_given,
    nested_checkpoints,
    sparse_gradients_and_matrices,
    tensors_that_wrap_others,
    memory_that_others_hold,
    storages_that_are_exchanged,
    errors_that_are_kept,
    a_generator_trains,
    checkpoints_on_disk,
    gradients_of_gradients,
    hooks_that_keep_tensors,
    optimizer_and_layers_are_replaced,
    data_parallel,
)


def figures_of(folder: Path, loop: Callable[[], Loop], *, traced: bool = True) -> Iterator[dict[str, Any]]:
    """Record two windows of one step each, then trace one more step."""
    torch.manual_seed(0)
    random.seed(0)
    model, optimizer, step = loop()
    counted: list[list[int]] = []
    profiles: Any = profile
    start, stop = profiles.start_trace, profiles.stop_trace

    def started(prof: profile) -> None:
        gc.collect()  # else garbage may be freed after the profile begins and before the counter does
        start(prof)
        oracle.oracle_reset()
        counted.append([oracle.oracle_live()])

    def stopped(prof: profile) -> None:
        counted[-1] += [oracle.oracle_peak(), oracle.oracle_live()]
        stop(prof)

    handler = memory_trace_handler(folder, "worker", model=model, optimizer=optimizer)
    profiles.start_trace, profiles.stop_trace = started, stopped
    try:
        plan = schedule(wait=1, warmup=1, active=1, repeat=2)
        with profile(profile_memory=True, schedule=plan, on_trace_ready=handler) as prof:
            for number in range(6):
                step(number)
                prof.step()
    finally:
        profiles.start_trace, profiles.stop_trace = start, stop
    for path, true in zip(sorted(folder.rglob("window-*.mem")), counted, strict=True):
        trace = load(path)
        level = trace.live(0)
        yield {
            "loop": loop.__name__,
            "true": true,
            "recorded": [int(level[0]), int(level.max()), int(level[-1])],
            "notes": trace.notes,
        }
    if not traced:
        return
    tracer = MemoryTracer()
    gc.collect()
    oracle.oracle_reset()
    before = oracle.oracle_live()
    with tracer.trace(model):
        step(6)
    level = tracer.trace_result().live(0)
    recorded = [int(level[0]), int(level.max()), int(level[-1])]
    true = [before, oracle.oracle_peak(), oracle.oracle_live()]
    yield {"loop": f"{loop.__name__}, traced", "true": true, "recorded": recorded, "notes": []}


def main() -> None:
    """Run every loop in this process: what one leaves alive is there before the next."""
    torch.set_num_threads(1)
    oracle.oracle_live.restype = oracle.oracle_peak.restype = ctypes.c_int64
    for loop in LOOPS:
        for figures in figures_of(Path(sys.argv[1]) / loop.__name__, loop):
            sys.stdout.write(json.dumps(figures) + os.linesep)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
