"""Profiles as people export them, and what our handler knows of the same windows."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, schedule

from benchmarks.layers.programs import DEVICE, NEW, PROGRAMS, Built, Loss, language, token_loss
from benchmarks.layers.recording import Program
from tb_memplugin import combine_handlers, memory_trace_handler

FLAGS: dict[str, dict[str, bool]] = {
    "bare": {},
    "shapes": {"record_shapes": True},
    "stacks": {"record_shapes": True, "with_stack": True, "with_modules": True},
}
"""What people switch on beside `profile_memory`."""

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        self.lstm = nn.LSTM(128, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.lstm(self.embed(x))[0])
        return y


def perceptron() -> Built:
    widths = (256, 512, 512, 64)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())]
    labels = torch.arange(64, device=DEVICE)
    net = nn.Sequential(*layers)
    return net, lambda net: F.cross_entropy(net(torch.ones(64, 256, device=DEVICE)), labels)


OTHERS = (
    *("decoder", "mixture", "checkpoint", "shared", "unet", "residual", "recurrent", "mixer"),
    *("roberta", "qwen2_moe", "whisper", "dinov2", "lora", "checkpoint_hf"),
    *("gemma", "deit", "convnextv2", "mbart", "olmoe", "squeezebert", "falcon_mamba", "lora_all"),
)
PROFILED: dict[str, Program] = {
    "mlp": perceptron,
    "lstm": lambda: (Recurrent(), token_loss),
    "gpt2": language("GPT2Config", n_embd=128, n_layer=4, n_head=4, n_positions=128),
    "llama": language("LlamaConfig", num_key_value_heads=2),
    **{name: (PROGRAMS | NEW)[name] for name in OTHERS},
}
"""The programs that are profiled."""


def record(program: Program, name: str, flags: str, folder: Path) -> None:
    """Train four steps and profile two, the third and fourth; with flags "stacks", all from the first on.

    Writes `NAME.FLAGS.json.gz` and `NAME.FLAGS.mem`: the exported trace, and the window of our handler.
    """
    model, loss_of = program()
    model.to(DEVICE)
    optimizer = OPTIMIZERS["sgd" if len(name) % 3 == 0 else "adamw"](
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    with tempfile.TemporaryDirectory() as run:
        ours = memory_trace_handler(run, model=model, optimizer=optimizer)
        profiler = profile(
            profile_memory=True,
            schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
            on_trace_ready=combine_handlers(ours, _exported(folder / f"{name}.{flags}.json.gz")),
            **FLAGS[flags],
        )
        with profiler:
            _train(model, loss_of, optimizer, profiler)
        (window,) = Path(run).rglob("window-*.mem")
        shutil.copyfile(window, folder / f"{name}.{flags}.mem")


def _exported(path: Path) -> Any:
    def export(profiler: profile) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "trace.json"
            profiler.export_chrome_trace(str(file))
            path.write_bytes(gzip.compress(file.read_bytes(), 1))

    return export


def _train(model: nn.Module, loss_of: Loss, optimizer: Any, profiler: profile) -> None:
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        profiler.step()
