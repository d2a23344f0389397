"""A training that logs to a real tracker, without a network; it prints what the tracker then has, as JSON.

    python -m tests.record.trackers.program wandb|mlflow|trackio FOLDER

The user logs a loss in every second step. Steps 2 and 3 are recorded, all are monitored.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

STEPS = 10


def train(log: Callable[[int], object], tracker: str, folder: str) -> list[dict[str, int]]:
    """Train, and return the figures of each device in each step as the monitor returned them."""
    from tb_memplugin import MemoryMonitor, memory_trace_handler

    torch.manual_seed(0)
    net = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    handler = memory_trace_handler(f"{folder}/run", "w", model=net, log_to=tracker)
    monitor = MemoryMonitor(f"{folder}/run", "w", log_to=tracker)
    steps = []
    with profile(
        profile_memory=True, schedule=schedule(wait=1, warmup=1, active=2, repeat=1), on_trace_ready=handler
    ) as prof:
        for number in range(STEPS):
            net(torch.randn(8, 100)).sum().backward()
            optimizer.step()
            step = monitor.step()
            assert step is not None
            steps.append({device.device: device.peak_allocated for device in step.devices})
            if number % 2 == 0:
                log(number)
            prof.step()
    monitor.close()
    return steps


def with_wandb(folder: str) -> dict[str, Any]:
    """W&B offline: the summary has the last row's values."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    os.environ.update(dict.fromkeys(("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"), folder))
    import wandb

    run = wandb.init(project="p", dir=folder)
    steps = train(lambda number: run.log({"loss": number}), "wandb", folder)
    rows, summary = run.step, dict(run.summary)
    run.finish()
    return {"steps": steps, "own": rows, "values": summary}


def with_mlflow(folder: str) -> dict[str, Any]:
    """MLflow with files: the history of each metric."""
    os.environ.update(MLFLOW_ALLOW_FILE_STORE="true")
    import mlflow

    mlflow.set_tracking_uri(f"file://{folder}/mlruns")
    with mlflow.start_run() as run:
        steps = train(lambda number: mlflow.log_metric("loss", number, step=number), "mlflow", folder)
    mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    history = {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in client.get_run(run.info.run_id).data.metrics
    }
    return {"steps": steps, "own": history.pop("loss"), "values": history}


def with_trackio(folder: str) -> dict[str, Any]:
    """Trackio in a folder: the rows of metrics, and those of system metrics."""
    os.environ.update(TRACKIO_DIR=f"{folder}/trackio", HF_HUB_OFFLINE="1")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project="p", auto_log_cpu=False)
    steps = train(lambda number: trackio.log({"loss": number}), "trackio", folder)
    trackio.finish()
    own = [(row["step"], row["loss"]) for row in SQLiteStorage.get_logs("p", run.name)]
    rows = [row for row in SQLiteStorage.get_system_logs("p", run.name) if "memory/step" in row]
    return {"steps": steps, "own": own, "values": rows}


if __name__ == "__main__":
    name, where = sys.argv[1:]
    os.chdir(where)
    of_tracker = {"wandb": with_wandb, "mlflow": with_mlflow, "trackio": with_trackio}[name]
    result = of_tracker(where)
    Path(where, "result.json").write_text(json.dumps(result))
