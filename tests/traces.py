"""Tiny traces, a line an event, with numbers that a person can add up.

    trace("start 400 w category=parameter module=layer", "step 5", "alloc 100 a module=layer", "free a")

Events are a microsecond apart; the window begins at `EPOCH`, half a microsecond before the first.
"""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

import numpy as np

from tb_memplugin.trace import (
    Category,
    Device,
    Kind,
    MemoryTrace,
    Module,
    Phase,
    Reason,
    Spans,
    Step,
    events,
    start_state,
)

START_COLUMNS = ("bytes", "device", "address", "category", "reason", "module", "label")
EPOCH = 1_763_000_000_000_000_000
MICROSECOND = 1_000

CUDA_CAPACITY = 1 << 20


def trace(*lines: str, calls: list[tuple[Any, ...]] | None = None, **fields: Any) -> MemoryTrace:
    """A trace from lines: `start|alloc BYTES NAME [key=value…]`, `free NAME`, `step NUMBER`.

    Keys: module, category, reason, phase, operator, device, label, reserved. `calls` are (module, first
    event, last event, phase): spans from just before the one to just after the other. Phases follow from the
    events. Other `fields` go to the trace as they are.
    """
    return _Builder(calls or []).build(lines, fields)


class _Builder:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls
        self.modules: dict[str, int] = {}
        self.operators: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.devices: dict[str, int] = {}
        self.live: dict[str, tuple[int, int, str]] = {}
        self.rows: list[dict[str, int]] = []
        self.start: list[dict[str, int]] = []
        self.steps: list[tuple[int, int]] = []

    def build(self, lines: tuple[str, ...], fields: dict[str, Any]) -> MemoryTrace:
        for line in lines:
            self._read(line)
        if not self.steps:
            self.steps = [(0, 0)]
        if not self.devices:
            self.devices = {"cpu": 0}
        columns = {name: [row[name] for row in self.rows] for name in self.rows[0]} if self.rows else {}
        time = EPOCH + MICROSECOND // 2 + MICROSECOND * np.arange(len(self.rows))
        modules = self._modules()
        start = {name: [row[name] for row in self.start] for name in START_COLUMNS}
        return MemoryTrace(
            source="test",
            events=events(time, **columns),
            start=start_state(start.pop("bytes"), **start),
            devices=tuple(Device(name, None if name == "cpu" else CUDA_CAPACITY) for name in self.devices),
            steps=self._steps(),
            operators=tuple(self.operators),
            modules=modules,
            labels=tuple(self.labels),
            phases=self._phases(),
            calls=self._calls(),
            **fields,
        )

    def _read(self, line: str) -> None:
        word, *rest = line.split(" ")
        if word == "step":
            self.steps.append((int(rest[0]), len(self.rows)))
        elif word == "free":
            size, address, device = self.live.pop(rest[0])
            options = _options(rest[1:])
            self.rows.append(self._row(Kind.FREE_COMPLETED, size, address, {"device": device, **options}))
        else:
            size, name, options = int(rest[0]), rest[1], _options(rest[2:])
            address = 0x1000 * (1 + len(self.rows) + len(self.start))
            self.live[name] = (size, address, options.get("device", "cpu"))
            row = self._row(Kind.ALLOC, size, address, options)
            (self.start if word == "start" else self.rows).append(row)

    def _row(self, kind: Kind, size: int, address: int, options: dict[str, str]) -> dict[str, int]:
        return {
            "kind": kind,
            "bytes": size,
            "address": address,
            "device": _place(self.devices, options.get("device", "cpu")),
            "operator": _place(self.operators, options.get("operator")),
            "module": self._module(options.get("module")),
            "label": _place(self.labels, options.get("label")),
            "phase": Phase[options.get("phase", "other").upper()],
            "category": Category[options.get("category", "unknown").upper()],
            "reason": Reason[options.get("reason", "not_recorded").upper()],
            "reserved": int(options.get("reserved", -1)),
        }

    def _module(self, key: str | None) -> int:
        if key:
            self._module(key.rpartition(".")[0] or None)
        return _place(self.modules, key)

    def _modules(self) -> tuple[Module, ...]:
        for module, *_ in self.calls:
            self._module(module)
        return tuple(
            Module(key, self.modules.get(key.rpartition(".")[0], -1) if key else -1, "Layer")
            for key in self.modules
        )

    def _steps(self) -> tuple[Step, ...]:
        firsts = [first for _, first in self.steps] + [len(self.rows)]
        return tuple(
            Step(
                number,
                EPOCH + MICROSECOND * firsts[row],
                EPOCH + MICROSECOND * max(firsts[row + 1], firsts[row] + 1),
            )
            for row, (number, _) in enumerate(self.steps)
        )

    def _phases(self) -> Spans:
        spans: list[list[int]] = []
        for number, row in enumerate(self.rows):
            if row["phase"] == Phase.OTHER:
                continue
            if spans and spans[-1][1] == number and spans[-1][2] == row["phase"]:
                spans[-1][1] = number + 1
            else:
                spans.append([number, number + 1, row["phase"], 0, row["phase"]])
        return _spans(spans)

    def _calls(self) -> Spans:
        rows = [
            [first, last + 1, self.modules[module], module.count(".") if module else 0, Phase[phase.upper()]]
            for module, first, last, phase in self.calls
        ]
        return _spans(sorted(rows))


def _spans(rows: list[list[int]]) -> Spans:
    if not rows:
        return Spans()
    start, end, name, depth, phase = np.array(rows, np.int64).T
    return Spans(
        EPOCH + MICROSECOND * start,
        EPOCH + MICROSECOND * end,
        name.astype(np.int32),
        depth.astype(np.int32),
        phase.astype(np.uint8),
    )


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _place(table: dict[str, int], key: str | None) -> int:
    return -1 if key is None else table.setdefault(key, len(table))


def same(a: MemoryTrace, b: MemoryTrace) -> bool:
    """Whether two traces are equal in every column, dtype, table and name."""
    tables = ("events", "start", "phases", "calls", "segments", "annotations")
    columns = [(getattr(a, t), getattr(b, t), f) for t in tables for f in getattr(a, t).__slots__]
    names = [field.name for field in fields_of(a) if field.name not in tables]
    return all(
        getattr(x, f).dtype == getattr(y, f).dtype and np.array_equal(getattr(x, f), getattr(y, f))
        for x, y, f in columns
    ) and all(getattr(a, name) == getattr(b, name) for name in names)
