"""`tb-memplugin check`: whether a program needs more memory than before, or than its `memory.lock` says."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import click

from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.peak_limits import (
    DIVISIONS,
    DevicePeak,
    Division,
    Limit,
    PeakGrowth,
    device_peaks,
    first_parts,
    peak_growths,
)
from tb_memplugin.analysis.units import Unit, read_size, size_text
from tb_memplugin.commands.divisions import shown_key
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import PATH
from tb_memplugin.commands.tables import LONGEST, printable
from tb_memplugin.errors import MemPluginError, NotRecordedError, UnreadableFileError
from tb_memplugin.exports.output import replacing
from tb_memplugin.store import files

ABOVE = 1
"""The exit code if a peak is above the limit. What cannot be compared exits with 2, as all errors do."""

SHOWN = 5
"""How many changed parts are named."""

_SHARE = re.compile(r"\s*(\d{0,9}\.?\d{1,9})\s*%\s*")


@click.command("check")
@click.argument("paths", metavar="[BASE]... NEW", type=PATH, nargs=-1, required=True)
@click.option(
    "--fail-above",
    "limit",
    default="2%",
    show_default=True,
    metavar="LIMIT",
    help="How much a peak may exceed the base: 2%, 64MiB, or bytes.",
)
@click.option(
    "--by", type=click.Choice(DIVISIONS), help="What to tell growth by. Default: module, else category."
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["text", "json", "markdown", "github"]),
    default="text",
    show_default=True,
    help="markdown: for a comment; github: annotations of GitHub Actions.",
)
@click.option("--write", type=PATH, metavar="LOCK", help="Write the peaks of all PATHs as a base to commit.")
@reading_options
def command(
    paths: Sequence[str], limit: str, by: Division | None, layout: str, write: str | None, reading: Reading
) -> None:
    """Exit with 1 if the peak of NEW exceeds that of BASE by more than a limit, with 0 if not.

    BASE and NEW are recordings, snapshots, estimates, or a memory.lock that --write made. Of several BASEs,
    runs of the same program, the highest peak counts, so that what differs from run to run is no growth.
    """
    allowed = _limit(limit)
    if write is not None:
        text = lock_text(_peaks(paths, reading))
        with replacing(write) as stream:
            stream.write(text.encode())
        return
    *bases, new = paths
    if not bases:
        raise MemPluginError("There is no base.", where="BASE", fix="Give two paths: check BASE NEW")
    base, now = _peaks(bases, reading), _peaks([new], reading)
    growths = peak_growths(base, now, allowed, by)
    if len(growths) < len(base) or not growths:
        missing = sorted({peak.device for peak in base} - {growth.device for growth in growths})
        raise NotRecordedError(
            f"These cannot be compared: the new recording has no {' and no '.join(missing)}."
            if missing
            else "The base has no device.",
            where=new if missing else bases[0],
            fix="Compare recordings of the same program on the same kind of device.",
        )
    shown = size_text(allowed.bytes) if limit.strip().isdecimal() else limit
    click.echo(LAYOUTS[layout](growths, shown))
    raise SystemExit(ABOVE if any(growth.is_above for growth in growths) else 0)


def _peaks(paths: Sequence[str], reading: Reading) -> tuple[DevicePeak, ...]:
    """Return the peaks of a lock, or of all recordings.

    Raises:
        MemPluginError: a lock is one of several paths.
    """
    locks = [path for path in paths if is_lock(path)]
    if locks:
        if len(paths) > 1:
            raise MemPluginError("A lock is a base by itself.", where=locks[0], fix="Give it alone.")
        return read_lock(locks[0])
    return device_peaks(open_trace(path, reading).trace for path in paths)


def _limit(text: str) -> Limit:
    """Read a limit such as `2%`, `64MiB` or `1000`.

    Raises:
        MemPluginError: it is neither.
    """
    share = _SHARE.fullmatch(text)
    if share:
        return Limit(share=Fraction(share[1]) / 100)
    try:
        return Limit(bytes=read_size(text, "--fail-above", least=0))
    except MemPluginError as error:
        fix = "Give 2%, 64MiB, or bytes."
        raise MemPluginError(f"{text[:80]!r} is no limit.", where="--fail-above", fix=fix) from error


def _verdict(growth: PeakGrowth) -> str:
    unit = Unit.for_bytes([growth.bytes, growth.base_bytes])
    several = growth.base_lowest_bytes != growth.base_bytes
    base = f"{unit.text(growth.base_lowest_bytes)} to " if several else ""
    more = "+" if growth.delta_bytes > 0 else "-" if growth.delta_bytes < 0 else ""
    change = 100 * growth.delta_bytes / growth.base_bytes if growth.base_bytes else 0.0
    return (
        f"{_device(growth)}: peak {unit.text(growth.bytes)}, base {base}{unit.text(growth.base_bytes)}: "
        f"{more}{size_text(abs(growth.delta_bytes))} ({change:+.2f} %){_versions(growth)}"
    )


def _device(growth: PeakGrowth) -> str:
    return printable(growth.device, LONGEST)


def _versions(growth: PeakGrowth) -> str:
    """Return the versions of torch where these, too, may have changed the peak."""
    if not growth.delta_bytes or not growth.base_torch or growth.torch in ("", growth.base_torch):
        return ""
    return f", with torch {printable(growth.torch, LONGEST)}, base {printable(growth.base_torch, LONGEST)}"


def _grown(growth: PeakGrowth) -> list[tuple[str, str]]:
    """Return what grew most, repeated layers as one, and the others, with their changes, which sum.

    Of a peak that did not grow it is nothing.
    """
    if growth.delta_bytes <= 0:
        return []
    rows = [row for row in growth.rows if row.delta_bytes]
    names = folds([row.key for row in rows]) if growth.by == "module" else {}
    deltas = Counter[str]()
    for row in rows:
        deltas[names.get(row.key, row.key)] += row.delta_bytes
    largest = [(name, size) for name, size in deltas.most_common(SHOWN) if size > 0]
    named = [(f"{growth.by} {printable(shown_key(name), LONGEST)}", size) for name, size in largest]
    rest = growth.delta_bytes - sum(size for _, size in largest)
    changes = [*named, ("others", rest)] if rest else named
    return [(name, f"{'+' if size > 0 else '-'}{size_text(abs(size))}") for name, size in changes]


def _text(growths: Sequence[PeakGrowth], limit: str) -> str:
    lines = []
    for growth in growths:
        state = f"ABOVE the limit of {limit}" if growth.is_above else f"within the limit of {limit}"
        lines.append(f"{_verdict(growth)}, {state}")
        lines += [f"  {name}: {size}" for name, size in _grown(growth)]
    return "\n".join(lines)


def _markdown(growths: Sequence[PeakGrowth], limit: str) -> str:
    state = "above" if any(growth.is_above for growth in growths) else "within"
    lines = [
        f"### Memory: {state} the limit of {limit}",
        "",
        "| device | peak | base | change | |",
        "|---|---:|---:|---:|---|",
    ]
    for growth in growths:
        unit = Unit.for_bytes([growth.bytes, growth.base_bytes])
        share = 100 * growth.delta_bytes / growth.base_bytes if growth.base_bytes else 0.0
        grown = ", ".join(f"{_escaped(name)} {size}" for name, size in _grown(growth))
        lines.append(
            f"| {_escaped(_device(growth))} | {unit.text(growth.bytes)} | {unit.text(growth.base_bytes)} | "
            f"{share:+.2f} % | {grown}{_escaped(_versions(growth))} |"
        )
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return text in which Markdown and HTML see nothing of theirs."""
    return "".join(f"&#{ord(char)};" if char in "|<>&`*_[]()!~\\@#" else char for char in text)


def _github(growths: Sequence[PeakGrowth], limit: str) -> str:
    lines = []
    for growth in growths:
        level = "error" if growth.is_above else "notice"
        grown = "; ".join(f"{name} {size}" for name, size in _grown(growth))
        text = f"{_verdict(growth)}, limit {limit}{grown and f'. Grew: {grown}'}"
        data = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        lines.append(f"::{level} title=Memory::{data}")
    return "\n".join(lines)


def _json(growths: Sequence[PeakGrowth], limit: str) -> str:
    devices = [
        {
            **{name: value for name, value in asdict(growth).items() if name != "rows"},
            "delta_bytes": growth.delta_bytes,
            "is_above": growth.is_above,
            "rows": [
                {name: getattr(row, name) for name in ("key", "base_bytes", "other_bytes", "delta_bytes")}
                for row in growth.rows
            ],
        }
        for growth in growths
    ]
    return json.dumps({"limit": limit, "devices": devices}, indent=2)


LAYOUTS: dict[str, Callable[[Sequence[PeakGrowth], str], str]] = {
    "text": _text,
    "json": _json,
    "markdown": _markdown,
    "github": _github,
}


KEY = "tb_memplugin_memory_lock"
"""The key that a lock begins with; its value is the version of the format."""

VERSION = 1
MOST_PARTS = 50
"""How many parts of a peak a lock names; the others are one, so that the parts sum to the peak."""

MOST_BYTES = 1 << 24
_CONFLICT = b"<<<<<<< "
"""What git writes into a file where two branches changed it."""

FIX = "Write it again with: tb-memplugin check --write memory.lock RUN"


def lock_text(peaks: Sequence[DevicePeak]) -> str:
    """Return a lock as JSON, one part a line, so that a change of one is a change of one line."""
    devices = [
        {
            "device": peak.device,
            "lowest_peak_bytes": peak.lowest_bytes,
            "highest_peak_bytes": peak.highest_bytes,
            "torch": peak.torch,
            "parts": {by: _largest(peak.parts[by]) for by in DIVISIONS},
        }
        for peak in peaks
    ]
    return json.dumps({KEY: VERSION, "devices": devices}, indent=1) + "\n"


def _largest(parts: Sequence[Part]) -> dict[str, int]:
    kept = first_parts(parts, [part.key for part in parts[:MOST_PARTS]])
    return {part.key: part.bytes for part in kept}


def is_lock(path: str) -> bool:
    """Whether a local file is named `*.lock`, or begins as a lock does. A pipe is none: it cannot be read."""
    if files.is_remote(path):
        return False
    try:
        beginning = files.read_begin(path, 800).replace(b"\0", b"")  # of UTF-16, as PowerShell's > writes it
    except OSError:
        return False
    return path.endswith(".lock") or f'"{KEY}"'.encode() in beginning


def read_lock(path: str) -> tuple[DevicePeak, ...]:
    """Read a lock.

    Raises:
        UnreadableFileError: it is damaged, contradicts itself, or is newer than this reader.
    """
    try:
        with open(path, "rb") as stream:  # noqa: PTH123
            text = stream.read(MOST_BYTES)
        if not text.strip():
            raise UnreadableFileError("The lock is empty.", where=path, fix=FIX)
        if _CONFLICT in text.replace(b"\0", b""):
            raise UnreadableFileError("Git could not merge the changes of two branches.", where=path, fix=FIX)
        document = json.loads(text)
        version = document[KEY]
        if version != VERSION:
            raise UnreadableFileError(
                f"The lock has version {version!r:.20}.", where=path, fix="Install a newer tb_memplugin."
            )
        peaks = tuple(_device_peak(device) for device in document["devices"])
        if len({peak.device for peak in peaks}) < len(peaks):
            raise ValueError("it names a device twice")
        return peaks
    except (OSError, OverflowError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableFileError(f"The lock is damaged ({error!r:.120}).", where=path, fix=FIX) from error


def _device_peak(device: Any) -> DevicePeak:
    lowest, highest = _size(device["lowest_peak_bytes"]), _size(device["highest_peak_bytes"])
    parts = {
        by: [Part(str(key), _size(size), 0) for key, size in device["parts"][by].items()] for by in DIVISIONS
    }
    sums = {sum(part.bytes for part in listed) for listed in parts.values()}
    if lowest > highest or sums != {highest}:
        raise ValueError("the parts do not sum to the peak")
    return DevicePeak(str(device["device"]), lowest, highest, parts, str(device.get("torch", "")))


def _size(value: object) -> int:
    """Return a size in bytes.

    Raises:
        ValueError: the value is no whole number of bytes.
    """
    if type(value) is not int or value < 0:  # JSON's true is an int, too
        raise ValueError(f"{value!r:.40} is no size in bytes")
    return value
