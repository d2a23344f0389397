"""Every example on the pages of the tools that this one takes the place of runs, with the import changed."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin import logs
from tb_memplugin.coming_from import memory_profiler

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
pytestmark = pytest.mark.skipif(
    not SEEDS.is_dir(), reason="the pages of the five tools are not on this machine"
)


def examples(page: str) -> list[str]:
    """The fenced Python of a page."""
    path = SEEDS / page
    text = path.read_text("utf-8") if path.exists() else ""
    return re.findall(r"```\s*python\n(.*?)```", text, re.DOTALL | re.IGNORECASE)


def here(code: str, package: str) -> str:
    """The example with its import changed, on the CPU."""
    code = re.sub(rf"from {package} import", f"from tb_memplugin.coming_from.{package} import", code)
    code = re.sub(rf"import {package} as", f"import tb_memplugin.coming_from.{package} as", code)
    return code.replace(".cuda()", "").replace("device = 'cuda'", "device = 'cpu'")


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(code, names)  # the pages are the project's own brief
    return names


class NeuMF(nn.Module):
    """10 users and 4 items: 40 + 16 weights of 4 bytes, and a last layer of 4 + 1."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.mf_user_embed, self.mf_item_embed = nn.Embedding(users, 4), nn.Embedding(items, 4)
        self.final = nn.Linear(4, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.final(self.mf_user_embed(user) * self.mf_item_embed(item))
        return score


def test_pytorch_memory_profilers_loop(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, _, build, begin, loop = examples("pytorch_mem_profiler.md")
    model_code = f"from tb_memplugin.coming_from.pytorch_mem_profiler import *\n{build}\n{begin}"
    body = "user, item = batch_data\n        model.zero_grad()\n        model(user, item).sum().backward()\n"
    loop = re.sub(r"\.\.\.\s+<training loop logic>\s+\.\.\.\n", body, loop)
    loop = loop.replace("<end of epoch logic>", "pass")
    loader = [(torch.tensor([row]), torch.tensor([row % 4])) for row in range(10)]
    run(
        here(f"{model_code}\n{loop}", "pytorch_mem_profiler"),
        NeuMF=NeuMF,
        users=10,
        items=4,
        num_epochs=1,
        loader=loader,
    )
    shown = capsys.readouterr().out
    for word in ("cached", "eature maps", "mf_user_embed.weight", "final.bias", "ntermediate gradients"):
        assert word in shown
    (written,) = (tmp_path / "memory_csv_data").glob("*.weights.csv")
    rows = [row.split(",")[1:6] for row in written.read_text("utf-8").splitlines()]
    assert rows[1::4] == [
        ["1", "5", "mf_user_embed.weight", "160", "160"],
        ["1", "10", "mf_user_embed.weight", "160", "160"],
    ]


def test_pytorch_mem_tracers_lines(capsys):
    (code,) = examples("pytorch_mem_tracer.md")
    run(here(code, "pytorch_mem_tracer"), model=lambda size: torch.ones(size), args=1000)
    shown = capsys.readouterr().out
    assert "Max mem" in shown
    assert "Mem, Cumulative Mem, Median, Count, Location" in re.sub(r"\s{2,}", ", ", shown)
    assert "test_pages.py" in shown


class TestPyTorchMemoryTracing:
    """Estimates with fake tensors."""

    CODE = examples("pytorch_memory_tracing.md")

    def test_the_quick_start(self, capsys):
        (code,) = [one for one in self.CODE if "class SimpleModel" in one]
        names = run(here(code, "memory_profiler"))
        shown = capsys.readouterr().out
        peak = names["estimator"].get_max_memory_allocated()[0]
        parameters = 2 * (1000 * 1024 + 1024 * 1000 + 1000)  # float16
        assert peak > 4 * parameters  # themselves, their gradients, two states of Adam
        assert f"Peak estimated memory across all phases: {peak / 1024**2:.2f} MB" in shown

    @pytest.mark.parametrize(
        "number", [row for row, one in enumerate(CODE) if "logging" in one and "SimpleModel" not in one]
    )
    def test_logging(self, number, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code = here(self.CODE[number], "memory_profiler").replace('device="cuda"', 'device="cpu"')
        try:
            run(code)
            memory_profiler.get_logger("a").error("told")
            if "log_to_file=True" in code:
                assert Path("memory_profile.log").exists()
        finally:
            package = logging.getLogger(logs.LOGGER)
            for handler in list(package.handlers):
                package.removeHandler(handler)
            package.propagate = True
            package.setLevel(logging.NOTSET)


def test_every_page_has_examples_that_ran():
    assert [len(examples(f"{page}.md")) for page in ("pytorch_mem_profiler", "pytorch_mem_tracer")] == [5, 1]
