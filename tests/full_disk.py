"""A process whose files take no more bytes: a full disk, as far as a program can tell."""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def fill(most):  # bytes that a file may have
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
def free():
    fill(resource.RLIM_INFINITY)
"""


def run(code: str, folder: str) -> subprocess.CompletedProcess[str]:
    """Run code that may call `fill(bytes)` and `free()`, with `FOLDER` in it."""
    program = f"{BEGIN}\nFOLDER = {folder!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
