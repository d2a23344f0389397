"""Whether a program's peak is within a limit of a base: that of one run, or of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from tb_memplugin.analysis.comparison import Delta, compare_parts, paired_devices
from tb_memplugin.analysis.divisions import Part, merged
from tb_memplugin.analysis.moments import peak
from tb_memplugin.analysis.source_lines import frame_of_line, key_of_line
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import NOT_NAMED

Division = Literal["category", "module", "line"]
DIVISIONS: tuple[Division, ...] = ("category", "module", "line")
"""What a base knows the parts of its peak by."""

REST = "(rest)"


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a peak may grow: a number of bytes, or a share of the base's peak (1/50 is 2 %)."""

    bytes: int = 0
    share: Fraction | None = None

    def allowed(self, base_bytes: int) -> int:
        """Return the bytes by which a peak may exceed this one."""
        return self.bytes if self.share is None else int(base_bytes * self.share)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """A device's peak in some runs: the lowest, the highest, and the parts of the highest, with its sum.

    `torch` is the version that the highest was recorded with, "" if not known.
    """

    device: str
    lowest_bytes: int
    highest_bytes: int
    parts: Mapping[Division, Sequence[Part]]
    torch: str = ""


@dataclass(frozen=True, slots=True)
class PeakGrowth:
    """A device's peak against the base. `rows` are what changed; their deltas sum to `delta_bytes`.

    Attributes:
        device: its name; in the base it may have another number.
        base_lowest_bytes, base_bytes: the lowest and the highest peak of the base.
        bytes: the highest peak now.
        allowed_bytes: by how many bytes it may exceed the base's highest.
        base_torch, torch: the versions of torch, "" if not known.
    """

    device: str
    base_lowest_bytes: int
    base_bytes: int
    bytes: int
    allowed_bytes: int
    by: Division
    rows: tuple[Delta, ...]
    base_torch: str = ""
    torch: str = ""

    @property
    def delta_bytes(self) -> int:
        """The peak now minus the base's highest."""
        return self.bytes - self.base_bytes

    @property
    def is_above(self) -> bool:
        """Whether the peak exceeds the limit."""
        return self.delta_bytes > self.allowed_bytes


def device_peaks(traces: Iterable[MemoryTrace]) -> tuple[DevicePeak, ...]:
    """Return the peak of each device in recordings of the same program, in order of first appearance."""
    peaks: dict[str, DevicePeak] = {}
    for trace in traces:
        for device in trace.devices:
            moment = peak(trace, device.name, largest=0)
            parts: dict[Division, tuple[Part, ...]] = {by: moment.parts(by) for by in DIVISIONS}
            parts["line"] = _without_folders(parts["line"])
            new = DevicePeak(
                device.name, moment.bytes, moment.bytes, parts, trace.properties.get("torch", "")
            )
            peaks[device.name] = _joined(peaks[device.name], new) if device.name in peaks else new
    return tuple(peaks.values())


def _without_folders(lines: Iterable[Part]) -> tuple[Part, ...]:
    """Return parts by line whose files have only the last two parts of their paths, as on any machine."""
    parts: dict[str, Part] = {}
    for part in lines:
        frame = frame_of_line(part.key)
        file = "" if frame is None else "/".join(frame.file.replace("\\", "/").split("/")[-2:])
        key = part.key if frame is None else key_of_line(frame._replace(file=file))
        shorter = replace(part, key=key)
        parts[key] = merged(parts[key], shorter) if key in parts else shorter
    return tuple(sorted(parts.values(), key=lambda part: -part.bytes))


def _joined(one: DevicePeak, other: DevicePeak) -> DevicePeak:
    highest = max((one, other), key=lambda device: device.highest_bytes)
    lowest_bytes = min(one.lowest_bytes, other.lowest_bytes)
    return replace(highest, lowest_bytes=lowest_bytes)


def peak_growths(
    base: Sequence[DevicePeak], now: Sequence[DevicePeak], limit: Limit, by: Division | None = None
) -> tuple[PeakGrowth, ...]:
    """Compare each device's highest peak with the base's highest.

    Args:
        base, now: the peaks of some runs each. Devices are paired as in `compare`; one that only one side
            has is left out.
        limit: how much a peak may grow.
        by: what to tell the growth by; None: by module where modules are known, else by category.
    """
    before, after = {peak.device: peak for peak in base}, {peak.device: peak for peak in now}
    return tuple(
        _growth(before[one], after[other], limit, by)
        for one, other in paired_devices(list(before), list(after))
        if one and other
    )


def _growth(base: DevicePeak, now: DevicePeak, limit: Limit, by: Division | None) -> PeakGrowth:
    has_modules = any(part.key != NOT_NAMED for part in now.parts["module"])
    chosen: Division = by or ("module" if has_modules else "category")
    return PeakGrowth(
        device=now.device,
        base_lowest_bytes=base.lowest_bytes,
        base_bytes=base.highest_bytes,
        bytes=now.highest_bytes,
        allowed_bytes=limit.allowed(base.highest_bytes),
        by=chosen,
        rows=compare_parts(*_same_rest(base.parts[chosen], now.parts[chosen])),
        base_torch=base.torch,
        torch=now.torch,
    )


def _same_rest(base: Sequence[Part], now: Sequence[Part]) -> tuple[Sequence[Part], Sequence[Part]]:
    """Return both sides; if the base has a rest, what it does not name is the rest on the other side, too."""
    base_keys = {part.key for part in base}
    if REST not in base_keys:
        return base, now
    return base, first_parts(now, [part.key for part in now if part.key in base_keys])


def first_parts(parts: Sequence[Part], keys: Iterable[str]) -> list[Part]:
    """Return the parts with these keys, and all others as one part, `REST`."""
    named, chosen, rest = list[Part](), set(keys), Part(REST, 0, 0)
    for part in parts:
        if part.key in chosen:
            named.append(part)
        else:
            rest = merged(rest, part)
    return [*named, rest] if rest.bytes or rest.count else named
