"""Print every figure with its peer and its goal: `python -m benchmarks [SUBJECT...]`; see `SUBJECTS`.

`python -m benchmarks corrections` prints what each correction of an estimate is worth, which has no peer.

Figures are medians over several rounds, in which we and the peer take turns. Machines are noisy, so rely on
the ratios. The status is 1 if docs/performance.md says better of a figure than its 95 % confidence interval.
"""

from __future__ import annotations

import logging
import platform
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.corrections import show as show_corrections
from benchmarks.figures import Figure, claims_of

SUBJECTS = (
    "handler",
    "programs",
    "loop",
    "disk",
    "server",
    "fleet",
    "clients",
    "levels",
    "browser",
    "snapshot",
    "tracer",
    "lines",
    "monitor",
    "launch",
    "exact_cpu",
    "simulator",
    "estimator",
    "bundle",
)


PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def main(chosen: list[str]) -> int:
    if chosen[:1] == ["corrections"]:
        show_corrections(Console(width=132), chosen[1:])
        return 0
    unknown = set(chosen) - set(SUBJECTS)
    if unknown:
        sys.exit(f"No benchmark {', '.join(sorted(unknown))}. Choose from: {', '.join(SUBJECTS)}.")
    logging.getLogger("tb_memplugin").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    console = Console(width=132)
    console.print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads"
    )
    table = Table("what", "ours", "peer", "the peer is", "ratio", "goal", "met")
    claims, contradicted, measured = claims_of(PAGE.read_text()), [], set[str]()
    for subject in chosen or SUBJECTS:
        measure: Callable[[], list[Figure]] = import_module(f"benchmarks.{subject}").measure
        for figure in measure():
            table.add_row(*figure.row())
            contradicted.append(figure.contradicted(claims))
            measured.add(figure.what)
    console.print(table)
    worse = [line for line in contradicted if line is not None]
    if not chosen:
        unchecked = {what for what, _ in claims if not what.startswith("goal: ")} - measured
        console.print(f"docs/performance.md also says, which nothing here measures: {sorted(unchecked)}")
    for line in worse:
        console.print(f"docs/performance.md says better than it is: {line}", style="red", soft_wrap=True)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
