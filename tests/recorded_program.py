"""Tiny traces of a program whose call stacks and annotations were recorded, a line an event.

    program(
        "before 400 w",
        "START Optimizer.step#AdamW.step",
        "alloc 100 m at=step",
        "free m",
        stacks={"step": ("step /p/torch/optim/adamw.py:9", "<module> train.py:3")},
    )

`before` is a block from before the trace. Options: at, forward (names of stacks), context, pool, stream,
label, device (a number). An annotation stands behind the event before it. Events are a microsecond apart.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from tb_memplugin.trace import (
    Annotations,
    Category,
    Device,
    Kind,
    MemoryTrace,
    Module,
    Step,
    events,
    start_state,
)
from tb_memplugin.trace.tables import NOT_NAMED
from tests.traces import EPOCH, MICROSECOND

STAGES = {"START": 0, "END": 1}
POOLS = ((0, 0), (7, 1))
STREAMS = (0, 0xABC0)
Stacks = Mapping[str, tuple[str, ...]]


def program(*lines: str, stacks: Stacks | None = None, **fields: Any) -> MemoryTrace:
    """A trace: `before|alloc BYTES NAME [key=value]`, `free NAME`, `oom BYTES`, `START|END NAME` a line."""
    return _Program(stacks or {}).build(lines, fields)


class _Program:
    def __init__(self, stacks: Stacks) -> None:
        self.stacks = stacks
        self.tables: dict[str, dict[str, int]] = {"context": {}, "label": {}, "annotation": {}}
        self.live: dict[str, dict[str, int]] = {}
        self.start: list[dict[str, int]] = []
        self.rows: list[dict[str, int]] = []
        self.annotations: list[dict[str, int]] = []
        self.addresses: dict[str, int] = {}

    def build(self, lines: tuple[str, ...], fields: dict[str, Any]) -> MemoryTrace:
        for line in lines:
            self._read(*shlex.split(line))
        devices = 1 + max((row["device"] for row in (*self.rows, *self.start)), default=0)
        time = EPOCH + MICROSECOND * np.arange(len(self.rows))
        columns = {name: [row[name] for row in self.rows] for name in (self.rows or [{}])[0]}
        start = ("bytes", "device", "address", "stack", "stream", "pool", "label", "category")
        before = {name: [row[name] for row in self.start] for name in start}
        made = {
            "source": "test",
            "events": events(time, **columns),
            "start": start_state(before.pop("bytes"), **before),
            "devices": tuple(Device(f"cuda:{row}") for row in range(devices)),
            "steps": (Step(0, EPOCH, EPOCH + MICROSECOND * max(len(self.rows), 1)),),
            "modules": (Module(NOT_NAMED),),
            "stacks": tuple(self.stacks.values()),
            "annotations": self._annotations(time),
            "annotation_names": tuple(self.tables["annotation"]),
            "contexts": tuple(self.tables["context"]),
            "labels": tuple(self.tables["label"]),
            "pools": POOLS,
            "streams": STREAMS,
        }
        return MemoryTrace(**{**made, **fields})

    def _read(self, word: str, *rest: str) -> None:
        options = dict(text.split("=", 1) for text in rest if "=" in text and word not in STAGES)
        plain = [text for text in rest if text not in {f"{key}={value}" for key, value in options.items()}]
        if word in STAGES:
            self._annotate(word, plain)
        elif word == "free":
            block = self.live.pop(plain[0])
            self.rows.append({**block, "kind": Kind.FREE_COMPLETED, "stack": self._stack(options.get("at"))})
        else:
            name = plain[1] if len(plain) > 1 else "-"
            address = self.addresses.setdefault(name, 0x1000 * (1 + len(self.addresses)))
            kind = Kind.OOM if word == "oom" else Kind.ALLOC
            row = self._row(kind, int(plain[0]), 0 if word == "oom" else address, options)
            self.live[name] = row
            (self.start if word == "before" else self.rows).append(row)

    def _row(self, kind: Kind, size: int, address: int, options: dict[str, str]) -> dict[str, int]:
        return {
            "kind": kind,
            "bytes": size,
            "address": address,
            "device": int(options.get("device", 0)),
            "stack": self._stack(options.get("at")),
            "forward": self._stack(options.get("forward")),
            "stream": int(options.get("stream", 0)),
            "pool": int(options.get("pool", 0)),
            "context": self._place("context", options.get("context")),
            "label": self._place("label", options.get("label")),
            "category": Category[options.get("category", "unknown").upper()],
        }

    def _stack(self, name: str | None) -> int:
        return -1 if name is None else list(self.stacks).index(name)

    def _place(self, table: str, text: str | None) -> int:
        return -1 if text is None else self.tables[table].setdefault(text, len(self.tables[table]))

    def _annotate(self, word: str, rest: list[str]) -> None:
        device = next((int(text[7:]) for text in rest if text.startswith("device=")), 0)
        mine = [row for row, event in enumerate(self.rows) if event["device"] == device]
        self.annotations.append(
            {
                "name": self._place("annotation", rest[0]),
                "ends": STAGES[word],
                "device": device,
                "event": mine[-1] if mine else -1,
                "after": len(self.rows),
            }
        )

    def _annotations(self, time: np.ndarray) -> Annotations:
        after = np.array([row["after"] for row in self.annotations], np.int64)
        columns = {
            name: np.array([row[name] for row in self.annotations], getattr(Annotations(), name).dtype)
            for name in ("name", "ends", "device", "event")
        }
        return Annotations(time_ns=EPOCH + MICROSECOND * after - MICROSECOND // 2, **columns)
