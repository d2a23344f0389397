"""The tables of docs/design/layers_from_stacks.md: what is inferred, beside what the program knew."""

from __future__ import annotations

import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.layers.distributed import DISTRIBUTED
from benchmarks.layers.odd import ODD
from benchmarks.layers.programs import NEW, PROGRAMS
from benchmarks.layers.unseen import UNSEEN
from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.layers.source_text import NOT_KNOWN
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import Category, Kind, MemoryTrace
from tb_memplugin.trace.tables import NOT_NAMED

PHASES = {
    "F": "forward",
    "R": "recomputed",
    "B": "backward",
    "G": "gradients",
    "P": "parameters",
    "O": "optimizer state",
}
NOT_IN_A_GRAPH = "?"
"""What the truth says of nodes that belong to no module."""


@dataclass
class Shares:
    """Bytes of one phase of one program: in all, with the right module, with a wrong one."""

    total: int = 0
    right: int = 0
    wrong: int = 0

    def text(self) -> str:
        return f"{self.right / self.total:.3f} / {self.wrong / self.total:.3f}" if self.total else "–"


@dataclass
class Answer:
    """One program; `everywhere`, `peak` and, without source texts, `same`, by the truth's first letter.

    `stated` has the named bytes by letter and confidence in percent.
    """

    name: str
    load_s: float
    infer_s: float
    everywhere: dict[str, Shares]
    peak: dict[str, Shares]
    same: dict[str, Shares] = field(default_factory=dict)
    stated: dict[tuple[str, int], Shares] = field(default_factory=dict)


def compare(folder: Path, chosen: list[str]) -> None:
    """Print the tables for the programs that were recorded in a folder."""
    every: list[Answer] = []
    groups = {"Looked at": PROGRAMS, "New": NEW, "Unseen": UNSEEN, "Odd": ODD, "Distributed": DISTRIBUTED}
    for title, programs in groups.items():
        names = [name for name in programs if not chosen or name in chosen]
        answers = [
            answer(folder / f"{name}.pickle") for name in names if (folder / f"{name}.pickle").exists()
        ]
        if answers:
            print(f"\n{title}, {len(answers)} programs\n")
            print("\n".join(table(answers)))
        every += answers
    print("\nConfidence, all programs\n")
    print("\n".join(calibration(every)))


def answer(path: Path) -> Answer:
    # Our own recordings, which no one else wrote.
    snapshot, truths = pickle.loads(path.read_bytes())  # noqa: S301
    began = time.perf_counter()
    trace = trace_from_snapshot(snapshot, path.stem)
    loaded = time.perf_counter()
    inferred = with_inferred_layers(trace)
    len(inferred.modules)  # they are inferred now
    ended = time.perf_counter()
    events = [at for at, truth in enumerate(truths) if _counts(trace, at, truth)]
    blocks = trace.allocations
    alive = {int(at) for at in blocks.born[blocks.alive_at(int(np.argmax(trace.live(0))) - 1, 0)]}
    return Answer(
        path.stem,
        loaded - began,
        ended - loaded,
        shares(inferred, truths, events),
        shares(inferred, truths, [at for at in events if at in alive]),
        partition(with_inferred_layers(trace, read_text=False), truths, events),
        by_confidence(inferred, truths, events),
    )


def _counts(trace: MemoryTrace, event: int, truth: str) -> bool:
    """Whether an event allocates for a module, and the truth knows for which.

    Workspaces of libraries are everybody's. What FSDP2 gathers and reduces in backward it does ahead or
    later, within a node of another module.
    """
    if trace.events.kind[event] != Kind.ALLOC or truth[1:] == NOT_IN_A_GRAPH or not truth:
        return False
    category = trace.events.category[event]
    is_ahead = category == Category.COMMUNICATION and truth[0] == "B"
    return bool(category != Category.WORKSPACE and not is_ahead)


def _named(trace: MemoryTrace, event: int) -> str | None:
    """Return the inferred module of an event; None if it, or a part of its name, is not known.

    A colon says that a part is the line of a call, without a text.
    """
    key = trace.modules[int(trace.events.module[event])].key
    return None if key == NOT_NAMED or NOT_KNOWN in key or ":" in key else key


def shares(trace: MemoryTrace, truths: list[str], events: Iterable[int]) -> dict[str, Shares]:
    by_phase: dict[str, Shares] = defaultdict(Shares)
    for event in events:
        of_phase, size = by_phase[truths[event][0]], int(trace.events.bytes[event])
        of_phase.total += size
        named = _named(trace, event)
        if named is not None:
            of_phase.right += size * (named == truths[event][1:])
            of_phase.wrong += size * (named != truths[event][1:])
    return by_phase


def by_confidence(
    trace: MemoryTrace, truths: list[str], events: Iterable[int]
) -> dict[tuple[str, int], Shares]:
    """Return the named bytes, by the truth's first letter and the confidence that is stated, in percent."""
    stated: dict[tuple[str, int], Shares] = defaultdict(Shares)
    for event in events:
        key = truths[event][0], int(trace.events.module_confidence[event])
        for shares_of_event in shares(trace, truths, [event]).values():
            stated[key].total += shares_of_event.right + shares_of_event.wrong
            stated[key].right += shares_of_event.right
    return stated


def calibration(answers: list[Answer]) -> Iterable[str]:
    """Yield a table in Markdown: what is stated, and the share of the named bytes that has the right name.

    Programs count alike: of each, the named bytes of a row are divided by all of that phase.
    """
    weight: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in answers:
        for key, stated in each.stated.items():
            weight[key][0] += stated.right / each.everywhere[key[0]].total
            weight[key][1] += stated.total / each.everywhere[key[0]].total
    yield "| phase | stated, % | right, % | programs' bytes |"
    yield "|---|---:|---:|---:|"
    for (letter, percent), (right, named) in sorted(weight.items(), key=lambda item: item[0]):
        if named:
            yield f"| {PHASES[letter]} | {percent} | {100 * right / named:.2f} | {named:.2f} |"


def partition(trace: MemoryTrace, truths: list[str], events: Iterable[int]) -> dict[str, Shares]:
    """Return the shares if each inferred module had the name that fits its forward best, each name once."""
    overlap: dict[tuple[int, str], int] = defaultdict(int)
    by_phase: dict[str, Shares] = defaultdict(Shares)
    rows = trace.events.module
    for event in events:
        if rows[event] and truths[event][0] in "FR":
            overlap[int(rows[event]), truths[event][1:]] += int(trace.events.bytes[event])
    best: dict[int, str] = {}
    for (row, fqn), _ in sorted(overlap.items(), key=lambda item: -item[1]):
        if row not in best and fqn not in best.values():
            best[row] = fqn
    for event in events:
        of_phase, size, row = by_phase[truths[event][0]], int(trace.events.bytes[event]), int(rows[event])
        of_phase.total += size
        if row and NOT_KNOWN not in trace.modules[row].key:
            of_phase.right += size * (best.get(row) == truths[event][1:])
            of_phase.wrong += size * (best.get(row) != truths[event][1:])
    return by_phase


def table(answers: list[Answer]) -> Iterable[str]:
    """Yield the rows of a table in Markdown: right / wrong, as shares of bytes; the rest is not named."""
    without = "forward, no texts | parameters, no texts"
    yield f"| program | {' | '.join(PHASES.values())} | at the peak | {without} | load, infer (s) |"
    yield "|---" * (len(PHASES) + 5) + "|"
    for one in answers:
        cells = [one.everywhere.get(letter, Shares()).text() for letter in PHASES]
        peak = Shares(
            *(sum(getattr(s, key) for s in one.peak.values()) for key in ("total", "right", "wrong"))
        )
        forward, moved = (one.same.get(letter, Shares()).text() for letter in "FP")
        times = f"{one.load_s:.2f}, {one.infer_s:.2f}"
        yield f"| {one.name} | {' | '.join(cells)} | {peak.text()} | {forward} | {moved} | {times} |"
    medians = [_median(answers, letter) for letter in PHASES]
    yield f"| **median** | {' | '.join(medians)} | | | | |"


def _median(answers: list[Answer], letter: str) -> str:
    found = [one.everywhere[letter] for one in answers if one.everywhere.get(letter, Shares()).total]
    if not found:
        return "–"
    right, wrong = ([getattr(s, key) / s.total for s in found] for key in ("right", "wrong"))
    return f"{statistics.median(right):.3f} / {statistics.median(wrong):.3f}"
