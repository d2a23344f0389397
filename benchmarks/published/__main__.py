"""Estimate what others measured: `python -m benchmarks.published [PROGRAM...] [--write]` (`make accuracy`).

`peaks.csv` has a row for each published peak: source, GPU, configuration, metric, and the value as printed.
`sources.csv` says where each is from. Rows are entered before they are estimated, and no size is fitted to
them. What is printed is Markdown; `--write` puts it into docs/estimate_published.md.
"""

from __future__ import annotations

import csv
import gc
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.published.programs import PROGRAMS, gpt, train_gpt
from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.ranks import estimate_ranks
from tb_memplugin.estimate.run import cuda_shim
from tests.estimate import nanotron_llama

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "estimate_published.md"
BEGIN, END = "<!-- python -m benchmarks.published --write -->", "<!-- end -->"
BYTES = {"MiB": 1 << 20, "GiB": 1 << 30}
OUTLIER = 0.03
"""How far an estimate may be off before it is named with a reason."""

COMPILED = 8
"""The first change of the book's training that compiles the model."""

_STREAMS = (
    "probably streams: communication ran on its own, whose blocks others cannot use; here all is on one"
)

REASONS = {
    ("gpt_from_scratch", "change=8", "reserved"): (
        "probably padding: Inductor pads matrices of odd sizes (a vocabulary of 50,257) where timing them "
        "says that it is faster; change 9 leaves none to pad"
    ),
    ("nanotron", "dp=1 tp=8 pp=1 batch=8", "reserved"): _STREAMS,
    ("nanotron", "dp=2 tp=2 pp=2 batch=1", "reserved"): _STREAMS,
}
"""Why a row is off by more than `OUTLIER`."""


@dataclass(frozen=True, slots=True)
class Peak:
    """A published peak, as in `peaks.csv`. `ran_as` is the `GpuSpec` that stands for its GPU."""

    source: str
    gpu: str
    ran_as: str
    program: str
    config: str
    metric: str
    value: str
    unit: str

    @property
    def bytes(self) -> float:
        return float(self.value) * BYTES[self.unit]

    @property
    def options(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in self.config.split())


@dataclass(frozen=True, slots=True)
class Result:
    """A peak and what was estimated for it, in bytes."""

    peak: Peak
    estimated: int

    @property
    def off(self) -> float:
        """How much higher the estimate is, as a share of the published peak."""
        return self.estimated / self.peak.bytes - 1


def read_peaks() -> list[Peak]:
    with (HERE / "peaks.csv").open(encoding="utf-8", newline="") as file:
        return [Peak(**row) for row in csv.DictReader(file)]


def read_sources() -> dict[str, dict[str, str]]:
    with (HERE / "sources.csv").open(encoding="utf-8", newline="") as file:
        return {row["source"]: row for row in csv.DictReader(file)}


def estimated(peak: Peak) -> int:
    """Estimate a peak as its source means it."""
    if peak.program == "nanotron":
        options = {name: int(number) for name, number in peak.options.items()}
        row = nanotron_llama.Row(**options, allocated=0, reserved=0)
        rank = estimate_ranks(
            lambda estimator, _: nanotron_llama.train(row, estimator),
            f"tp={row.tp}",
            ranks=[0],
            gpu=GpuSpec.named(peak.ran_as),
        ).worst.estimate
        return rank.peak_allocated_bytes if peak.metric == "allocated" else rank.peak_reserved_bytes
    with MemoryEstimator(gpu=peak.ran_as):
        return PROGRAMS[peak.program](peak.options)


def by_parameters(parameters: int, weight_bytes: int) -> dict[str, float]:
    """Return what accelerate and DeepSpeed say of a model on one GPU, from its parameters alone.

    `accelerate estimate-memory` says four times the weights for Adam. DeepSpeed's
    `estimate_zero2_model_states_mem_needs` says 20 bytes for each parameter.
    """
    return {"accelerate": 4.0 * parameters * weight_bytes, "DeepSpeed": 20.0 * parameters}


def by_memtracker(change: int) -> int:
    """Return what torch's MemTracker says of the training after some of the book's changes."""
    torch.set_default_dtype(torch.bfloat16 if change >= 5 else torch.float32)
    cuda_shim.switch(True)
    try:
        with FakeTensorMode():
            tracker = MemTracker()
            with tracker:
                with torch.device("cuda"):
                    model = gpt(change)
                train_gpt(model, change, tracker.reset_mod_stats)
            snapshot = tracker.get_tracker_snapshot("peak")
    finally:
        cuda_shim.switch(False)
        torch.set_default_dtype(torch.float32)
    return int(next(parts["Total"] for device, parts in snapshot.items() if device.type == "cuda"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def percent(share: float) -> str:
    return f"{100 * share:+.2f} %".replace("-0.00", "+0.00")


def summary(
    results: Sequence[Result], key: Callable[[Result], tuple[str, ...]], head: Sequence[str]
) -> list[str]:
    """Return a table of how far groups of rows are off."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result.off)
    rows = []
    for name, offs in groups.items():
        far = np.abs(offs)
        rows.append(
            (
                *name,
                str(len(offs)),
                f"{100 * np.median(far):.3f} %",
                f"{100 * np.quantile(far, 0.95):.3f} %",
                percent(min(offs)),
                percent(max(offs)),
            )
        )
    return table((*head, "rows", "median", "95 % within", "lowest", "highest"), rows)


def report(results: Sequence[Result], peers: Sequence[tuple[Result, dict[str, float]]]) -> str:
    """Return what is printed, as Markdown."""
    sources = read_sources()
    version = torch.__version__.partition("+")[0]
    lines = [f"{len(results)} rows, estimated with PyTorch {version}.", ""]
    lines += ["### By framework, GPU and PyTorch", ""]
    lines += summary(
        results,
        lambda result: (
            sources[result.peak.source]["framework"],
            result.peak.gpu or "not said",
            sources[result.peak.source]["torch"] or "not said",
            result.peak.metric,
        ),
        ("framework", "GPU", "PyTorch", "metric"),
    )
    lines += ["### By program", ""]
    lines += summary(results, lambda result: (result.peak.program, result.peak.metric), ("program", "metric"))
    if peers:
        lines += ["### Beside other estimates", ""]
        names = list(peers[0][1])
        lines += table(
            ("training", "published", "ours", *names),
            (
                (
                    f"{result.peak.program} {result.peak.config}",
                    f"{result.peak.value} {result.peak.unit} {result.peak.metric}",
                    percent(result.off),
                    *(percent(others[name] / result.peak.bytes - 1) for name in names),
                )
                for result, others in peers
            ),
        )
    far = [result for result in results if abs(result.off) > OUTLIER]
    lines += [f"### Rows off by more than {OUTLIER:.0%}", ""]
    lines += table(
        ("row", "off", "reason"),
        (
            (
                f"{result.peak.program} {result.peak.config}, {result.peak.metric}",
                percent(result.off),
                REASONS.get((result.peak.program, result.peak.config, result.peak.metric), "**not known**"),
            )
            for result in far
        ),
    )
    lines += ["### Sources", ""]
    used = {result.peak.source for result in results}
    lines += table(
        ("source", "where", "what it says and does not say"),
        (
            (f"[{name}]({row['url']})", row["place"], row["said"])
            for name, row in sources.items()
            if name in used
        ),
    )
    return "\n".join(lines).rstrip() + "\n"


def main(words: list[str]) -> None:
    logging.getLogger("tb_memplugin").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    chosen = {word for word in words if not word.startswith("--")}
    peaks = [peak for peak in read_peaks() if not chosen or peak.program in chosen]
    results, peers = [], []
    for peak in peaks:
        results.append(Result(peak, estimated(peak)))
        print(f"{peak.program} {peak.config} {peak.metric}: {percent(results[-1].off)}", file=sys.stderr)
        change = int(peak.options.get("change", COMPILED))
        if change < COMPILED:  # MemTracker does not see what was compiled
            with torch.device("meta"):
                parameters = sum(one.numel() for one in gpt(change).parameters())
            others = by_parameters(parameters, 2 if change >= 5 else 4)
            peers.append((results[-1], others | {"MemTracker": float(by_memtracker(change))}))
        gc.collect()
    text = report(results, peers)
    print(text)
    if "--write" in words:
        page = PAGE.read_text("utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
