"""`memory.lock`: the peak of a program and its largest parts, small enough to be committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.peak_limits import DIVISIONS, DevicePeak, first_parts
from tb_memplugin.errors import UnreadableFileError

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
    """Whether a local file is named `*.lock`, or begins as a lock does. One that cannot be read is none."""
    try:
        with open(path, "rb") as stream:  # noqa: PTH123  # the path may be any text
            beginning = stream.read(800).replace(b"\0", b"")  # of UTF-16, as PowerShell's > writes it
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
        return tuple(_device_peak(device) for device in document["devices"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableFileError(f"The lock is damaged ({error!r:.120}).", where=path, fix=FIX) from error


def _device_peak(device: Any) -> DevicePeak:
    lowest, highest = device["lowest_peak_bytes"], device["highest_peak_bytes"]
    parts = {
        by: [Part(str(key), int(size), 0) for key, size in device["parts"][by].items()] for by in DIVISIONS
    }
    sums = {sum(part.bytes for part in listed) for listed in parts.values()}
    if not (0 <= int(lowest) <= int(highest)) or sums != {int(highest)}:
        raise ValueError("the parts do not sum to the peak")
    return DevicePeak(str(device["device"]), int(lowest), int(highest), parts, str(device.get("torch", "")))
