"""`modules`: the tree of modules at the step's peak."""

from __future__ import annotations

from typing import Literal, TypedDict

import numpy as np

from tb_memplugin.analysis.module_groups import OTHER_MODULES
from tb_memplugin.analysis.modules import module_table
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import DeviceSummary, StepSummary
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Chosen, Opened, Session
from tb_memplugin.server.shapes import CATEGORIES
from tb_memplugin.store.reader import category_bytes, module_keys
from tb_memplugin.trace.tables import NOT_NAMED, Int64, Module

ModuleKind = Literal["module", "outside", "unnamed"]


class HighestCall(TypedDict):
    """Of the calls of a module and those inside it, the one with the device's highest live bytes."""

    bytes: int
    """The highest live bytes on the device during this call."""
    start_ns: int
    end_ns: int
    """When it ran."""


class ModuleHighest(TypedDict):
    """What a module holds at its highest, and what is highest while it runs."""

    highest: dict[str, int] | None
    """The inclusive bytes at the module's own highest moment in the step; null without the side file. Modules
    have different moments, so their rows do not add up."""
    highest_ns: int | None
    """When that was: the first of several moments, at the earliest the start of the step. Or null."""
    highest_in_forward: HighestCall | None
    highest_in_backward: HighestCall | None
    """Null if no such call began in the step, and without the side file."""


class ModuleRow(ModuleHighest):
    """A module. Where bytes are by category, there are no zeros."""

    id: int
    parent: int | None
    """The place of the row and that of its parent, or null."""
    key: str
    name: str
    """Its name, and the last part of it."""
    depth: int
    """How many rows are above it."""
    class_name: str | None
    """Or null."""
    kind: ModuleKind
    """`outside`: no module; `unnamed`: no known owner."""
    own: dict[str, int]
    inclusive: dict[str, int]
    """Bytes by category, without and with its children."""
    own_bytes: int
    inclusive_bytes: int
    """Their sums."""
    peak_inside_bytes: int | None
    """The highest live bytes on the device while a call of it ran, or null."""
    calls: int
    allocations: int
    allocated_bytes: int
    forward_ns: int
    backward_ns: int
    """In the step."""


class ModulesAnswer(TypedDict):
    """The tree of modules at a step's peak."""

    peak_bytes: int
    """The peak."""
    rows: list[ModuleRow]
    """Parents before children. The `inclusive_bytes` of the rows without a parent sum to `peak_bytes`."""


def answer(session: Session, request: Request) -> ModulesAnswer:
    """Answer from the summary; what is highest needs the side file, and is null without it."""
    chosen = session.chosen(request)
    summary, device = session.device_summary(request, chosen)
    return {
        "peak_bytes": device.peak.bytes,
        "rows": _rows(summary, device, _highest(session, chosen, device)),
    }


NOT_KNOWN: ModuleHighest = {
    "highest": None,
    "highest_ns": None,
    "highest_in_forward": None,
    "highest_in_backward": None,
}


def _highest(session: Session, chosen: Chosen, device: DeviceSummary) -> list[ModuleHighest] | None:
    try:
        opened = session.opened(chosen)
    except UnreadableFileError:
        return None
    trace = opened.trace
    table = module_table(trace, opened.device, opened.step, device.stats.peak_event, with_highest=True)
    if table.highest is None or table.highest_event is None or len(table.rows) != len(device.modules.modules):
        return None
    start = trace.steps[opened.step].start_ns - opened.epoch_ns
    return [
        {
            "highest": category_bytes(table.highest[row].tolist()),
            "highest_ns": max(start, opened.time_ns(int(table.highest_event[row]))),
            "highest_in_forward": _call(opened, int(table.inside_call[row, 0]), int(table.inside[row, 0])),
            "highest_in_backward": _call(opened, int(table.inside_call[row, 1]), int(table.inside[row, 1])),
        }
        for row in range(len(table.rows))
    ]


def _call(opened: Opened, call: int, size: int) -> HighestCall | None:
    if call < 0:
        return None
    calls = opened.trace.calls
    start, end = int(calls.start_ns[call]), int(calls.end_ns[call])
    return {"bytes": size, "start_ns": start - opened.epoch_ns, "end_ns": end - opened.epoch_ns}


def _rows(
    summary: StepSummary, device: DeviceSummary, highest: list[ModuleHighest] | None
) -> list[ModuleRow]:
    table = device.modules
    keys = module_keys(summary, table.modules)
    classes = ["", *summary.modules.class_names]
    own = np.array(table.own, np.int64).reshape(-1, len(CATEGORIES))
    inclusive, depth = _inclusive(own, list(table.parents)), _depths(list(table.parents))
    rows: list[ModuleRow] = []
    for row, (module, parent) in enumerate(zip(table.modules, table.parents, strict=True)):
        key = keys[row]
        class_name = classes[summary.modules.classes[module]] if module >= 0 else ""
        above = keys[parent] if parent >= 0 else None
        rows.append(
            {
                "id": row,
                "parent": parent if parent >= 0 else None,
                "key": key,
                "name": _name(key, above, class_name),
                "depth": depth[row],
                "class_name": class_name or None,
                "kind": _kind(key),
                "own": category_bytes(own[row].tolist()),
                "inclusive": category_bytes(inclusive[row].tolist()),
                "own_bytes": int(own[row].sum()),
                "inclusive_bytes": int(inclusive[row].sum()),
                **(highest[row] if highest is not None else NOT_KNOWN),
                "peak_inside_bytes": table.peak_inside[row] if table.peak_inside[row] >= 0 else None,
                "calls": table.calls[row],
                "allocations": table.allocations[row],
                "allocated_bytes": table.allocated_bytes[row],
                "forward_ns": table.forward_ns[row],
                "backward_ns": table.backward_ns[row],
            }
        )
    return rows


def _kind(key: str) -> ModuleKind:
    if key == NOT_NAMED:
        return "unnamed"
    return "module" if Module(key).is_module and key != OTHER_MODULES else "outside"


def _inclusive(own: Int64, parents: list[int]) -> Int64:
    total: Int64 = own.copy()
    for row in range(len(parents) - 1, -1, -1):
        if parents[row] >= 0:
            total[parents[row]] += total[row]
    return total


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _name(key: str, above: str | None, class_name: str) -> str:
    """Return the last part of a key, without its parent's key."""
    if key == "":
        return class_name or "(root)"
    return key.removeprefix(f"{above}.") if above else key
