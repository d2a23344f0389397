"""What each correction of an estimate is worth: leave it out, and see how far the peak moves.

`python -m benchmarks corrections` estimates trainings of many kinds with all corrections and rows of the
table of kernels, and then without each; names of trainings, such as "Llama, AMP", choose some.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.on_gpu.programs import LARGE, PROGRAMS
from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel
from tb_memplugin.estimate.run import chosen
from tb_memplugin.estimate.run.chosen import ROWS, TABLES
from tb_memplugin.estimate.run.correction import Correction

GPU = "h100"
LISTS = ("ASKING", "ON_CUDA", "EVERYWHERE")
"""The lists of corrections in chosen.py."""

LANGUAGE = {
    "Llama": {"num_hidden_layers": 2},
    "Mixtral": {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048},
    "GPT2": {"n_layer": 2},
    "Qwen2": {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048},
    "Bert": {"num_hidden_layers": 2},
    "T5": {"num_layers": 2, "decoder_start_token_id": 0},
}
IMAGES = {"ViT": {"num_hidden_layers": 2}, "ConvNext": {}, "Swin": {}, "ResNet": {}}
"""Configs of transformers, with fewer layers where these are alike."""

Peaks = tuple[int, int]
"""Bytes at the peak, allocated and reserved."""


@dataclass(frozen=True)
class Moved:
    """How far a peak moves without a correction, in percent of the peak, and in how many trainings it does.

    `rare` is the program that needs it, and `fails` has the trainings that do not run without it.
    """

    name: str
    rare: str = ""
    allocated: list[float] = field(default_factory=list)
    reserved: list[float] = field(default_factory=list)
    fails: list[str] = field(default_factory=list)

    def add(self, with_all: Peaks, without: Peaks | None, workload: str) -> None:
        """Add a training; `without` is None if it does not run."""
        if without is None:
            self.fails.append(workload)
            return
        shares = [abs(less / more - 1) * 100 for less, more in zip(without, with_all, strict=True)]
        self.allocated.append(shares[0])
        self.reserved.append(shares[1])

    @property
    def matters(self) -> int:
        """The number of trainings whose peak moves, or that do not run."""
        pairs = zip(self.allocated, self.reserved, strict=True)
        return sum(bool(allocated or reserved) for allocated, reserved in pairs) + len(self.fails)


def workloads() -> dict[str, Callable[[], None]]:
    """Return trainings of two steps by name."""
    trainings: dict[str, Callable[[], None]] = {
        str(program): partial(program.train, "cuda", LARGE, 2)
        for program in PROGRAMS
        if not program.compiled and program.optimizer == "Adam"
    }
    for kinds, train in ((LANGUAGE, _language_model), (IMAGES, _image_model)):
        for kind, settings in kinds.items():
            for autocast in (False, True):
                trainings[f"{kind}, {'AMP' if autocast else 'fp32'}"] = partial(
                    train, kind, settings, autocast
                )
    return trainings


def _language_model(kind: str, settings: dict[str, int], autocast: bool) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(use_cache=False, **settings)
    automatic = {"Bert": "AutoModelForMaskedLM", "T5": "AutoModelForSeq2SeqLM"}.get(
        kind, "AutoModelForCausalLM"
    )
    tokens = torch.zeros(4, 512, dtype=torch.long, device="cuda")
    with torch.device("cuda"):
        model = getattr(transformers, automatic).from_config(config)
    _train(model, lambda: model(input_ids=tokens, labels=tokens).loss, autocast)


def _image_model(kind: str, settings: dict[str, int], autocast: bool) -> None:
    import transformers
    from transformers.initialization import no_init_weights

    config = getattr(transformers, f"{kind}Config")(**settings)
    images = torch.zeros(16, 3, 224, 224, device="cuda")
    with torch.device("cuda"), no_init_weights():
        model = transformers.AutoModelForImageClassification.from_config(config)
    _train(model, lambda: model(pixel_values=images).logits.float().logsumexp(-1).mean(), autocast)


def _train(model: nn.Module, loss: Callable[[], Tensor], autocast: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            result = loss()
        result.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def peaks(train: Callable[[], None]) -> Peaks:
    """Return the peaks of a training."""
    with MemoryEstimator(gpu=GPU) as estimator:
        train()
    answer = estimator.estimate()
    return answer.peak_allocated_bytes, answer.peak_reserved_bytes


@contextmanager
def without_row(row: Kernel) -> Iterator[None]:
    """Leave a row of the table of kernels out."""
    with mock.patch.dict(TABLES["cuda"]):
        for operator in row.operators:
            del TABLES["cuda"][operator]
        yield


@contextmanager
def without_correction(kind: type[Correction]) -> Iterator[None]:
    """Leave a correction out."""
    name = next(name for name in LISTS if kind in getattr(chosen, name))
    others = tuple(other for other in getattr(chosen, name) if other is not kind)
    with mock.patch.object(chosen, name, others):
        yield


@contextmanager
def noting(met: set[str]) -> Iterator[None]:
    """Add the sources of rows to `met` as operators ask for them."""

    def noted(row: Kernel) -> Kernel:
        def buffers(call: Call) -> Buffers:
            met.add(row.source)
            return row.buffers(call)

        return replace(row, buffers=buffers)

    with mock.patch.dict(TABLES["cuda"], {operator: noted(row) for operator, row in TABLES["cuda"].items()}):
        yield


def moved(trainings: dict[str, Callable[[], None]]) -> list[Moved]:
    """Return how far each correction and row moves the peaks of these trainings, the farthest first."""
    rows = [row for row in ROWS if row.on != "cpu"]
    results = {row.source: Moved(row.source, row.rare) for row in rows}
    kinds: Sequence[type[Correction]] = [kind for name in LISTS for kind in getattr(chosen, name)]
    results |= {kind.__name__: Moved(kind.__name__) for kind in kinds}
    for name, train in trainings.items():
        met: set[str] = set()
        with noting(met):
            with_all = peaks(train)
        left_out = [(row.source, partial(without_row, row)) for row in rows if row.source in met]
        left_out += [(kind.__name__, partial(without_correction, kind)) for kind in kinds]
        for result, leaving_out in left_out:
            results[result].add(with_all, _peaks_without(leaving_out, train), name)
    return sorted(
        results.values(), key=lambda result: (-len(result.fails), -max(result.allocated, default=0))
    )


def _peaks_without(
    leaving_out: Callable[[], AbstractContextManager[None]], train: Callable[[], None]
) -> Peaks | None:
    try:
        with leaving_out():
            return peaks(train)
    except Exception:  # noqa: BLE001  # whatever it is: the training does not run without the correction
        return None


def show(console: Console, names: Sequence[str] = ()) -> None:
    """Print the table for the trainings of these names; all of them without names."""
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    trainings = {name: train for name, train in workloads().items() if not names or name in names}
    table = Table("left out", "allocated", "reserved", f"matters in, of {len(trainings)}", "fails in")
    results = moved(trainings)
    for result in results:
        if result.matters:
            most = [f"{max(shares, default=0):.2f} %" for shares in (result.allocated, result.reserved)]
            table.add_row(result.name, *most, str(result.matters), ", ".join(result.fails[:3]))
    console.print(table)
    tried = [result.name for result in results if result.allocated and not result.matters]
    console.print("Left out without effect: " + "; ".join(tried), highlight=False)
    unmet = [result for result in results if not result.allocated and not result.fails]
    console.print("Rows that no training met, and what needs them:", highlight=False)
    for result in unmet:
        console.print(f"  {result.name}: {result.rare or 'see its operators'}", markup=False, highlight=False)
