"""What the runtime engine's history tells of categories, beside what fake tensors know.

The history has Python's stacks alone, so its categories are inferred as those of a stranger's snapshot are.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tb_memplugin.dryrun.engine import ENGINES
from tb_memplugin.estimate.answer.script import read_program
from tb_memplugin.estimate.gpu_spec import GpuSpec

MOST_OTHERWISE = 0.04
"""The share of the peak that may be inferred as something else: what is alive across a step in a hook."""

MIB = 1 << 20
needs_cuda = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.0+cu"), reason="needs PyTorch 2.13 with CUDA"
)

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F
net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
"""
LOOP = """
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    x = torch.randn(2048, 1024).cuda()
    loss = F.mse_loss(net(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {
    "plain": MODEL + LOOP,
    "compiled": f"{MODEL}\nnet.compile()\n{LOOP}",
    "an optimizer in hooks": MODEL
    + """
optimizers = {weight: torch.optim.Adam([weight], foreach=False) for weight in net.parameters()}
def hook(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()
for weight in net.parameters():
    weight.register_post_accumulate_grad_hook(hook)
for _ in range(4):
    x = torch.randn(2048, 1024).cuda()
    F.mse_loss(net(x), x).backward()
""",
    "resumed": f"{MODEL}{LOOP}\ndel net, optimizer, x, loss\n{MODEL}{LOOP}",
}
SEARCH = f"""{MODEL}
net.requires_grad_(False)
target = [torch.randn(4096, 1024).cuda() @ net[0].weight for _ in range(2)]
image = torch.randn(4096, 1024, device="cuda", requires_grad=True)
optimizer = torch.optim.LBFGS([image], max_iter=4, history_size=4)
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(net[:2](image), target[0])
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
"""
CONVOLUTION = """
import torch
net = torch.nn.Conv2d(64, 64, 3).cuda()
for _ in range(4):
    with torch.no_grad():
        net(torch.randn(8, 64, 64, 64, device="cuda"))
"""


def breakdowns(program: str, tmp_path: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes of each category at the peak, by fake tensors and by the history."""
    script = tmp_path / "train.py"
    script.write_text(program, "utf-8")
    fake, history = (
        ENGINES[engine](read_program([str(script)]), GpuSpec.named("h100"), steps=3).estimate
        for engine in ("fake", "runtime")
    )
    assert fake.peak_allocated_bytes == history.peak_allocated_bytes
    return Counter(dict(fake.breakdown)), Counter(dict(history.breakdown))


@needs_cuda
@pytest.mark.parametrize("name", PROGRAMS)
def test_categories_that_are_inferred_are_those_that_are_known(name: str, tmp_path: Path) -> None:
    fake, history = breakdowns(PROGRAMS[name], tmp_path)
    for breakdown in (fake, history):  # frames do not tell what an operator frees from what backward frees
        breakdown["autograd_detail"] += breakdown.pop("temporary", 0)
    assert history["workspace"] == fake["workspace"] == 64 * MIB
    assert history["unknown"] == 0
    assert (history - fake).total() <= MOST_OTHERWISE * fake.total()


@needs_cuda
def test_workspaces_are_known_where_a_line_that_runs_once_has_the_first(tmp_path: Path) -> None:
    _, history = breakdowns(SEARCH, tmp_path)
    assert history["workspace"] == 64 * MIB


@needs_cuda
def test_the_workspace_of_a_convolution_is_temporary(tmp_path: Path) -> None:
    """It has at least the input in another layout; the result stays."""
    script = tmp_path / "run.py"
    script.write_text(CONVOLUTION, "utf-8")
    history = ENGINES["runtime"](read_program([str(script)]), GpuSpec.named("h100"), steps=3).estimate
    breakdown = dict(history.breakdown)
    assert breakdown["activation"] == 8 * 64 * 62 * 62 * 4
    assert breakdown["temporary"] >= 8 * 64 * 64 * 64 * 4
    assert breakdown["input"] == 8 * 64 * 64 * 64 * 4
