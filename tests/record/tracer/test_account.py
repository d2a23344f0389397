"""A traced block has the bytes that the CPU's allocator counted, to the byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tb_memplugin.analysis.account import account_line, accounts
from tb_memplugin.record.compiling import CACHE_VARIABLE
from tb_memplugin.record.memory_tracer import MemoryTracer

PROGRAM = """
import torch
from tb_memplugin import MemoryTracer
from tb_memplugin.analysis.account import account_line, accounts
model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters())
tracer = MemoryTracer()
for step in range(2):
    with tracer.trace(model):
        model(torch.randn(8, 32, 64)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
    trace = tracer.trace_result()
    found = accounts(trace, 0)
    print([one.counted == one.allocator > 1_000_000 for one in found], account_line(found).text)
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and cc")
def test_a_training_step_is_accounted_for_at_start_peak_and_end(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import tb_memplugin" + PROGRAM],
        env={**os.environ, CACHE_VARIABLE: str(tmp_path), "TB_MEMPLUGIN_EXACT_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = "[True, True, True] accounts for 100.00 % of the allocator's bytes"
    assert done.stdout.splitlines() == [line, line]


def test_without_the_count_nothing_is_known():
    with (tracer := MemoryTracer()).trace(torch.nn.Linear(2, 2)):
        pass
    assert account_line(accounts(tracer.trace_result(), 0)).level == "not_known"
