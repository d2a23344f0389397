"""Two recordings beside each other: their parts, with modules in the groups of one of them, and segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tb_memplugin.analysis.divisions import Chosen, Part, merged
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.module_groups import OTHER_MODULES
from tb_memplugin.analysis.moments import peak
from tb_memplugin.analysis.segments import SegmentState, segments_at
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import AnalysisResult, ResultTable

Status = Literal["added", "removed", "grown", "shrunk", "same"]


@dataclass(frozen=True, slots=True)
class Delta(AnalysisResult):
    """One key on both sides.

    `category` is the category that changed most in it, None if not known, and `category_delta_bytes` by how
    many bytes it changed: other minus base.
    """

    key: str
    status: Status
    base_bytes: int
    other_bytes: int
    base_count: int
    other_count: int
    category: str | None = None
    category_delta_bytes: int = 0

    @property
    def delta_bytes(self) -> int:
        """Other minus base, bytes."""
        return self.other_bytes - self.base_bytes


@dataclass(frozen=True, slots=True)
class DeviceComparison(AnalysisResult):
    """The peaks of one device in two traces. The rows' deltas sum to the difference of the peaks.

    `device` is its name in the base, `other_device` its name in the other trace. If a trace has no such
    device, the name is "" and the peak counts as 0 bytes.
    """

    device: str
    other_device: str
    base_peak_bytes: int
    other_peak_bytes: int
    rows: ResultTable[Delta]

    @property
    def delta_bytes(self) -> int:
        """Other minus base, bytes."""
        return self.other_peak_bytes - self.base_peak_bytes


def compare(
    base: MemoryTrace,
    other: MemoryTrace,
    *,
    device: str | None = None,
    step: int | None = None,
    by: Chosen = "category",
) -> ResultTable[DeviceComparison]:
    """Compare the peaks of two traces, device by device.

    Devices with the same name are paired. The others are paired in order of name within each device type
    (the GPUs of two workers, say); a device that is still left over is compared with nothing.

    Args:
        device: the name of a device in both traces; default: all devices.
        step: the number of a step in both traces; default: the whole window.

    Raises:
        NotRecordedError: one of the traces does not have the device or step, or neither has a device.
        MemPluginError: `by` is no division.
    """
    pairs = compared_devices(base, other, device)
    return ResultTable(_device_comparison(base, other, names, step, by) for names in pairs)


def compared_devices(base: MemoryTrace, other: MemoryTrace, device: str | None) -> list[tuple[str, str]]:
    """Return the names of the devices that `compare` pairs; "" where a device has no partner.

    Raises:
        NotRecordedError: one of the traces does not have the device, or neither has a device.
    """
    if device is not None:
        base.device_row(device), other.device_row(device)
        return [(device, device)]
    pairs = paired_devices([each.name for each in base.devices], [each.name for each in other.devices])
    if not pairs:
        raise NotRecordedError(
            "Neither trace has a device: nothing was recorded in them.",
            where=f"{base.source}, {other.source}",
            fix="Record again while the program allocates memory.",
        )
    return pairs


def _device_comparison(
    base: MemoryTrace, other: MemoryTrace, names: tuple[str, str], step: int | None, by: Chosen
) -> DeviceComparison:
    before, after = (
        peak(trace, name, step, largest=0) if name else None
        for trace, name in zip((base, other), names, strict=True)
    )
    return DeviceComparison(
        device=names[0],
        other_device=names[1],
        base_peak_bytes=before.bytes if before else 0,
        other_peak_bytes=after.bytes if after else 0,
        rows=compare_parts(before.parts(by) if before else (), after.parts(by) if after else ()),
    )


def paired_devices(base: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    """Pair the device names of both sides, in the order of the base; "" if a side has no partner."""
    only_base = sorted(set(base) - set(other), key=_rank)
    only_other = sorted(set(other) - set(base), key=_rank)
    partner = {name: name for name in base if name in other}
    for name in only_base:
        kind = name.partition(":")[0]
        partner[name] = next((other for other in only_other if other.partition(":")[0] == kind), "")
        if partner[name]:
            only_other.remove(partner[name])
    return [(name, partner[name]) for name in base] + [("", name) for name in only_other]


def _rank(name: str) -> tuple[str, int, str]:
    kind, _, number = name.partition(":")
    return kind, int(number) if number.isdecimal() else -1, name


def compare_parts(base: Sequence[Part], other: Sequence[Part]) -> ResultTable[Delta]:
    """Compare two breakdowns key by key, largest change first.

    The deltas sum to the difference of the totals. A key that is absent on one side counts 0 bytes there
    and is "added" or "removed", even if the other side has 0 bytes under it.
    """
    base_parts, other_parts = {part.key: part for part in base}, {part.key: part for part in other}
    keys = {**base_parts, **other_parts}
    deltas = [_delta(key, base_parts.get(key), other_parts.get(key)) for key in keys]
    return ResultTable(
        sorted(
            deltas, key=lambda row: (-abs(row.delta_bytes), -max(row.base_bytes, row.other_bytes), row.key)
        )
    )


def shortened_deltas(rows: Sequence[Delta], most: int, rest_key: str) -> ResultTable[Delta]:
    """Return the first `most` rows, and all others as one row under `rest_key`; the sums stay the same."""
    shown, rest = rows[:most], rows[most:]
    if not rest:
        return ResultTable(shown)
    base, other = sum(row.base_bytes for row in rest), sum(row.other_bytes for row in rest)
    return ResultTable(
        (
            *shown,
            Delta(
                key=rest_key,
                status=_change(base, other),
                base_bytes=base,
                other_bytes=other,
                base_count=sum(row.base_count for row in rest),
                other_count=sum(row.other_count for row in rest),
            ),
        )
    )


def _delta(key: str, base: Part | None, other: Part | None) -> Delta:
    before, after = base or Part(key, 0, 0), other or Part(key, 0, 0)
    category, category_delta = _changed_category(before.categories, after.categories)
    return Delta(
        key=key,
        status="added" if base is None else "removed" if other is None else _change(base.bytes, other.bytes),
        base_bytes=before.bytes,
        other_bytes=after.bytes,
        base_count=before.count,
        other_count=after.count,
        category=category,
        category_delta_bytes=category_delta,
    )


def _change(before: int, after: int) -> Status:
    if before == after:
        return "same"
    return "grown" if after > before else "shrunk"


def _changed_category(base: dict[str, int], other: dict[str, int]) -> tuple[str | None, int]:
    def rank(key: str) -> tuple[int, int]:
        before, after = base.get(key, 0), other.get(key, 0)
        return abs(after - before), max(before, after)

    category = max({**base, **other}, key=rank, default=None)
    return category, 0 if category is None else other.get(category, 0) - base.get(category, 0)


def folded_parts(
    parts: Iterable[Part], group_of: Mapping[str, str], groups: Sequence[str]
) -> ResultTable[Part]:
    """Merge parts by module into parts by group, with the same total bytes.

    Args:
        group_of: the group of every module of the window that defines the groups.
        groups: the names of that window's groups. A module that the window does not have goes to the group
            whose pattern it matches (`layers.30.mlp` to `layers.*.mlp`), else to the other modules.
    """
    patterns = sorted(((name.split("."), name) for name in groups), key=lambda pattern: -len(pattern[0]))
    merged_parts: dict[str, Part] = {}
    for part in parts:
        group = group_of.get(part.key)  # "" is the root
        key = _holder(part.key.split("."), patterns) if group is None else group
        in_group = replace(part, key=key)
        merged_parts[key] = merged(merged_parts[key], in_group) if key in merged_parts else in_group
    return ResultTable(sorted(merged_parts.values(), key=lambda part: -part.bytes))


def with_folded_layers(parts: Sequence[Part]) -> ResultTable[Part]:
    """Merge parts by module that differ only in the numbers of repeated layers, with the same total bytes."""
    return folded_parts(parts, folds([part.key for part in parts]), ())


def _holder(key: Sequence[str], patterns: Sequence[tuple[list[str], str]]) -> str:
    """Return the deepest group whose name matches the beginning of the key."""
    for pattern, name in patterns:
        if len(pattern) <= len(key) and all(map(_covers, pattern, key)):
            return name
    return OTHER_MODULES


def _covers(pattern: str, segment: str) -> bool:
    """Return whether a segment of a pattern matches: `*` any number, `0-15` a range, a name itself."""
    if pattern == segment:
        return True
    first, dash, last = pattern.partition("-")
    if not (segment.isascii() and segment.isdigit() and len(segment) < 10):
        return False
    is_range = dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()
    return pattern == "*" or bool(is_range and int(first) <= int(segment) <= int(last))


@dataclass(frozen=True, slots=True)
class SegmentDelta:
    """A segment: the same address, bytes and stream on both sides, or on one of them.

    `base_live_bytes` and `other_live_bytes` are the requested bytes of its live blocks, None on a side that
    does not have the segment.
    """

    address: int
    bytes: int
    stream: str
    pool: str
    status: Literal["added", "removed", "same"]
    base_live_bytes: int | None
    other_live_bytes: int | None


@dataclass(frozen=True, slots=True)
class SegmentComparison:
    """The segments of one device at the end of two traces; a name is "" if a trace has no such device.

    The segments that are removed or the same sum to `base_reserved_bytes`, those added or the same to
    `other_reserved_bytes`. They are ordered by status (added, removed, same), the largest first.
    """

    device: str
    other_device: str
    base_reserved_bytes: int
    other_reserved_bytes: int
    segments: tuple[SegmentDelta, ...]


def compare_segments(
    base: MemoryTrace, other: MemoryTrace, device: str | None = None
) -> tuple[SegmentComparison, ...]:
    """Compare what two traces have reserved at their ends, device by device, paired as in `compare`.

    Args:
        base, other: any traces; one without segments has none to compare.
        device: the name of a device in both traces; default: all devices.

    Raises:
        NotRecordedError: one of the traces does not have the device, or neither has a device.
        UnreadableFileError: the segment events of a trace contradict each other.
    """
    return tuple(_device_segments(base, other, names) for names in compared_devices(base, other, device))


def _device_segments(base: MemoryTrace, other: MemoryTrace, names: tuple[str, str]) -> SegmentComparison:
    before, after = (
        {
            (segment.address, segment.bytes, segment.stream): segment
            for segment in segments_at(trace, trace.device_row(name), len(trace.events) - 1)
        }
        if name
        else {}
        for trace, name in zip((base, other), names, strict=True)
    )
    deltas = [_segment_delta(before.get(key), after.get(key)) for key in before | after]
    order = ("added", "removed", "same")
    return SegmentComparison(
        device=names[0],
        other_device=names[1],
        base_reserved_bytes=sum(segment.bytes for segment in before.values()),
        other_reserved_bytes=sum(segment.bytes for segment in after.values()),
        segments=tuple(
            sorted(deltas, key=lambda delta: (order.index(delta.status), -delta.bytes, delta.address))
        ),
    )


def _segment_delta(before: SegmentState | None, after: SegmentState | None) -> SegmentDelta:
    segment = after or before
    assert segment is not None
    return SegmentDelta(
        address=segment.address,
        bytes=segment.bytes,
        stream=segment.stream,
        pool=segment.pool,
        status="same" if before and after else "added" if after else "removed",
        base_live_bytes=None if before is None else sum(block.bytes for block in before.blocks),
        other_live_bytes=None if after is None else sum(block.bytes for block in after.blocks),
    )
