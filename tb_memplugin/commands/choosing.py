"""Choose recorded steps of a folder by the options --step, --device and --worker."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import click

from tb_memplugin.commands.refusals import refusal
from tb_memplugin.commands.tables import printable
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.store.paths import readable
from tb_memplugin.store.reader import RecordedStep, read_recordings


def chosen_steps(path: str, step: int | None, device: str | None, worker: str | None) -> list[RecordedStep]:
    """Return the recorded steps below a folder that match the options; there is at least one.

    Files that cannot be read are reported as warnings on stderr.

    Raises:
        NotRecordedError: no step matches; the message names the values that exist.
    """
    recordings = read_recordings(path)
    for problem in recordings.problems:
        click.echo(refusal(problem, "warning"), err=True)
    steps = list(recordings.steps)
    if not steps and recordings.watched:
        count = sum(len(series.figures) for series in recordings.watched)
        raise NotRecordedError(
            f"This folder has only MemoryMonitor figures, of {count:,} steps: no step was recorded in full.",
            where=path,
            fix=f"Write them as a table: tb-memplugin export {shlex.quote(path)} --to csv -o steps.csv  "
            f"or show them: tensorboard --logdir {shlex.quote(path)}",
        )
    if not steps:
        fix = f"Record one with memory_trace_handler, or find out why with: tb-memplugin doctor {path}"
        raise NotRecordedError("This folder has no memory recording.", where=path, fix=fix)
    if worker is not None:
        choices = sorted({entry.metadata.worker for entry in steps})
        steps = [entry for entry in steps if entry.metadata.worker == readable(worker)]
        _require(steps, f"Worker {worker!r}", choices, path)
    if step is not None:
        choices = [str(number) for number in sorted({entry.metadata.step for entry in steps})]
        steps = [entry for entry in steps if entry.metadata.step == step]
        _require(steps, f"Step {step}", choices, path)
    if device is not None:
        choices = sorted({name for entry in steps for name in peaks(entry)})
        steps = [entry for entry in steps if device in peaks(entry)]
        _require(steps, f"Device {device!r}", choices, path)
    return steps


def _require(steps: Sequence[RecordedStep], subject: str, choices: Sequence[str], path: str) -> None:
    if not steps:
        raise NotRecordedError(
            f"{subject} was not recorded.", where=path, fix=f"Choose one of: {', '.join(choices)}."
        )


def peaks(step: RecordedStep) -> dict[str, int]:
    """Return the peak of each device in a step, in bytes."""
    return {device.device: device.stats.peak_bytes for device in step.metadata.devices}


def highest(steps: Sequence[RecordedStep], device: str | None) -> RecordedStep:
    """Return the step with the highest peak on a device; without one, on any device."""
    return max(
        steps, key=lambda step: peaks(step)[device] if device else max(peaks(step).values(), default=-1)
    )


def print_others(steps: Sequence[RecordedStep], folder: str) -> None:
    """If there are several folders, say on stderr which one is shown, and name the others.

    The other names are relative to the folder that contains them all.
    """
    other_folders = sorted({other.folder for other in steps} - {folder})
    if other_folders:
        begin = os.path.commonprefix([folder, *other_folders])  # noqa: RUF071  # by character, as some are URLs
        above = begin.rpartition("/")[0].rstrip("/")
        shown = [printable(name[len(above) :].lstrip("/"), 80) for name in other_folders[:5]]
        names = ", ".join(shown) + (", …" if len(other_folders) > 5 else "")
        click.echo(
            f"Showing {printable(folder)}, which has the highest peak. To see another, give its folder, "
            f"below {printable(above or '/')}: {names}",
            err=True,
        )
