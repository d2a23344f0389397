"""Folding: shorten a summary with very many or very long names without changing its sums."""

from __future__ import annotations

import hashlib

import numpy as np

from tb_memplugin.analysis.module_groups import OTHER_MODULES
from tb_memplugin.proto.summary_pb2 import ModuleTable, Note, Parts, StepSummary
from tb_memplugin.store.summary import Limits
from tb_memplugin.trace import Category

OTHER_OPERATORS = "(other operators)"


def fold(summary: StepSummary, limits: Limits) -> None:
    """Shorten names and merge small rows in place. All sums stay the same; a note describes the changes."""
    changes = [f"names over {limits.text} characters are cut"]
    for device in summary.devices:
        operators = device.peak.by_operator
        if limits.parts and len(operators.keys) > limits.parts:
            count = len(operators.keys)
            changes.append(f"{device.name}: only {limits.parts} of {count} operators have a row")
            _fold_parts(operators, limits.parts)
        rows = len(device.modules.modules)
        if limits.modules and rows > limits.modules:
            changes.append(
                f"{device.name}: only {limits.modules} of {rows} modules have a row; the rest is "
                "counted in their parents"
            )
            _fold_modules(summary, device.modules, limits.modules)
    _drop_unused_modules(summary)
    if limits.text:
        _cut_names(summary, limits.text)
    summary.folded = True
    why = "This summary is shortened, because the step has very many or very long names"
    text = f"{why}: {'; '.join(changes)}. The side file has everything."
    summary.notes.append(Note(text=text, code="summary_shortened"))


def cut(text: str, most: int) -> str:
    """Shorten a long name to its beginning and a hash of the whole, so that it stays unique."""
    if len(text) <= most:
        return text
    return f"{text[: most - 10]}…{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _fold_parts(parts: Parts, keep: int) -> None:
    keys = [*parts.keys[:keep], OTHER_OPERATORS]
    sizes = np.array([*parts.bytes[:keep], sum(parts.bytes[keep:])], np.int64)
    counts = np.array([*parts.counts[:keep], sum(parts.counts[keep:])], np.int64)
    order = np.argsort(-sizes, kind="stable")
    parts.keys[:] = [keys[row] for row in order]
    parts.bytes[:], parts.counts[:] = sizes[order].tolist(), counts[order].tolist()


def _fold_modules(summary: StepSummary, table: ModuleTable, keep: int) -> None:
    """Keep the modules with the most bytes; add the bytes of the others to their nearest kept ancestor.

    Modules are ranked by their bytes including children, so an ancestor is never dropped before its
    descendants. Roots that are not kept share one last row. The other columns already include children,
    so only dropped roots are added to that row.
    """
    own = np.array(table.own, np.int64).reshape(-1, len(Category))
    inclusive, parents = own.sum(axis=1), list(table.parents)
    for row in range(len(parents) - 1, -1, -1):
        if parents[row] >= 0:
            inclusive[parents[row]] += inclusive[row]
    kept = np.sort(np.argsort(-inclusive, kind="stable")[:keep])
    new_row = np.full(len(parents), len(kept))
    new_row[kept] = np.arange(len(kept))
    lost_root = np.zeros(len(parents), bool)
    for row, parent in enumerate(parents):
        if new_row[row] == len(kept) and parent >= 0:
            new_row[row] = new_row[parent]
        elif new_row[row] == len(kept):
            lost_root[row] = True
    merged = np.zeros((len(kept) + 1, len(Category)), np.int64)
    counts = np.zeros(len(kept) + 1, np.int64)
    np.add.at(merged, new_row, own)
    np.add.at(counts, new_row, np.array(table.own_count, np.int64))
    columns = {
        "modules": [*(table.modules[row] for row in kept), len(summary.modules.keys)],
        "parents": [*(int(new_row[parents[row]]) if parents[row] >= 0 else -1 for row in kept), -1],
        "own": merged.ravel().tolist(),
        "own_count": counts.tolist(),
        "peak_inside": [*(table.peak_inside[row] for row in kept), -1],
    }
    for name in ("calls", "allocations", "allocated_bytes", "forward_ns", "backward_ns"):
        values = np.array(getattr(table, name), np.int64)
        columns[name] = [*values[kept].tolist(), int(values[lost_root].sum())]
    for name, column in columns.items():
        getattr(table, name)[:] = column
    summary.modules.keys.append(OTHER_MODULES)
    summary.modules.classes.append(0)


def _drop_unused_modules(summary: StepSummary) -> None:
    """Remove the module keys that no row refers to."""
    columns = [summary.calls.names]
    for device in summary.devices:
        columns += [device.modules.modules, device.peak.largest.modules]
    used = sorted({row for rows in columns for row in rows if row >= 0})
    new_row = {row: number for number, row in enumerate(used)} | {-1: -1}
    for rows in columns:
        rows[:] = [new_row[row] for row in rows]
    modules = summary.modules
    modules.keys[:] = [modules.keys[row] for row in used]
    modules.classes[:] = [modules.classes[row] for row in used]


def _cut_names(summary: StepSummary, most: int) -> None:
    for key, value in summary.properties.items():
        summary.properties[key] = cut(value, 10 * most)
    for note in summary.notes:
        note.text = cut(note.text, 10 * most)
    columns = [summary.modules.keys, summary.modules.class_names]
    for device in summary.devices:
        peak = device.peak
        columns += [peak.by_operator.keys, peak.largest.operators, peak.largest.names, peak.largest.tensors]
        if peak.HasField("operator"):
            peak.operator = cut(peak.operator, most)
        if peak.HasField("module"):
            peak.module = cut(peak.module, most)
    for names in columns:
        names[:] = [cut(name, most) for name in names]
