"""Print an estimate on the console with rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tb_memplugin.analysis.units import Unit, size_text
from tb_memplugin.estimate.answer.estimate_stats import ModuleMemory, TensorCreation
from tb_memplugin.estimate.answer.estimation import Estimate

_ROWS = 30


def print_estimate(estimate: Estimate, out: Console) -> None:
    """Print the peak, whether it fits, its parts by category, the phases and the notes."""
    unit = Unit.for_bytes([estimate.peak_reserved_bytes])
    out.print(
        f"Peak allocated {unit.text(estimate.peak_allocated_bytes)}, "
        f"reserved {unit.text(estimate.peak_reserved_bytes)} ({estimate.seconds:.1f} s)",
        markup=False,
    )
    if estimate.fits is not None and estimate.margin_bytes is not None:
        told = size_text(abs(estimate.margin_bytes))
        end = f"it fits; {told} are left" if estimate.fits else f"it does not fit: {told} too much"
        out.print(f"On {estimate.gpu} {end}.", markup=False)
    parts = Table("at the peak", unit.name, "share")
    for name, size in estimate.breakdown:
        parts.add_row(
            name.replace("_", " "), unit.show(size), f"{size / max(estimate.peak_allocated_bytes, 1):.1%}"
        )
    out.print(parts)
    for name, size in estimate.phases:
        out.print(f"phase {name}: peak {unit.text(size)}", markup=False)
    for note in estimate.notes:
        out.print(f"note: {note}", markup=False)


def print_modules(modules: Sequence[ModuleMemory], out: Console) -> None:
    """Print the modules that hold the most memory at the peak."""
    order = sorted(modules, key=lambda one: -one.at_peak_bytes)
    unit = Unit.for_bytes(one.peak_bytes for one in modules)
    table = Table(
        "module",
        "class",
        f"at the peak ({unit.name})",
        f"peak while it ran ({unit.name})",
        f"allocated ({unit.name})",
        "allocations",
    )
    for one in order[:_ROWS]:
        table.add_row(
            _plain(one.name),
            _plain(one.class_name),
            unit.show(one.at_peak_bytes),
            unit.show(one.peak_bytes) if one.peak_bytes else "",
            unit.show(one.allocated_bytes),
            f"{one.allocations:,}",
        )
    _print(table, len(order), "modules", out)


def print_tensors(tensors: Sequence[TensorCreation], out: Console) -> None:
    """Print the operators in the given order, at most 30."""
    unit = Unit.for_bytes(one.bytes for one in tensors)
    table = Table(
        "operator",
        "tensors",
        f"allocated ({unit.name})",
        f"largest ({unit.name})",
        f"at the peak ({unit.name})",
    )
    for one in tensors[:_ROWS]:
        table.add_row(
            _plain(one.operator),
            f"{one.count:,}",
            unit.show(one.bytes),
            unit.show(one.largest_bytes),
            unit.show(one.at_peak_bytes),
        )
    _print(table, len(tensors), "operators", out)


def _print(table: Table, count: int, what: str, out: Console) -> None:
    out.print(table)
    if count > _ROWS:
        out.print(f"... and {count - _ROWS:,} more {what}", markup=False)


def _plain(name: str) -> str:
    return name.replace("[", r"\[")
