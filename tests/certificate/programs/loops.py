"""Training loops of other shapes: accumulation, closures, threads, workers, errors."""

from __future__ import annotations

import asyncio
import signal
import threading
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

from tests.certificate.programs.catalog import program, train
from tests.certificate.run import Run


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


@program("loops")
def gradient_accumulation(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with run.window(model, optimizer) as step:
        for number in range(4):
            loss = F.cross_entropy(model(torch.randn(4, 8)), torch.arange(4)) / 2
            loss.backward()
            run.value(loss)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                step()


@program("loops")
def lbfgs_with_a_closure(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
    x = torch.randn(8, 8)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with run.window(model, optimizer) as step:
        for _ in range(2):
            run.value(optimizer.step(closure))
            step()


@program("loops")
def checkpointing(run: Run) -> None:
    blocks = nn.ModuleList([mlp(8)[:4] for _ in range(3)])
    optimizer = torch.optim.Adam(blocks.parameters())

    def loss():
        x = torch.randn(4, 8)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    train(run, blocks, optimizer, loss)


@program("loops")
def reentrant_checkpointing(run: Run) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8, requires_grad=True)
    train(
        run, model, optimizer, lambda: checkpoint_sequential(model, 2, x, use_reentrant=True).square().mean()
    )


@program("loops")
def optimizers_in_backward_hooks(run: Run) -> None:
    """Each parameter is stepped, and its gradient freed, as soon as backward has it."""
    model = mlp()
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def step_now(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with run.window(model, *optimizers.values()) as step:
        for _ in range(2):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            run.value(loss)
            step()


@program("loops")
def errors_that_the_loop_catches(run: Run) -> None:
    class Fails(nn.Module):
        def forward(self, x):
            if len(x) > 3:
                raise ValueError(f"{len(x)} rows are too many")
            return x

    model = nn.Sequential(nn.Linear(8, 8), Fails(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with run.window(model, optimizer) as step:
        for rows in (2, 4, 3):
            try:
                loss = model(torch.randn(rows, 8)).sum()
            except ValueError as error:
                run.value(str(error))
                continue
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()


@program("loops")
def error_that_ends_the_window(run: Run) -> None:
    model = mlp()
    try:
        with run.window(model) as step:
            run.value(model(torch.randn(2, 8)))
            step()
            model(torch.randn(2, 9))
    except RuntimeError as error:
        run.value(str(error))
    run.value(model(torch.randn(2, 8)))


@program("loops")
def data_loader_with_workers(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1)
    with run.window(model, optimizer) as step:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()


@program("loops")
def model_in_another_thread(run: Run) -> None:
    model = mlp()
    results: list[torch.Tensor] = []

    def infer() -> None:
        with torch.no_grad():
            results.append(model(torch.ones(2, 8)))

    with run.window(model) as step:
        for _ in range(2):
            thread = threading.Thread(target=infer)
            thread.start()
            thread.join()
            run.value(model(torch.ones(1, 8)))
            step()
    run.value(results)


@program("loops")
def autocast_to_bfloat16(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(torch.randn(4, 8)), torch.arange(4))

    train(run, model, optimizer, loss)


@program("loops")
def sparse_embeddings(run: Run) -> None:
    embedding = nn.EmbeddingBag(40, 8, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    train(run, embedding, optimizer, lambda: embedding(torch.randint(0, 40, (6, 3))).square().sum())


@program("loops")
def several_parameter_groups(run: Run) -> None:
    """A group joins the optimizer, and a layer thaws, within the window."""
    model = mlp()
    model[4].requires_grad_(False)
    optimizer = torch.optim.SGD(model[:2].parameters(), 0.1, momentum=0.9, nesterov=True)
    with run.window(model, optimizer) as step:
        for number in range(3):
            if number == 1:
                optimizer.add_param_group(
                    {"params": list(model[4].requires_grad_(True).parameters()), "lr": 0.01}
                )
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()


@program("loops")
def gradient_penalty(run: Run) -> None:
    """A second backward through the first."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def loss():
        x = torch.randn(4, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    train(run, model, optimizer, loss)


@program("loops")
def two_windows(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        with run.window(model, optimizer) as step:
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
        run.value(model(torch.ones(1, 8)))


@program("loops")
def model_that_ends_in_the_window(run: Run) -> None:
    """Nothing may keep the first model alive when the loop replaces it."""
    model = mlp()
    alive = weakref.ref(model[0].weight)
    with run.window(model, keep=False) as step:
        run.value(model(torch.ones(1, 8)))
        model = mlp(12)
        run.value([model(torch.ones(1, 8)), alive() is None])
        step()


@program("loops")
def checkpointing_within_checkpointing(run: Run) -> None:
    blocks = nn.ModuleList([mlp(8)[:4] for _ in range(4)])
    optimizer = torch.optim.Adam(blocks.parameters())

    def pair(x, first, second):
        return checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)

    def loss():
        x = torch.randn(4, 8, requires_grad=True)
        x = checkpoint(pair, x, *blocks[:2], use_reentrant=True)
        return checkpoint(pair, x, *blocks[2:], use_reentrant=False).square().mean()

    train(run, blocks, optimizer, loss)


@program("loops")
def timeout_in_a_forward(run: Run) -> None:
    """A signal handler of the program raises an error between two layers, and the loop goes on."""

    class Interrupted(nn.Module):
        is_late = False

        def forward(self, x):
            if self.is_late:
                signal.raise_signal(signal.SIGALRM)
            return x * 2

    def give_up(*_):
        raise TimeoutError("too late")

    layer = Interrupted()
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = signal.signal(signal.SIGALRM, give_up)
    with run.window(model, optimizer) as step:
        for number in range(3):
            layer.is_late = number == 1
            try:
                loss = model(torch.randn(4, 8)).square().mean()
            except TimeoutError as error:
                run.value(str(error))
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.value(loss)
            step()
    signal.signal(signal.SIGALRM, before)


@program("loops")
def models_that_train_in_other_threads(run: Run) -> None:
    models = {"first": mlp(), "second": mlp()}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name, model in models.items()}
    losses: list[torch.Tensor] = []

    def train_one(name):
        for _ in range(2):
            loss = models[name](torch.ones(4, 8)).square().mean()
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses.append(loss.detach())

    with run.window(models, *optimizers.values()) as step:
        for name in models:
            thread = threading.Thread(target=train_one, args=(name,))
            thread.start()
            thread.join()
        step()
    run.value(losses)


@program("loops")
def batches_from_a_coroutine(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    async def batches(queue):
        for _ in range(3):
            await queue.put(torch.randn(4, 8))
        await queue.put(None)

    async def train_on(queue, step):
        while (batch := await queue.get()) is not None:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()

    async def both(step):
        queue = asyncio.Queue[torch.Tensor | None](1)
        await asyncio.gather(batches(queue), train_on(queue, step))

    with run.window(model, optimizer) as step:
        asyncio.run(both(step))
