"""`tb-memplugin summary`: what a recorded run used, in about ten lines."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from urllib.parse import quote

import click
import numpy as np

from tb_memplugin.analysis.advice_rules import advice, heading
from tb_memplugin.analysis.comparison import Delta, compare, with_folded_layers
from tb_memplugin.analysis.divisions import NONE, By, Part
from tb_memplugin.analysis.findings import Finding
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.growth import monitored_growth
from tb_memplugin.analysis.moments import Moment, peak
from tb_memplugin.analysis.source_lines import NO_STACK
from tb_memplugin.analysis.units import counted, part_text, size_text
from tb_memplugin.commands.divisions import shown_key
from tb_memplugin.commands.opening import highest, highest_or_dump, peaks, recordings_below
from tb_memplugin.commands.options import PATH
from tb_memplugin.commands.ranks import rank_steps
from tb_memplugin.commands.tables import LONGEST, percent, printable
from tb_memplugin.store import files
from tb_memplugin.store.reader import RecordedStep, Recordings, load_window, read_recordings
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.step_figures import WatchedSteps
from tb_memplugin.trace.tables import NOT_NAMED, module_text

SHOWN = 3
"""How many parts of the peak a line names, and how many processes have a line."""

LEAST_SHARE, LARGE_SHARE = 0.01, 0.1
"""The shares of the peak from which on a part is named: one of the largest, and each of the others."""

HIGHER = 1.1
"""Where a step had so many times the memory of all recorded ones, the recording does not show the problem."""

NOT_KNOWN = frozenset((NOT_NAMED, NONE, NO_STACK, Category.UNKNOWN.key))
"""Keys of the parts of which nothing is known."""

_BY_TIME = re.compile(r"\d{8}-\d{6}\b")
"""What the name begins with that `tb-memplugin run` gives to a run's folder."""

_OF_UNKNOWN = f"{Category.UNKNOWN.key}: "
"""What a subcategory of memory begins with of which the category is not known."""

DIVIDED: tuple[tuple[str, By], ...] = (("filled by", "category"), ("layers", "module"), ("lines", "line"))


@click.command("summary")
@click.argument("path", type=PATH)
@click.option(
    "--logdir", type=PATH, help="The folder to open in TensorBoard. Default: the run's logdir, or PATH."
)
@click.option("--failed", type=(int, str), hidden=True, help="The request that ended the program.")
def command(path: str, logdir: str | None, failed: tuple[int, str] | None) -> None:
    """What the run in the folder PATH used: its peak, what filled it, what changed, and what to do."""
    recordings = recordings_below(path)
    click.echo(f"tb-memplugin: {printable(path)}")
    if failed is not None:
        size, where = failed
        click.echo(
            f"  {'failed':<10} a request of {size_text(size)} on the CPU, at {printable(where, LONGEST)}"
        )
    for name, text in lines(path, recordings, logdir or _logdir(path)):
        click.echo(f"  {name:<10} {printable(text, 4 * LONGEST)}")


def lines(path: str, recordings: Recordings, logdir: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a summary: what a line is about, and its text."""
    watched = sorted(recordings.watched, key=lambda series: -int(series.figures.devices[0].peak.max()))
    yield from _failed(recordings)
    for series in watched[:SHOWN]:
        yield from _watched(series, recordings)
    if more := len(watched[SHOWN:]):
        yield "", f"{counted(more, 'more worker')}: tb-memplugin ranks {shlex.quote(path)}"
    best = _highest(recordings)
    if best is None:
        yield "recorded", "no step in full: too few steps, a profiler of the program, or a failed write"
    else:
        yield from _recorded(path, best, recordings)
    yield "open", f"tensorboard --logdir {shlex.quote(logdir)}   (the tab Memory)"
    run = PurePath(path).relative_to(logdir).as_posix() if PurePath(path).is_relative_to(logdir) else "."
    if run != ".":
        yield "", f"http://localhost:6006/#tb_memplugin&p.tb_memplugin.run={quote(run, safe='')}"


def _failed(recordings: Recordings) -> Iterator[tuple[str, str]]:
    """Yield the last request that failed, of those that wrote what filled the memory."""
    dumps = [step.metadata for step in recordings.steps if step.metadata.dump_of]
    failed = [(dump, device) for dump in dumps for device in dump.devices if device.failed_requests.count]
    if not failed:
        return
    dump, device = max(failed, key=lambda pair: pair[0].epoch_ns)
    request = device.failed_requests
    where = f", at {request.line}" if request.line else ""
    whose = f", in {dump.dump_of}" if _processes(recordings) > 1 else ""
    yield "failed", f"a request of {size_text(request.requested_bytes)} on {device.device}{where}{whose}"


def _processes(recordings: Recordings) -> int:
    return len({step.metadata.dump_of or step.metadata.worker for step in recordings.steps})


def _growing(best: RecordedStep, recordings: Recordings) -> Iterator[tuple[str, str]]:
    """Yield how many of several workers grow, and which most: peak and advice are of the highest alone."""
    growth: Counter[str] = Counter()
    for rank in rank_steps(recordings):
        growth[rank.worker] = max(growth[rank.worker], rank.growth or 0)
    (worker, most), count = growth.most_common(1)[0], sum(size > 0 for size in growth.values())
    if len(growth) == 1 or not count:
        return
    which = f"{worker}{' most' if count > 1 else ''}, {size_text(most)} more with every step"
    yield "grows", f"{count:,} of {len(growth):,} workers: {which}"
    folders = (step.folder for step in recordings.steps if step.metadata.worker == worker)
    if worker != best.metadata.worker and (folder := next(folders, None)):
        yield "", f"tb-memplugin advice {shlex.quote(folder)}"


def _recorded(path: str, best: RecordedStep, recordings: Recordings) -> Iterator[tuple[str, str]]:
    trace = load_window(best.side_file or "", best.metadata)
    state = peak(trace, largest=0)
    workers = _processes(recordings)
    where = f", in {best.metadata.worker}, the highest of {workers}" if workers > 1 else ""
    phase = "" if state.phase == Phase.OTHER else f" in {state.phase.key}"
    doing = f", at {state.operator}" if state.operator else ""
    step = "" if trace.source == "snapshot" and len(trace.steps) == 1 else f" in step {state.step}"
    yield "peak", f"{size_text(state.bytes)} on {state.device}{step}{phase}{doing}{where}"
    for name, by in DIVIDED:
        if text := _parts(state, _parts_of(state, by)):
            yield name, text
    own = _highest(recordings, device=state.device, own=True) or best
    yield from _changed(
        path, trace if own is best else load_window(own.side_file or "", own.metadata), state.device
    )
    yield from _growing(best, recordings)
    answer = advice(trace, state.device, watched=recordings.watched_beside(best.folder))
    if answer.findings:
        first = answer.findings[0]
        yield "advice", f"{first.title} {part_text(first.bytes, first.of_bytes)} {first.measure}."
        yield "", first.what_to_do
        if more := len(answer.findings) - 1:
            yield "", f"{counted(more, 'more finding')}: tb-memplugin advice {shlex.quote(path)}"
    else:
        yield "advice", heading(answer)


def _parts_of(state: Moment, by: By) -> Sequence[Part]:
    """Return the parts of the peak, repeated layers as one. What only variables hold has their names."""
    parts = [*state.parts(by)]
    if by == "module":
        return with_folded_layers(parts)
    if by != "category":
        return parts
    variables = [part for part in state.parts("subcategory") if part.key.startswith(_OF_UNKNOWN)]
    named = sum(part.bytes for part in variables)
    shown = [replace(part, key=part.key.removeprefix(_OF_UNKNOWN)) for part in variables]
    rest = [
        replace(part, bytes=part.bytes - named) if part.key == Category.UNKNOWN.key else part
        for part in parts
    ]
    return sorted((part for part in (*rest, *shown) if part.bytes), key=lambda part: -part.bytes)


def _parts(state: Moment, parts: Sequence[Part]) -> str:
    """Return the largest parts of the peak, the rest, and how much is not known; "" if nothing is known."""
    named_parts = [part for part in parts if part.key not in NOT_KNOWN]
    least, large = LEAST_SHARE * state.bytes, LARGE_SHARE * state.bytes
    count = sum(part.bytes >= (least if at < SHOWN else large) for at, part in enumerate(named_parts))
    named = named_parts[: max(count, 1)]
    rest = [
        ("others", sum(part.bytes for part in named_parts[len(named) :])),
        ("not known", sum(part.bytes for part in parts if part.key in NOT_KNOWN)),
    ]
    shown = [(_named(part.key), part.bytes) for part in named] + [part for part in rest if part[1]]
    return ", ".join(
        f"{key} {part_text(size, state.bytes)} ({percent(size, state.bytes)} %)"
        for key, size in shown * bool(named)
    )


def _named(key: str) -> str:
    return shown_key(module_text(key))


def _watched(series: WatchedSteps, recordings: Recordings) -> Iterator[tuple[str, str]]:
    """Yield the highest step, and how much memory grows in each, or how to record it if it is far higher."""
    figures = series.figures
    device = figures.devices[0]
    row = int(device.peak.argmax())
    most, resident = int(device.peak[row]), " resident" if device.kind == "process" else ""
    text = (
        f"{counted(figures.step_count, 'step')} of {series.worker} watched: {device.name} highest "
        f"{size_text(most)}{resident} in {figures.steps_of(row)}"
    )
    if device.peak_reserved is not None:
        text += f", {size_text(int(device.peak_reserved.max()))} reserved"
    growth = monitored_growth(figures, device.name)
    if isinstance(growth, Finding):
        yield "steps", f"{text}; {part_text(growth.bytes, growth.of_bytes)} {growth.measure}"
        return
    yield "steps", text
    numbers = {step.metadata.step for step in recordings.steps if step.metadata.worker == series.worker}
    if resident:  # the process has also written the recording, in the step after it
        numbers |= {number + 1 for number in numbers}
    recorded = device.peak[np.isin(figures.steps, list(numbers))].tolist()
    failed = [step for step in recordings.steps if step.metadata.dump_of == series.worker]
    recorded += [peaks(step).get(device.name, 0) for step in failed]
    if recorded and most > HIGHER * max(recorded):
        more, steps = size_text(most - max(recorded)), figures.range_of(row)
        option = f"{steps.start}:{steps.stop}" if len(steps) > 1 else f"{steps.start}"
        yield "", f"That is {more} above the steps that are recorded in full. To record it: --steps {option}"


def _changed(path: str, trace: MemoryTrace, device: str) -> Iterator[tuple[str, str]]:
    """Yield what changed on a device since the run before of the same program, by category and by module.

    What was written when a request failed names other modules: steps are compared that were recorded in full.
    """
    folder, _, own = path.rstrip("/").rpartition("/")
    if not (folder and _BY_TIME.match(own)):  # no name of `tb-memplugin run`: others need not be comparable
        return
    earlier = [name for name in files.folders_in(folder) if _BY_TIME.match(name) and name < own]
    for name in reversed(earlier):
        recordings = read_recordings(files.join(folder, name))
        before = _highest(recordings, own=True) or _highest(recordings)
        if before is None:
            continue
        base = load_window(before.side_file or "", before.metadata)
        pairs = compare(base, trace)
        row = next(row for row, pair in enumerate(pairs) if pair.other_device == device)
        comparison = pairs[row]
        if not comparison.delta_bytes:
            yield "changed", f"nothing since {name}: the peaks are equal"
            return
        delta = comparison.delta_bytes
        yield "changed", f"{_signed(delta, delta)} since {name}: {_moved(comparison.rows)}"
        modules = compare(base, trace, by="module")[row].rows
        if any(row.key not in NOT_KNOWN for row in modules):
            yield "", f"layers: {_moved(modules)}"
        return


def _moved(rows: Sequence[Delta]) -> str:
    """Return what changed most, repeated layers as one, whether it is new or gone, and the others' sum."""
    names = folds([row.key for row in rows])
    deltas: dict[str, int] = {}
    base: dict[str, int] = {}
    for row in rows:
        deltas[names[row.key]] = deltas.get(names[row.key], 0) + row.delta_bytes
        base[names[row.key]] = base.get(names[row.key], 0) + row.base_bytes
    moved = sorted((name for name in deltas if deltas[name]), key=lambda name: -abs(deltas[name]))
    most = abs(deltas[moved[0]]) if moved else 0
    texts = []
    for name in moved[:SHOWN]:
        became = " (new)" if base[name] == 0 else " (gone)" if base[name] == -deltas[name] else ""
        texts.append(f"{_named(name)} {_signed(deltas[name], most)}{became}")
    if rest := moved[SHOWN:]:
        texts.append(f"others {_signed(sum(deltas[name] for name in rest), most)}")
    return ", ".join(texts)


def _highest(recordings: Recordings, *, device: str | None = None, own: bool = False) -> RecordedStep | None:
    """Return the highest step, on a device if one is named; `own`: but none that a failed request wrote."""
    steps = [
        step
        for step in recordings.steps
        if step.side_file is not None
        and (device is None or device in peaks(step))
        and not (own and step.metadata.dump_of)
    ]
    return (highest if own else highest_or_dump)(steps, device) if steps else None


def _logdir(path: str) -> str:
    """Return the logdir of a run's folder that `tb-memplugin run` named by its time; else the path itself."""
    folder = PurePath(path)
    return str(folder.parent.parent) if "://" not in path and _BY_TIME.match(folder.name) else path


def _signed(size: int, of: int) -> str:
    return f"{'+' if size > 0 else '-'}{part_text(abs(size), of)}"
