"""The report of an estimate, as tables and as JSON: whether it fits, what uses the memory, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from tb_memplugin.commands.tables import NOT_KNOWN, Unit, console, percent, printable, table

if TYPE_CHECKING:
    from tb_memplugin.estimate.answer.changes import Change, Changes
    from tb_memplugin.estimate.answer.max_batch import MaxBatch
    from tb_memplugin.estimate.answer.step_estimate import StepEstimate

JUST = "just"


@dataclass(frozen=True, slots=True)
class Report:
    """A step's estimate; the largest batch and the changes are None if they were not asked for."""

    step: StepEstimate
    max_batch: MaxBatch | None
    changes: Changes | None


def report_json(report: Report) -> dict[str, Any]:
    """Return a report for JSON; sizes in bytes, times in seconds."""
    step, estimate = report.step, report.step.estimate
    fields: dict[str, Any] = {
        "target": step.target,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "peak_reserved_bytes": estimate.peak_reserved_bytes,
        "fits": estimate.fits,
        "gpu": step.gpu.name,
        "memory_bytes": step.gpu.memory_bytes,
        "margin_bytes": estimate.margin_bytes,
        "workspace_bytes": estimate.workspace_bytes,
        "workload": asdict(step.workload),
        "breakdown": [{"key": key, "bytes": size} for key, size in estimate.breakdown],
        "phases": [{"name": name, "peak_bytes": size} for name, size in estimate.phases],
        "seconds": estimate.seconds,
        "notes": list(step.notes),
    }
    if step.ranks is not None:
        fields["mesh"], fields["worst_rank"] = str(step.ranks.mesh), step.ranks.worst.rank
        fields["ranks"] = [
            {
                "rank": rank.rank,
                "coordinate": list(rank.coordinate),
                "peak_allocated_bytes": rank.estimate.peak_allocated_bytes,
                "peak_reserved_bytes": rank.estimate.peak_reserved_bytes,
            }
            for rank in step.ranks.ranks
        ]
    if report.max_batch is not None:
        fields["max_batch"] = {"batch": report.max_batch.batch, "estimates": report.max_batch.estimates}
    if report.changes is not None:
        fields["changes"] = [asdict(change) for change in report.changes.saving]
        fields["impossible"] = [
            {"options": options, "why": why} for options, why in report.changes.impossible
        ]
    return fields


def show_step(step: StepEstimate) -> None:
    """Print whether the step fits, and what uses the memory."""
    out, estimate, unit = console(), step.estimate, _unit(step)
    for line in _headline(step, unit):
        out.print(printable(line), soft_wrap=True)
    rows = [
        (key, unit.show(size), percent(size, estimate.peak_allocated_bytes))
        for key, size in estimate.breakdown
    ]
    total = sum(size for _, size in estimate.breakdown)
    out.print(
        table(
            ("allocated at the peak", unit.name, "%"),
            [*rows, ("total", unit.show(total), percent(total, estimate.peak_allocated_bytes))],
        )
    )
    phases = [(name, unit.show(size)) for name, size in estimate.phases]
    out.print(table(("phase", f"peak ({unit.name})"), phases))


def show_more(report: Report) -> None:
    """Print the changes that would save memory, the largest batch and the notes, after `show_step`."""
    if report.changes is not None:
        _show_changes(report.changes, _unit(report.step), report.step.gpu.usable_bytes)
    if report.max_batch is not None:
        console().print(printable(_max_batch_line(report.step, report.max_batch)), soft_wrap=True)
    for note in report.step.notes:
        click.echo(f"note: {printable(note)}", err=True)


def _unit(step: StepEstimate) -> Unit:
    return Unit.for_bytes([step.estimate.peak_reserved_bytes])


def _headline(step: StepEstimate, unit: Unit) -> Iterator[str]:
    estimate, room = step.estimate, step.gpu.memory_bytes
    kind = "inference" if step.workload.inference else "training"
    yield f"{step.target}: {', '.join((kind, *_sizes(step)))}"
    if step.ranks is not None:
        worst, tried = step.ranks.worst, [rank.rank for rank in step.ranks.ranks]
        yield f"mesh {step.ranks.mesh}: rank {worst.rank} needs the most memory, of ranks {tried}"
    gpu_unit = Unit.for_bytes([room])
    if estimate.fits is None or estimate.margin_bytes is None:
        yield f"{step.gpu.name}: whether it fits is not known"
    elif estimate.fits:
        spare = gpu_unit.text(max(estimate.margin_bytes, 0))
        yield f"fits {step.gpu.name} ({gpu_unit.text(room)}) with {spare} to spare"
    else:
        missing = gpu_unit.text(abs(estimate.margin_bytes))
        yield f"does not fit {step.gpu.name} ({gpu_unit.text(room)}): {missing} too much"
    yield (
        f"peak {unit.text(estimate.peak_allocated_bytes)} allocated, "
        f"{unit.text(estimate.peak_reserved_bytes)} reserved"
    )


def _sizes(step: StepEstimate) -> Iterator[str]:
    work = step.workload
    for name, value in (("batch", work.batch), ("sequence", work.seq)):
        if value is not None:
            yield f"{name} {value:,}"
    if work.dtype is not None:
        yield work.dtype
    if work.autocast is not None:
        yield f"autocast {work.autocast}"
    if not work.inference:
        yield work.optimizer or "its own optimizer"
    if work.checkpointing:
        yield "checkpointing"


def _show_changes(changes: Changes, unit: Unit, usable_bytes: int) -> None:
    out = console()
    for options, why in changes.impossible:
        click.echo(f"note: not tried: {options}: {printable(why)}", err=True)
    if not changes.saving:
        out.print("None of the changes that were tried saves memory.")
        return
    rows = [
        (
            change.label,
            unit.show(change.saved_bytes),
            unit.show(change.peak_reserved_bytes),
            fits_text(change, usable_bytes),
        )
        for change in changes.saving
    ]
    out.print(table(("change first", f"saves ({unit.name})", "reserved then", "fits"), rows))
    for change in changes.saving:
        if change.label == change.what:
            out.print(printable(f"{change.what}: {change.options}"), soft_wrap=True)
    if any(fits_text(change, usable_bytes) == JUST for change in changes.saving):
        click.echo(
            f"note: {JUST}: the step would reserve more than the GPU has. It fits only because the "
            "allocator frees unused segments when memory runs out, which is slow.",
            err=True,
        )


def fits_text(change: Change, usable_bytes: int) -> str:
    """Return one word for whether a step with a change would fit: yes, just, no, or ? if not known."""
    if change.fits is None:
        return NOT_KNOWN
    if not change.fits:
        return "no"
    return "yes" if change.peak_reserved_bytes <= usable_bytes else JUST


def _max_batch_line(step: StepEstimate, largest: MaxBatch) -> str:
    if not largest.batch:
        return f"Not even a batch of 1 fits {step.gpu.name}."
    return f"The largest batch that fits is {largest.batch:,} ({largest.estimates} estimates)."
