"""The console output for one iteration: totals, then weights and their gradients side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tb_memplugin.analysis.units import size_text
from tb_memplugin.exports.terminal import printable
from tb_memplugin.record.iterations.figures import IterationMemory, TracedMemory
from tb_memplugin.record.iterations.weights import WeightMemory

UNKNOWN = "not known"
_LONGEST = 120


def show(memory: IterationMemory, console: Console, max_weights: int, notes: Sequence[str] = ()) -> None:
    """Print an iteration.

    Args:
        memory: the iteration.
        console: where to print.
        max_weights: how many of the largest weights to show, in the model's order; the others share one row.
        notes: the notes to print.
    """
    head = f"Iteration {memory.iteration} of epoch {memory.epoch}, {', '.join(memory.devices)}"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(_totals(memory))
    if memory.weights:
        console.print(_weights(memory, max_weights))
    if memory.traced is not None:
        console.print(Text(_at_peak(memory.traced)))
    for note in notes:
        console.print(Text(f"note: {printable(note)}", style="dim"))
    console.print()


def size(count: int | None) -> str:
    """Return bytes as text: `48 B`, `12.50 MiB`; `UNKNOWN` for None."""
    return UNKNOWN if count is None else size_text(count)


def _peak(count: int | None, is_exact: bool) -> str:
    return size(count) if is_exact or count is None else f"≥ {size(count)}"


def _totals(memory: IterationMemory) -> Table:
    table = _table("", "peak", "now")
    cached = "cached" if memory.has_cache else "cached (no cache on this device: same as allocated)"
    rows: Sequence[tuple[str, str, str]] = (
        (cached, _peak(memory.peak_cached_bytes, memory.cached_is_exact), size(memory.cached_bytes)),
        (
            "allocated",
            _peak(memory.peak_allocated_bytes, memory.allocated_is_exact),
            size(memory.allocated_bytes),
        ),
        ("feature maps", size(memory.feature_map_bytes), ""),
        ("intermediate gradients", size(memory.intermediate_gradient_bytes), ""),
        ("weights", "", size(memory.weight_bytes)),
        ("weight gradients", "", size(memory.gradient_bytes)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _weights(memory: IterationMemory, most: int) -> Table:
    table = _table("weight", "bytes", "gradient")
    largest = sorted(memory.weights, key=lambda weight: -max(weight.bytes, weight.gradient_bytes))[:most]
    shown = {weight.name for weight in largest}
    rest = [weight for weight in memory.weights if weight.name not in shown]
    for weight in memory.weights:
        if weight.name in shown:
            table.add_row(
                Text(printable(_name(weight), _LONGEST)), size(weight.bytes), size(weight.gradient_bytes)
            )
    if rest:
        sums = sum(weight.bytes for weight in rest), sum(weight.gradient_bytes for weight in rest)
        table.add_row(f"{len(rest):,} smaller weights", *map(size, sums))
    return table


def _name(weight: WeightMemory) -> str:
    return weight.name if not weight.aliases else f"{weight.name} (also {', '.join(weight.aliases)})"


def _at_peak(traced: TracedMemory) -> str:
    parts = sorted(traced.at_peak.items(), key=lambda part: -part[1])
    breakdown = ", ".join(f"{name} {size(count)}" for name, count in parts if count)
    return f"at the peak of {size(traced.peak_bytes)} in tensors: {breakdown or 'nothing'}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=bool(number))
    return table
