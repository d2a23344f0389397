"""An estimate of Llama-7B (bf16, batch 1, sequence 2048) compared with FakeTensorMode and MemTracker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.figures import Figure
from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.run import cuda_shim

ROUNDS, STEPS = 5, 2
GOAL_RATIO, GOAL_GIB, PEAK_GIB, PEAK_SHARE = 1.5, 1.0, 62.756, 0.005
BATCH, LENGTH = 1, 2048
GIB = 1 << 30


def measure() -> list[Figure]:
    """Measure the time in turns, the memory in a process of its own, and the error of the estimated peak."""
    estimated()  # warm up: imports and FakeTensorMode's caches
    alone()
    ours, plain = [], []
    for _ in range(ROUNDS):
        plain.append(_lap(alone))
        ours.append(_lap(estimated))
    what = f"Llama-7B, {STEPS} steps estimated, the answer included"
    return [
        Figure(what, "s", ours, GOAL_RATIO, plain, "FakeTensorMode alone"),
        Figure(what, "s", ours[-1:], None, [_lap(tracked)], "MemTracker"),  # measured once, as it is slow
        Figure("the same: highest memory of the process", "GiB", [_process_gib()], GOAL_GIB),
        Figure(
            "the same: peak, off 62.756 GiB by",
            "%",
            [abs(estimated() / GIB / PEAK_GIB - 1) * 100],
            PEAK_SHARE * 100,
        ),
    ]


def estimated() -> int:
    """Estimate the program and return its peak in bytes, without workspaces."""
    with MemoryEstimator(gpu="a100-80gb") as estimator:
        for _ in _steps():
            estimator.step()
    answer = estimator.estimate()
    return answer.peak_allocated_bytes - answer.workspace_bytes


def alone() -> None:
    """Run the program under FakeTensorMode alone, with the AdamW kernels that a GPU uses."""
    with _cuda_known(), FakeTensorMode():
        for _ in _steps(foreach=True):
            pass


def tracked() -> None:
    """Run the program in torch's MemTracker, whose statistics must be reset between steps."""
    with _cuda_known(), FakeTensorMode():
        tracker = MemTracker()
        with tracker:
            for _ in _steps(foreach=True):
                tracker.reset_mod_stats()


def _steps(foreach: bool | None = None) -> Iterator[int]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(use_cache=False))  # the defaults are those of Llama-7B
            optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
            ids = torch.randint(0, 32_000, (BATCH, LENGTH))
            for step in range(STEPS):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield step
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _cuda_known() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    cuda_shim.switch(True)
    try:
        yield
    finally:
        cuda_shim.switch(False)


def _lap(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _process_gib() -> float:
    """Return `ru_maxrss`, in GiB, of a process that only estimates."""
    code = (
        "import resource; from benchmarks.estimator import estimated; estimated(); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024 / GIB
