"""A training that a monitor watches, in a process of its own: it trains as many steps as each line says.

    python -m tests.monitored_training LOGDIR

After each line it flushes and prints, as JSON, what the monitor told of the steps so far.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import torch.nn.functional as F

from tb_memplugin import MemoryMonitor
from tests.training import MODELS


def main(logdir: str) -> None:
    """Train until there are no more lines."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS["cnn"]()
    optimizer = torch.optim.AdamW(model.parameters())
    told = []
    kept = []
    with MemoryMonitor(logdir, "rank0") as monitor:
        for line in sys.stdin:
            for _ in range(int(line)):
                x, y = model.batch()
                with monitor.phase("forward"):
                    loss = F.cross_entropy(model(x), y)
                with monitor.phase("backward"):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                kept.append(torch.ones(1 << 18))  # a leak of 1 MiB a step
                step = monitor.step()
                assert step is not None
                told.append(asdict(step))
            monitor.flush()
            print(json.dumps(told), flush=True)  # noqa: T201  # for the test that reads it


if __name__ == "__main__":
    main(sys.argv[1])
