"""Reads damaged files of every kind: `python -m tests.mutations [N] [--seed S] [--kind KIND]`.

N is their number of each kind, 5,000 if it is not given. The process may take 1 GiB above its start. The
tests read 50 of each kind.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tb_memplugin import budget
from tests.mutations.kinds import KINDS
from tests.mutations.sweep import sweep


def main() -> int:
    """Print what damaged files have caused besides an error in words. Return 1 if anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("count", nargs="?", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS))
    asked = parser.parse_args()
    os.environ[budget.SECONDS_VARIABLE] = str(24 * 3600)  # of all files together
    budget.confine(lambda _path, _seconds: None)
    bad = 0
    for name, kind in KINDS.items():
        if asked.kind in (None, name):
            begin = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                done = sweep(kind, asked.count, asked.seed, Path(folder))
            bad += len(done.problems)
            used = time.process_time() - begin
            counts = f"{done.read:,} read, {done.refused:,} refused, {len(done.problems)} problems"
            sys.stdout.write(f"{name}: {counts}, {used:.0f} s\n")
            sys.stdout.writelines(f"  {line}\n" for line in done.problems)
            sys.stdout.flush()
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
