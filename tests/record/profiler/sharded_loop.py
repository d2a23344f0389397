"""One rank of a training with FSDP2 on gloo, under a preloaded counter of the CPU's allocator.

    LD_PRELOAD=oracle.so python -m tests.record.profiler.sharded_loop FOLDER RANK RUNS

Print a line of JSON for each of two windows of a run: bytes at its start, peak and end, counted and recorded.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.record.profiler.loops_with_a_past import Loop, figures_of, oracle, train

distributed: Any = torch.distributed


def sharded() -> Loop:
    """Four blocks of two linear layers, each sharded, in AdamW."""
    mesh = init_device_mesh("cpu", (2,))
    layers = (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))
    model = nn.Sequential(*layers)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_: int) -> None:
        train(optimizer, model(torch.randn(32, 64)).square().mean())

    return model, optimizer, step


def main() -> None:
    """Join the other rank and record."""
    folder, rank, runs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    oracle.oracle_live.restype = oracle.oracle_peak.restype = ctypes.c_int64
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    for run in range(runs):
        for figures in figures_of(folder / str(rank) / str(run), sharded, traced=False):
            sys.stdout.write(json.dumps(figures) + "\n")
        gc.collect()  # the model, before the next one
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
