"""Tests for the library that makes `cuda` known: it is compiled once and kept, and errors are clear."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tb_memplugin import MemPluginError
from tb_memplugin.estimate.run import cuda_shim
from tb_memplugin.record.compiling import CACHE_VARIABLE

needs_shim = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing to stand in for")

ESTIMATE = """
import torch
from tb_memplugin import MemoryEstimator, MemPluginError
try:
    with MemoryEstimator() as estimator:
        torch.empty(1 << 20, device="cuda")
    print(estimator.get_max_memory_allocated()[0])
except MemPluginError as error:
    print(error)
"""


def run(cache: Path, **environment: str) -> str:
    """Return the output of a new process that estimates 4 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", ESTIMATE],
        env={**os.environ, CACHE_VARIABLE: os.fspath(cache), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


@needs_shim
def test_it_is_compiled_once_and_kept(tmp_path: Path) -> None:
    assert run(tmp_path) == str(4 << 20)
    (made,) = tmp_path.iterdir()
    first = made.stat().st_mtime_ns
    assert run(tmp_path, CXX="no-such-compiler") == str(4 << 20)
    assert [one.stat().st_mtime_ns for one in tmp_path.iterdir()] == [first]


@needs_shim
def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path) -> None:
    told = run(tmp_path, CXX="no-such-compiler")
    assert "needs a C++ compiler" in told
    assert "device='cpu'" in told


@needs_shim
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a folder")
    assert CACHE_VARIABLE in run(taken)


@needs_shim
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    told = run(tmp_path, CXX="false")
    assert "The compiler failed" in told


def backward() -> None:
    """Run a backward on this thread, since autograd's own threads may have started before the device."""
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        torch.ones(2, device="cuda", requires_grad=True).sum().backward()


@needs_shim
def test_it_is_off_when_everybody_switched_it_off() -> None:
    cuda_shim.switch(True)
    cuda_shim.switch(True)
    cuda_shim.switch(False)
    backward()
    cuda_shim.switch(False)
    if torch.version.cuda is not None:
        return  # without the shim PyTorch decides; 2.6 ends the process
    with pytest.raises(RuntimeError, match=r"accelerator|device"):
        backward()


def test_a_compiler_is_found_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MemPluginError, match="no-such-compiler"):
        cuda_shim.compiler()
