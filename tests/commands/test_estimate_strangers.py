"""`tb-memplugin estimate` of targets that behave badly, and where PyTorch is missing."""

import sys

import pytest

from tests.commands.files import refused, told
from tests.test_architecture import run_without_torch

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def a_path_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rude", raising=False)


def test_a_target_that_prints_and_one_that_leaves(tmp_path, monkeypatch):
    (tmp_path / "rude.py").write_text(
        "import sys, torch\nprint('noise')\n"
        "def quits(): sys.exit(0)\n"
        "def prints(): print('noise'); return torch.nn.Linear(4, 4), torch.zeros(2, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "SystemExit: 0" in refused("estimate", "rude:quits")
    assert told("estimate", "rude:prints", "--no-changes")["fits"]  # the output is JSON and nothing else


def test_a_model_on_two_devices_and_one_that_looks_things_up_by_value_are_told_with_their_lines(
    tmp_path, monkeypatch
):
    (tmp_path / "rude.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x): return x @ self.weight + torch.FloatTensor(4)\n"
        "class Chooses(torch.nn.Linear):\n"
        "    def forward(self, x): return {}[f'expert_{x.argmax()}']\n"
        "def two(): return Model(4, 4), torch.zeros(2, 4)\n"
        "def chooses(): return Chooses(4, 4), torch.zeros(2, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    message = refused("estimate", "rude:two", "--no-changes")
    assert "tensors of two devices" in message
    assert "rude.py:3" in message
    message = refused("estimate", "rude:chooses", "--no-changes")
    assert "uses a tensor's value as a key or name" in message
    assert "rude.py:5" in message


def test_without_torch_it_says_what_to_install():
    said = run_without_torch(
        """
import sys
from tb_memplugin.commands import main

sys.stderr = sys.stdout
try:
    main(["estimate", "models:one"])
except SystemExit as end:
    print("exit code", end.code)
"""
    )
    assert "PyTorch, which is not installed" in said
    assert 'pip install "tb-memplugin[torch]"' in said
    assert said.endswith("exit code 2")
