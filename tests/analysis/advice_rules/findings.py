"""Findings and reasons of small histories that a person can work out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tb_memplugin.analysis import Finding, advice
from tb_memplugin.trace import MemoryTrace


def found(history: MemoryTrace, kind: str) -> Finding:
    (finding,) = [one for one in advice(history).findings if one.kind == kind]
    return finding


def why(history: MemoryTrace, kind: str, device: str | None = None) -> str:
    told, reason = verdict(history, kind, device)
    assert told != "found"
    return reason


def stacked(history: MemoryTrace, *stacks: tuple[str, ...], start: tuple[int, ...] = ()) -> MemoryTrace:
    """The history with the n-th stack for its n-th allocation, and rows of them for its start state."""
    rows = np.full(len(history.events), -1, np.int32)
    allocs = np.flatnonzero(history.events.kind == 0)
    rows[allocs] = np.arange(len(allocs)) % len(stacks)
    begin = history.start
    if start:
        begin = replace(begin, stack=np.array(start, np.int32))
    return replace(history, events=replace(history.events, stack=rows), start=begin, stacks=stacks)


CALL_OF_MODULE = "_call_impl torch/nn/modules/module.py:9"


def layers(*lines: str, count: int) -> list[str]:
    return [line.replace("#", str(layer)) for layer in range(count) for line in lines]


MODEL, COPY = ("to model.py:5",), ("deepcopy train.py:9",)

STEPPED = ("alloc 7 t phase=optimizer", "free t")


def verdict(history: MemoryTrace, kind: str, device: str | None = None) -> tuple[str, str]:
    (judgement,) = [one for one in advice(history, device).judgements if one.kind == kind]
    return judgement.verdict, judgement.why


def evidence(finding: Finding) -> list[tuple[str, int]]:
    return [(row.what, row.bytes) for row in finding.evidence]
