"""An estimate for people, through rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tb_memplugin.estimate.estimate_stats import ModuleMemory, TensorCreation
from tb_memplugin.estimate.estimation import Estimate

_MIB = 1 << 20
_ROWS = 30


def print_estimate(estimate: Estimate, out: Console) -> None:
    """The peak, whether it fits, what fills it, the phases, and the notes."""
    out.print(
        f"Peak allocated {_mib(estimate.peak_allocated_bytes)}, "
        f"reserved {_mib(estimate.peak_reserved_bytes)} ({estimate.seconds:.1f} s)",
        markup=False,
    )
    if estimate.fits is not None and estimate.margin_bytes is not None:
        word = "fits" if estimate.fits else "does not fit"
        out.print(f"On {estimate.gpu} it {word}; {_mib(estimate.margin_bytes)} are left.", markup=False)
    parts = Table("at the peak", "MiB", "share")
    for name, size in estimate.breakdown:
        parts.add_row(
            name.replace("_", " "), _mib(size), f"{size / max(estimate.peak_allocated_bytes, 1):.1%}"
        )
    out.print(parts)
    for name, size in estimate.phases:
        out.print(f"phase {name}: peak {_mib(size)}", markup=False)
    for note in estimate.notes:
        out.print(f"note: {note}", markup=False)


def print_modules(modules: Sequence[ModuleMemory], out: Console) -> None:
    """The modules that hold the most at the peak."""
    table = Table("module", "class", "at the peak", "peak meanwhile", "allocated", "allocations")
    order = sorted(modules, key=lambda one: -one.at_peak_bytes)
    for one in order[:_ROWS]:
        table.add_row(
            _plain(one.name),
            _plain(one.class_name),
            _mib(one.at_peak_bytes),
            _mib(one.peak_bytes),
            _mib(one.allocated_bytes),
            f"{one.allocations:,}",
        )
    _print(table, len(order), "modules", out)


def print_tensors(tensors: Sequence[TensorCreation], out: Console) -> None:
    """The operators that asked for the most."""
    table = Table("operator", "tensors", "allocated", "largest", "at the peak")
    for one in tensors[:_ROWS]:
        table.add_row(
            _plain(one.operator),
            f"{one.count:,}",
            _mib(one.bytes),
            _mib(one.largest_bytes),
            _mib(one.at_peak_bytes),
        )
    _print(table, len(tensors), "operators", out)


def _print(table: Table, count: int, what: str, out: Console) -> None:
    out.print(table)
    if count > _ROWS:
        out.print(f"... and {count - _ROWS:,} more {what}", markup=False)


def _plain(name: str) -> str:
    return name.replace("[", r"\[")


def _mib(size: int) -> str:
    return f"{size / _MIB:,.2f} MiB"
