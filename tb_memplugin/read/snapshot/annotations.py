"""Read the named ranges (annotations) in a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tb_memplugin.read.snapshot.entries import LATEST_US
from tb_memplugin.read.snapshot.tables import cut
from tb_memplugin.read.tables import Names
from tb_memplugin.trace import Annotations, Events

STAGES = {"START": 0, "END": 1}


@dataclass(frozen=True, slots=True)
class FoundAnnotations:
    """The table of annotations, their names, and how many annotations were left out as invalid."""

    table: Annotations
    names: tuple[str, ...]
    left_out: int


def read_annotations(written: Any, device_rows: dict[int, int], events: Events) -> FoundAnnotations:
    """Return the annotations of all devices, each with the event that it follows.

    Args:
        written: `external_annotations` as PyTorch writes them: name, stage, device, time_us.
        device_rows: the row of each device number.

    Raises:
        TypeError, KeyError: `written` is not a list of dicts, or a field is missing or has a wrong type.
    """
    if written is None:
        written = []
    if not isinstance(written, list):
        raise TypeError(f"external_annotations are {type(written).__name__}")
    placed = [annotation for annotation in written if _fits(annotation, device_rows)]
    names = Names()
    time = np.array([annotation["time_us"] for annotation in placed], np.int64) * 1_000
    order = np.argsort(time, kind="stable")
    device = np.array([device_rows[annotation["device"]] for annotation in placed], np.uint8)[order]
    table = Annotations(
        time_ns=time[order],
        name=names.add_all(cut(annotation["name"]) for annotation in placed)[order].astype(np.int32),
        ends=np.array([STAGES[annotation["stage"]] for annotation in placed], np.uint8)[order],
        device=device,
        event=event_before(time[order], device, sorted(device_rows.values()), events),
    )
    return FoundAnnotations(table, names.as_tuple(), len(written) - len(placed))


def _fits(annotation: dict[str, Any], device_rows: dict[int, int]) -> bool:
    if not isinstance(annotation["name"], str) or type(annotation["time_us"]) is not int:
        raise TypeError("the name or time of an annotation has the wrong type")
    if type(annotation["stage"]) is not str:
        raise TypeError("the stage of an annotation is not a string")
    number = annotation["device"]
    has_device = type(number) is int and number in device_rows
    return has_device and annotation["stage"] in STAGES and 0 <= annotation["time_us"] < LATEST_US


def event_before(time: np.ndarray, device: np.ndarray, rows: Sequence[int], events: Events) -> np.ndarray:
    """Return, for each time and device, the index of the device's last event at or before it, -1 for none."""
    before = np.full(len(time), -1, np.int64)
    for row in rows:
        here, mine = np.flatnonzero(events.device == row), np.flatnonzero(device == row)
        if len(here) and len(mine):
            last = np.searchsorted(events.time_ns[here], time[mine], side="right") - 1
            before[mine] = np.where(last >= 0, here[last.clip(min=0)], -1)
    return before
