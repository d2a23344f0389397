"""Every example in docs/callbacks.md runs as it stands there, and the tab shows its steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.server.tab import Tab

DOCUMENT = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def example(about: str) -> str:
    (found,) = [program for program in PROGRAMS if about in program]
    return found


def steps_in_the_tab(logdir) -> list[int]:
    (run,) = Tab(logdir).get("runs")["runs"]
    (worker,) = run["workers"]
    return list(worker["steps"]["step"])


def test_the_transformers_example(tmp_path, monkeypatch):
    from transformers import GPT2LMHeadModel

    from tests.callbacks.test_transformers import GPT2, Sentences

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    sentences: torch.utils.data.Dataset = torch.utils.data.ConcatDataset([Sentences()] * 4)
    exec(example("callbacks.transformers"), {"model": GPT2LMHeadModel(GPT2().config), "data": sentences})
    assert steps_in_the_tab(tmp_path / "out") == [10, 11, 12]


@pytest.mark.filterwarnings("ignore")
def test_the_lightning_example(tmp_path, monkeypatch):
    from tests.callbacks.test_lightning import data, network

    monkeypatch.chdir(tmp_path)
    library = pytest.importorskip("lightning.pytorch")
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    exec(example("callbacks.lightning"), {"module": network(library), "loader": loader})
    assert steps_in_the_tab(tmp_path) == [10, 50]
