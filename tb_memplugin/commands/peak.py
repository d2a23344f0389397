"""`tb-memplugin peak`: what was alive at the peak of a recorded step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import click

from tb_memplugin.analysis.breakdown import DIVISIONS, By, Part
from tb_memplugin.commands.tables import LONGEST, Unit, console, printable, table
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.proto.summary_pb2 import DeviceSummary, StepSummary
from tb_memplugin.store.paths import readable
from tb_memplugin.store.reader import RecordedStep, full_summary, peak_parts, read_recordings
from tb_memplugin.trace import Phase

REST = "(rest)"


@dataclass(frozen=True, slots=True)
class _Found:
    step: RecordedStep
    summary: StepSummary
    device: DeviceSummary

    @property
    def peak_time_ns(self) -> int:
        """Epoch nanoseconds."""
        return self.step.metadata.epoch_ns + self.device.stats.peak_time_ns


@click.command("peak")
@click.argument("path")
@click.option("--step", type=int, help="The step's number. Default: the one with the highest peak.")
@click.option("--device", help="A device's name, such as cuda:0. Default: all.")
@click.option("--worker", help="A worker's name. Default: the one with the highest peak.")
@click.option(
    "--by", type=click.Choice(DIVISIONS), default="category", show_default=True, help="What to divide by."
)
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Rows; 0 shows all.")
@click.option("--json", "as_json", is_flag=True, help="Bytes and nanoseconds, for programs.")
def command(
    path: str, step: int | None, device: str | None, worker: str | None, by: By, top: int, as_json: bool
) -> None:
    """What was alive at the peak of a recorded step.

    PATH is a run's folder, a worker's folder in it, or a logdir above them.
    """
    steps = _selected(path, step, device, worker)
    best = _highest(steps, device)
    found = [_summary(chosen, name) for chosen, name in _per_device(steps, best.folder, device)]
    if as_json:
        document = {"source": best.folder, "devices": [_json(item, by, top) for item in found]}
        click.echo(json.dumps(document, indent=2))
    else:
        _show(found, by, top)
    others = sorted({other.folder for other in steps} - {best.folder})
    if others:
        names = ", ".join(printable(name, 80) for name in others[:5]) + (", …" if len(others) > 5 else "")
        click.echo(
            f"Shown is {printable(best.folder)}, which has the highest peak. Also here: {names}", err=True
        )


def top_parts(parts: Sequence[Part], top: int) -> list[Part]:
    """The largest parts, and one for all the others: the sum stays the same. 0 keeps all."""
    if not top or len(parts) <= top:
        return list(parts)
    rest = parts[top:]
    return [*parts[:top], Part(REST, sum(part.bytes for part in rest), sum(part.count for part in rest))]


def _selected(path: str, step: int | None, device: str | None, worker: str | None) -> list[RecordedStep]:
    """The steps that the options mean.

    Raises:
        NotRecordedError: there are none; it names those that there are.
    """
    recordings = read_recordings(path)
    for problem in recordings.problems:
        click.echo(f"warning: {printable(str(problem))}", err=True)
    steps = list(recordings.steps)
    if not steps:
        fix = f"Record one with memory_trace_handler, or ask: tb-memplugin doctor {path}"
        raise NotRecordedError("No memory recording is here.", where=path, fix=fix)
    if worker is not None:
        known = sorted({item.metadata.worker for item in steps})
        steps = [item for item in steps if item.metadata.worker == readable(worker)]
        _require(steps, f"Worker {worker!r}", known, path)
    if step is not None:
        known = [str(number) for number in sorted({item.metadata.step for item in steps})]
        steps = [item for item in steps if item.metadata.step == step]
        _require(steps, f"Step {step}", known, path)
    if device is not None:
        known = sorted({item.device for entry in steps for item in entry.metadata.devices})
        steps = [item for item in steps if device in _peaks(item)]
        _require(steps, f"Device {device!r}", known, path)
    return [item for item in steps if item.metadata.devices]


def _require(steps: Sequence[RecordedStep], what: str, known: Sequence[str], path: str) -> None:
    if not steps:
        raise NotRecordedError(
            f"{what} was not recorded.", where=path, fix=f"Choose one of: {', '.join(known)}."
        )


def _peaks(step: RecordedStep) -> dict[str, int]:
    return {item.device: item.stats.peak_bytes for item in step.metadata.devices}


def _highest(steps: Sequence[RecordedStep], device: str | None) -> RecordedStep:
    return max(steps, key=lambda step: _peaks(step)[device] if device else max(_peaks(step).values()))


def _per_device(
    steps: Sequence[RecordedStep], folder: str, device: str | None
) -> list[tuple[RecordedStep, str]]:
    """For each device of a worker, the step in which its peak is highest."""
    mine = [step for step in steps if step.folder == folder]
    names = [device] if device else list(dict.fromkeys(name for step in mine for name in _peaks(step)))
    return [(max(mine, key=lambda step: _peaks(step).get(name, -1)), name) for name in names]


def _summary(step: RecordedStep, name: str) -> _Found:
    summary = full_summary(step)
    return _Found(step, summary, next(device for device in summary.devices if device.name == name))


def _parts(found: _Found, by: By, top: int) -> list[Part]:
    return top_parts(peak_parts(found.summary, found.device, by), top)


def _json(found: _Found, by: By, top: int) -> dict[str, object]:
    stats = found.device.stats
    return {
        "device": found.device.name,
        "step": found.step.metadata.step,
        "peak_bytes": stats.peak_bytes,
        "window_peak_bytes": stats.window_peak_bytes,
        "peak_time_ns": found.peak_time_ns,
        "start_bytes": stats.start_bytes,
        "end_bytes": stats.end_bytes,
        "peak_reserved_bytes": stats.peak_reserved_bytes if stats.HasField("peak_reserved_bytes") else None,
        "breakdown": [
            {"key": part.key, "bytes": part.bytes, "count": part.count} for part in _parts(found, by, top)
        ],
    }


def _show(found: Sequence[_Found], by: By, top: int) -> None:
    out = console()
    for item in found:
        whole = item.device.stats.peak_bytes
        unit = Unit.for_bytes([whole])
        parts = _parts(item, by, top)
        total = Part("total", sum(part.bytes for part in parts), sum(part.count for part in parts))
        rows = [
            (part.key or "(root)", unit.show(part.bytes), _share(part.bytes, whole), f"{part.count:,}")
            for part in (*parts, total)
        ]
        for line in _heading(item, unit):
            out.print(printable(line, LONGEST), soft_wrap=True)
        out.print(table((by, unit.name, "%", "blocks"), rows))


def _heading(found: _Found, unit: Unit) -> tuple[str, str, str]:
    stats, peak, metadata = found.device.stats, found.device.peak, found.step.metadata
    doing = Phase(peak.phase).key + (f", {peak.operator}" if peak.HasField("operator") else "")
    seconds = (stats.peak_time_ns - stats.step_start_ns) / 1e9
    return (
        f"{metadata.worker}, step {metadata.step}, {found.device.name}",
        f"peak {unit.tell(stats.peak_bytes)}, {seconds:.3f} s into the step ({doing})",
        f"start of the window {unit.tell(stats.start_bytes)}, end of the step {unit.tell(stats.end_bytes)}",
    )


def _share(size: int, whole: int) -> str:
    return f"{100 * size / whole:.1f}" if whole else "0.0"
