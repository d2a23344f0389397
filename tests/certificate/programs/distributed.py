"""Two processes on gloo, each of which is compared."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from tests.certificate.programs.catalog import program
from tests.certificate.programs.loops import mlp
from tests.certificate.run import Run


def import_libraries() -> None:
    for module in ("torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.device_mesh"):
        import_module(module)


def _train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(run.rank)
    with run.window(model, optimizer) as step:
        for _ in range(2):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
    torch.distributed.barrier()


@program("distributed", world=2)
def distributed_data_parallel(run: Run) -> None:
    run.join()
    model = nn.parallel.DistributedDataParallel(mlp())
    _train(run, model, torch.optim.AdamW(model.parameters()))
    torch.distributed.destroy_process_group()


@program("distributed", world=2)
def fully_sharded(run: Run) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run.join()
    model = mlp()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    _train(run, model, torch.optim.AdamW(model.parameters()))
    torch.distributed.destroy_process_group()


@program("distributed", world=2)
def zero_redundancy_optimizer(run: Run) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    run.join()
    model = nn.parallel.DistributedDataParallel(mlp())
    _train(run, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))
    torch.distributed.destroy_process_group()
