"""Print an estimate on the console with rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tb_memplugin.analysis.units import Unit
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
    if estimate.verdict is not None:
        out.print(f"On {estimate.gpu} it {estimate.verdict}, {estimate.margin_text}.", markup=False)
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
    order = sorted(modules, key=lambda module: -module.at_peak_bytes)
    unit = Unit.for_bytes(module.peak_bytes for module in modules)
    table = Table(
        "module",
        "class",
        f"at the peak ({unit.name})",
        f"peak while it ran ({unit.name})",
        f"allocated ({unit.name})",
        "allocations",
    )
    for module in order[:_ROWS]:
        table.add_row(
            _plain(module.name),
            _plain(module.class_name),
            unit.show(module.at_peak_bytes),
            unit.show(module.peak_bytes) if module.peak_bytes else "",
            unit.show(module.allocated_bytes),
            f"{module.allocations:,}",
        )
    _print(table, len(order), "modules", out)


def print_tensors(tensors: Sequence[TensorCreation], out: Console) -> None:
    """Print the operators in the given order, at most 30."""
    unit = Unit.for_bytes(creation.bytes for creation in tensors)
    table = Table(
        "operator",
        "tensors",
        f"allocated ({unit.name})",
        f"largest ({unit.name})",
        f"at the peak ({unit.name})",
    )
    for creation in tensors[:_ROWS]:
        table.add_row(
            _plain(creation.operator),
            f"{creation.count:,}",
            unit.show(creation.bytes),
            unit.show(creation.largest_bytes),
            unit.show(creation.at_peak_bytes),
        )
    _print(table, len(tensors), "operators", out)


def _print(table: Table, count: int, noun: str, out: Console) -> None:
    out.print(table)
    if count > _ROWS:
        out.print(f"... and {count - _ROWS:,} more {noun}", markup=False)


def _plain(name: str) -> str:
    return name.replace("[", r"\[")
