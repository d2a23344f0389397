"""The cost of `tb-memplugin run` per training step, after the steps that it records."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from benchmarks.figures import Figure
from tb_memplugin.launch.recorder import ProgramRecorder
from tb_memplugin.launch.start import Settings

PAIRS, SAMPLES = 24, 2000
WIDTHS = {64: 250, 256: 60, 1024: 5}
"""Widths of a network of four layers, and the steps of a block."""
RECORDED = range(3, 5)
WARM_UP = 16
"""Steps before a block: some are recorded, and the first ten have figures, whatever they cost."""

FIRST_WRITE_S = 2
"""The figures are first written after one second, and then every ten seconds: in no block."""


def _cnn() -> nn.Module:
    blocks = (
        nn.Sequential(nn.Conv2d(below, above, 3), nn.BatchNorm2d(above), nn.ReLU(), nn.MaxPool2d(2))
        for below, above in ((3, 16), (16, 32))
    )
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _programs() -> Iterator[tuple[str, nn.Module, torch.Tensor, int]]:
    """Yield names, networks, their batches, and the steps of a block: some tenths of a second."""
    for width, steps in WIDTHS.items():
        layers = (nn.Linear(width, width) for _ in range(4))
        yield f"width {width}", nn.Sequential(*layers), torch.randn(64, width), steps
    yield "CNN", _cnn(), torch.randn(8, 3, 32, 32), 120
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    transformer = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 100))
    yield "transformer", transformer, torch.randn(8, 32, 64), 60


def measure() -> list[Figure]:
    """Measure steps with and without the recorder, with figures of the steps, on one thread."""
    os.environ["TB_MEMPLUGIN_LOG_LEVEL"] = "ERROR"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_outside(*program) for program in _programs()]
    finally:
        torch.set_num_threads(threads)


def _outside(name: str, net: nn.Module, batch: torch.Tensor, steps: int) -> Figure:
    """Measure pairs of blocks in changing order; the interval is a bootstrap over the pairs.

    It is the time of the processor, of all threads of the process: other programs do not count.
    """
    step = _program(net, batch)
    with_us, without = np.empty(PAIRS), np.empty(PAIRS)
    for pair in range(-1, PAIRS):  # the first is warm-up
        for ours in (True, False) if pair % 2 else (False, True):
            (with_us if ours else without)[pair] = _block(step, steps, ours=ours)
    random = np.random.default_rng(0)
    ratios = with_us / without
    samples = [np.median(ratios[random.integers(PAIRS, size=PAIRS)]) for _ in range(SAMPLES)]
    low, high = np.percentile(samples, (2.5, 97.5))
    return Figure(
        f"run: a step that is not recorded, {name}",
        "ms",
        with_us.tolist(),
        1.01,
        without.tolist(),
        "the program alone",
        interval=(float(low), float(high)),
    )


def _program(net: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _block(step: Callable[[], None], steps: int, *, ours: bool) -> float:
    """Return the milliseconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = ProgramRecorder(Settings(folder, "program", 0, steps=(RECORDED,)))
        if ours:
            recorder.begin()
        for _ in range(WARM_UP):
            step()
        time.sleep(FIRST_WRITE_S)
        begin = time.process_time()
        for _ in range(steps):
            step()
        milliseconds = (time.process_time() - begin) * 1e3 / steps
        recorder.end()
    return milliseconds
