"""speedscope: live memory at the peak by call stack, as a flame graph for www.speedscope.app.

Schema: https://www.speedscope.app/file-format-schema.json. Each device is a "sampled" profile, with bytes as
weights.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from tb_memplugin.analysis.source_lines import NO_STACK
from tb_memplugin.analysis.sums import sums
from tb_memplugin.exports.output import replacing, written_by
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Int64

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

Frame = dict[str, Any]
Path = tuple[str, ...]


def write(trace: MemoryTrace, path: str | os.PathLike[str], title: str) -> None:
    """Write one profile per device; its samples sum to the device's peak.

    A block without a call stack is placed under its modules, operator, name and category instead. The tensor
    in a block is its innermost frame, where that is known.

    Raises:
        MemPluginError: the file cannot be written.
    """
    with replacing(path) as stream:
        stream.write(json.dumps(document(trace, title), separators=(",", ":")).encode("ascii"))


def document(trace: MemoryTrace, title: str) -> dict[str, Any]:
    """Return the file's content. speedscope shows `title` above the graph."""
    frames = _Frames()
    profiles = [_profile(trace, row, frames) for row in range(len(trace.devices)) if trace.is_used(row)]
    peaks = [profile["endValue"] for profile in profiles]
    return {
        "$schema": SCHEMA,
        "exporter": written_by(),
        "name": title,
        "activeProfileIndex": peaks.index(max(peaks)) if peaks else 0,
        "shared": {"frames": frames.written},
        "profiles": profiles,
    }


class _Frames:
    """The table of frames to which samples refer; each frame occurs once."""

    def __init__(self) -> None:
        self.written: list[Frame] = []
        self._rows: dict[str, int] = {}

    def row(self, text: str, is_frame: bool) -> int:
        """Return the row of a frame: of a call stack if `is_frame`, else of a plain name."""
        row = self._rows.get(text)
        if row is None:
            row = self._rows[text] = len(self.written)
            self.written.append(_frame(text) if is_frame else {"name": text})
        return row


def _frame(text: str) -> Frame:
    frame = read_frame(text)
    name = f"{frame.function} [fx {frame.fx}]" if frame.fx else frame.function
    fields: Frame = {"name": name or "(unknown)"}
    if frame.file and frame.file != "??":
        fields["file"] = frame.file
    if frame.line > 0:
        fields["line"] = frame.line
    return fields


def _profile(trace: MemoryTrace, device: int, frames: _Frames) -> dict[str, Any]:
    live = trace.live(device)
    event = int(np.argmax(live)) - 1
    weights: dict[tuple[int, ...], int] = {}
    for sample, size in _samples(trace, trace.allocations.alive_at(event, device), frames):
        weights[sample] = weights.get(sample, 0) + size
    # Sorted, so that samples with the same outermost frames also form one bar in the "Time Order" view.
    ordered = sorted(weights.items())
    return {
        "type": "sampled",
        "name": f"{trace.devices[device].name}, live at the peak (event {event})",
        "unit": "bytes",
        "startValue": 0,
        "endValue": int(live[event + 1]),
        "samples": [list(sample) for sample, _ in ordered],
        "weights": [size for _, size in ordered],
    }


def _samples(trace: MemoryTrace, rows: np.ndarray, frames: _Frames) -> list[tuple[tuple[int, ...], int]]:
    """Return the different stacks of some allocations, outermost frame first, and the bytes of each."""
    blocks = trace.allocations
    stack = blocks.stack[rows]
    with_stack = rows[stack >= 0]
    different, size = _grouped(trace, with_stack, blocks.stack[with_stack])
    named = [
        (
            (
                *(frames.row(text, True) for text in reversed(trace.stacks[row])),
                *(frames.row(name, False) for name in _tensor(trace, tensor)),
            ),
            total,
        )
        for (row, tensor), total in zip(different, size, strict=True)
    ]
    return named + _without_stack(trace, rows[stack < 0], frames)


def _grouped(trace: MemoryTrace, rows: np.ndarray, *columns: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """Return the different values of some columns of allocations and of their tensor, and their bytes."""
    key: Int64 = np.stack((*columns, trace.allocations.tensor[rows]), axis=1).astype(np.int64)
    different, group = np.unique(key, axis=0, return_inverse=True)
    size = sums(group.ravel().astype(np.int64), trace.allocations.bytes[rows], len(different))
    return different.tolist(), size.tolist()


def _without_stack(
    trace: MemoryTrace, rows: np.ndarray, frames: _Frames
) -> list[tuple[tuple[int, ...], int]]:
    blocks = trace.allocations
    owner = (blocks.module[rows], blocks.operator[rows], blocks.label[rows], blocks.category[rows])
    return [
        (tuple(frames.row(name, False) for name in _names(trace, *key)), total)
        for key, total in zip(*_grouped(trace, rows, *owner), strict=True)
    ]


def _tensor(trace: MemoryTrace, tensor: int) -> Path:
    return (str(trace.tensors[tensor]),) if tensor >= 0 else ()


def _names(trace: MemoryTrace, module: int, operator: int, label: int, category: int, tensor: int) -> Path:
    names = [*_tensor(trace, tensor), Category(category).key]
    if label >= 0:
        names.append(trace.labels[label])
    if operator >= 0:
        names.append(trace.operators[operator])
    while module >= 0:
        names.append(trace.modules[module].name)
        module = trace.modules[module].parent
    return (NO_STACK, *reversed(names))
