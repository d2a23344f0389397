"""Limits on the memory of tests, tried by pytest on tests of its own. Bytes are those of float32 tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BEGIN = """
import unittest
import pytest
import torch

kept = []
"""


def run(tmp_path: Path, tests: str, *options: str) -> str:
    """Run tests in a pytest of their own and return what it printed."""
    (tmp_path / "test_it.py").write_text(BEGIN + tests, "utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tb_memplugin.pytest_plugin", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "-q", *options, "test_it.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "memory recorded in" not in done.stderr
    return done.stdout


def test_a_peak_above_its_limit_fails_with_what_it_consists_of(tmp_path: Path) -> None:
    tests = """
@pytest.mark.peak_memory("4000 B")
@pytest.mark.parametrize("count", [1000, 1001])
def test_peak(count):
    torch.ones(count)
"""
    printed = run(tmp_path, tests)
    assert "1 failed, 1 passed" in printed
    assert "The test had 3.91 KiB allocated on cpu, 4 B above its limit of 3.91 KiB." in printed
    assert "(test_peak): 3.91 KiB" in printed


def test_what_was_there_before_does_not_count(tmp_path: Path) -> None:
    tests = """
@pytest.fixture
def large():
    return torch.ones(1_000_000)

@pytest.mark.peak_memory(4000)
def test_peak(large):
    torch.ones(1000)
"""
    assert "1 passed" in run(tmp_path, tests)


def test_growth_fails_with_the_line_and_what_is_filled_once_does_not(tmp_path: Path) -> None:
    tests = """
@pytest.mark.no_memory_growth(steps=4)
def test_leak():
    kept.append(torch.ones(1000))

@pytest.mark.no_memory_growth
def test_cycle():
    tensors = [torch.ones(1000)]
    tensors.append(tensors)

@pytest.mark.no_memory_growth
def test_cache():
    if len(kept) < 8:
        kept.append(torch.ones(1000))

@pytest.mark.no_memory_growth
class TestOfUnittest(unittest.IsolatedAsyncioTestCase):
    async def test_same(self):
        self.rows = [*getattr(self, "rows", ()), torch.ones(1000)]

    async def test_more(self):
        kept.append(torch.ones(2000))
"""
    printed = run(tmp_path, tests)
    assert "2 failed, 3 passed" in printed
    assert "Memory on cpu grew in each of 5 runs of the test, by 7.81 KiB (median)." in printed
    assert "Memory on cpu grew in each of 4 runs of the test, by 3.91 KiB (median)." in printed
    assert "(test_leak): 19.53 KiB" in printed  # five tensors are kept beside the first


def test_the_fixture_measures_a_block_by_layer(tmp_path: Path) -> None:
    tests = """
def test_block(memory):
    net = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU())
    rows = torch.ones(10, 100)
    with memory(net) as used:
        net(rows)
    assert used.peak_bytes == 4 * 10 * (50 + 50)
    layers = {part.key: part.categories.get("activation") for part in used.parts("module")}
    assert (layers["0"], layers["1"]) == (2000, 2000)
    with memory() as nothing:
        pass
    assert nothing.peak_bytes == 0
"""
    assert "1 passed" in run(tmp_path, tests)


def test_a_failure_of_the_test_itself_stays_what_it_is(tmp_path: Path) -> None:
    tests = """
@pytest.mark.peak_memory(1)
def test_wrong():
    torch.ones(1000)
    raise KeyError("own")

class TestOfUnittest(unittest.TestCase):
    @pytest.mark.no_memory_growth
    def test_wrong(self):
        kept.append(1)
        self.fail("once")

    @pytest.mark.no_memory_growth(steps=1)
    def test_later(self):
        kept.append(2)
        self.assertLess(kept.count(2), 2, "later")

    @pytest.mark.no_memory_growth
    def test_part(self):
        with self.subTest(part=1):
            kept.append(3)
            self.fail("part")

    @classmethod
    def tearDownClass(cls):
        print("runs", kept)
"""
    printed = run(tmp_path, tests, "-s")
    assert "4 failed, 1 passed in" in printed  # without errors; a subtest fails by itself
    assert "runs [2, 2, 3, 1]" in printed
    assert printed.count("SUBFAILED(part=1)") == 1
    assert "KeyError: 'own'" in printed
    assert "its limit" not in printed


def test_a_test_with_a_profiler_of_its_own_is_not_measured_and_says_so(tmp_path: Path) -> None:
    tests = """
@pytest.mark.peak_memory("1 GiB")
def test_profiler():
    with torch.profiler.profile() as profiler:
        torch.ones(3)
    assert profiler.events()
"""
    printed = run(tmp_path, tests)
    assert "1 failed" in printed
    assert "another torch profiler is on" in printed
    assert "measured.py" not in printed


@pytest.mark.parametrize(
    ("marker", "what"),
    [
        ("peak_memory", "None is no limit."),
        ("peak_memory(-5)", "-5 is no limit."),
        ('peak_memory("much")', "'much' is not a size"),
        ("no_memory_growth(steps=0)", "no number of steps"),
        ("no_memory_growth(step=3)", "no number of steps"),
        ("no_memory_growth(True)", "no number of steps"),
    ],
)
def test_a_wrong_marker_is_told_without_a_traceback(tmp_path: Path, marker: str, what: str) -> None:
    printed = run(tmp_path, f"@pytest.mark.{marker}\ndef test_it():\n    pass\n")
    assert "1 failed" in printed
    assert what in printed
    assert "pytest_plugin.py" not in printed
    assert "another exception" not in printed


def test_the_plugin_imports_no_torch() -> None:
    code = "import sys, tb_memplugin.pytest_plugin; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
