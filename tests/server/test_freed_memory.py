"""What requests of many threads needed goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

THREADS = """
import resource, sys, threading
import numpy as np
from pathlib import Path
from tb_memplugin.server.freed_memory import give_back_large_arrays

resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
if sys.argv[1] == "ours":
    give_back_large_arrays()

def resident():
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:"))

np.ones(3 << 20).sum()  # 24 MiB: glibc keeps smaller blocks from now on
before, together, kept = resident(), threading.Barrier(12), []

def request():
    arrays = []
    for _ in range(3):
        arrays.append(np.ones(1 << 19))  # 4 MiB
        kept.append(bytes(1_000))  # what lives longer lies between
    together.wait(20)

threads = [threading.Thread(target=request) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""


def mebibytes_left(by: str) -> int:
    command = [sys.executable, "-c", THREADS, by]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_arrays_of_threads_do_not_stay() -> None:
    """Twelve threads have 144 MiB of arrays together."""
    assert mebibytes_left("glibc") > 60
    assert mebibytes_left("ours") < 20
