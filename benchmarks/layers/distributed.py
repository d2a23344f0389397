"""Programs with process groups of one rank, for `benchmarks.layers`: replicated (DDP) and sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.layers.programs import Built, Decoder, DoubleConv, Loss, token_loss

Wrap = Callable[[nn.Module], nn.Module]


def in_process_group(wrap: Wrap, build: Callable[[], Built] = lambda: (Decoder(), token_loss)) -> Built:
    """Return a model that is wrapped on the GPU and trained for two steps; the truth is of the wrapper."""
    net: Any
    net, loss_of = build()

    def train(_: Loss, truth: Any) -> None:
        own = dist.HashStore()  # type: ignore[attr-defined]  # no port
        dist.init_process_group("nccl", store=own, rank=0, world_size=1, device_id=torch.device("cuda:0"))
        wrapped = wrap(net.cuda())
        truth.watch(wrapped)
        truth.hold_parameters()
        optimizer = torch.optim.AdamW(wrapped.parameters())
        for _step in range(2):
            loss = loss_of(wrapped)
            truth.backward(loss)
            truth.step(optimizer)
            optimizer.zero_grad()

    net.train_as_user = train
    return net, loss_of


def replicated(**options: Any) -> Wrap:
    return lambda net: nn.parallel.DistributedDataParallel(net, device_ids=[0], **options)


def sharded(**options: Any) -> Wrap:
    """Shard each block and what is left."""
    from torch.distributed.fsdp import fully_shard

    def wrap(net: nn.Module) -> nn.Module:
        for block in getattr(net, "blocks", ()):
            fully_shard(block, **options)
        fully_shard(net, **options)  # in place
        return net

    return wrap


class Images(nn.Module):
    """Convolutions, of which the first two are a block each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DoubleConv(3, 32), DoubleConv(32, 64)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


def images() -> Built:
    return Images(), lambda net: net(torch.randn(4, 3, 32, 32, device="cuda")).square().mean()


DISTRIBUTED: dict[str, Callable[[], Built]] = {
    "ddp": lambda: in_process_group(replicated()),
    "ddp_views": lambda: in_process_group(replicated(gradient_as_bucket_view=True)),
    "ddp_images": lambda: in_process_group(replicated(), images),
    "ddp_checkpoint": lambda: in_process_group(replicated(), lambda: (Decoder("checkpoint"), token_loss)),
    "fsdp2_decoder": lambda: in_process_group(sharded()),
    "fsdp2_kept": lambda: in_process_group(sharded(reshard_after_forward=False)),
    "fsdp2_images": lambda: in_process_group(sharded(), images),
    "fsdp2_checkpoint": lambda: in_process_group(sharded(), lambda: (Decoder("checkpoint"), token_loss)),
}
