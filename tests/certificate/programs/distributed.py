"""Two processes on gloo, each of which is compared."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from tests.certificate.programs.catalog import program
from tests.certificate.programs.loops import mlp
from tests.certificate.run import Run


def import_libraries() -> None:
    for module in ("fsdp", "optim", "device_mesh", "tensor.parallel"):
        import_module(f"torch.distributed.{module}")


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


@program("distributed", world=2)
def gradients_accumulated_without_reduction(run: Run) -> None:
    run.join()
    model = nn.parallel.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(run.rank)
    with run.window(model, optimizer) as step:
        for _ in range(2):
            with model.no_sync():
                model(torch.randn(4, 8)).square().mean().backward()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            run.value([loss, nn.utils.clip_grad_norm_(model.parameters(), 1.0)])
            optimizer.step()
            optimizer.zero_grad()
            step()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@program("distributed", world=2)
def tensor_parallel(run: Run) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    run.join()
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.distributed.barrier()
    _train(run, model, torch.optim.AdamW(model.parameters(), foreach=False))
    torch.distributed.destroy_process_group()
