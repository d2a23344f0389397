"""What requests of many threads needed goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

THREADS = """
import resource, sys, threading, time
import numpy as np
from pathlib import Path
from tb_memplugin.server.backend import FreedMemory

resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
if sys.argv[1] == "ours":
    ours = FreedMemory()

def resident():
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:"))

np.ones(3 << 20).sum()  # 24 MiB: glibc keeps smaller blocks from now on
before, together, kept, turn = resident(), threading.Barrier(12), [], threading.Lock()

def large():
    arrays = []
    for _ in range(3):
        arrays.append(np.ones(1 << 19))  # 4 MiB
        kept.append(bytes(1_000))  # what lives longer lies between
    together.wait(20)

def small():
    kept.append(bytes(1_000))  # now the thread has its pool
    together.wait(20)
    with turn:
        arrays = [np.ones(1 << 15) for _ in range(48)]  # 256 KiB each
        kept.append(bytes(1_000))

threads = [threading.Thread(target=globals()[sys.argv[2]]) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if sys.argv[1] == "ours":
    ours.give_back_soon()
    end = time.monotonic() + 20
    while resident() - before > 20 and time.monotonic() < end:
        time.sleep(0.1)
print(resident() - before)
"""


def mebibytes_left(by: str, arrays: str) -> int:
    command = [sys.executable, "-c", THREADS, by, arrays]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


@glibc
@pytest.mark.parametrize("arrays", ["large", "small"])
def test_arrays_of_threads_go_back_soon(arrays: str) -> None:
    """Each of twelve threads has had 12 MiB of arrays, of 4 MiB or of 256 KiB."""
    assert mebibytes_left("glibc", arrays) > 60
    assert mebibytes_left("ours", arrays) < 20
