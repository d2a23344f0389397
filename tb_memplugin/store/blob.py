"""Convert a summary to the bytes in an event file and back, and check what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import (
    Account,
    Allocations,
    DeviceSummary,
    ModuleTable,
    Parts,
    Spans,
    StepBlob,
    StepMetadata,
    StepSummary,
    WholeDevice,
)
from tb_memplugin.store.envelope import RERECORD, check_version, unpacked
from tb_memplugin.trace import Category, Moment, Phase, Reason
from tb_memplugin.trace.tables import DEEPEST, is_too_deep

SCHEMA_VERSION = 1

MOST_SUMMARY_BYTES = 64 << 20
SUMMARY_OF_ANY_BLOB, SUMMARY_PER_BYTE = 4 << 20, 100
"""The largest decompressed size: at all, of a small blob, and per byte of the blob. More is an attack."""

MOST_DEVICES = 1024
"""More than torch can number, of all its types that have an allocator. More in a window is an attack."""

FIRST_CATEGORIES = 12
"""How many categories the first version had."""

_SUBJECT = "A step's summary has"


def pack(summary: StepSummary) -> bytes:
    """Serialize and compress a summary."""
    raw = summary.SerializeToString()
    packed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(raw)
    return StepBlob(version=SCHEMA_VERSION, raw_size=len(raw), summary=packed).SerializeToString()


def read_summary(blob: bytes, where: str = "", described: StepMetadata | None = None) -> StepSummary:
    """Return the summary in a blob.

    Args:
        described: the metadata of the step's tag, whose figures are those of the summary; None: not known.

    Raises:
        UnreadableFileError: the blob is damaged, newer than this reader, or contradicts itself or its
            metadata.
    """
    try:
        outer = StepBlob.FromString(blob)
        check_version(_SUBJECT, outer.version, SCHEMA_VERSION, where)
        most = min(MOST_SUMMARY_BYTES, max(SUMMARY_OF_ANY_BLOB, SUMMARY_PER_BYTE * len(outer.summary)))
        summary = StepSummary.FromString(unpacked(outer.summary, outer.raw_size, most))
        _widen(summary)
        check_summary(summary)
        if described is not None and summary.metadata.writer_id != described.writer_id:
            raise UnreadableFileError(
                "The folder has event files of two processes, and TensorBoard keeps one record of this step.",
                where=where,
                fix="Move one of the files to a folder of its own.",
            )
        if described is not None and summary.metadata != described:
            raise ValueError("its figures are not those of its description")
        return summary
    except (DecodeError, zstandard.ZstdError) as error:
        raise UnreadableFileError("A step's summary is damaged.", where=where, fix=RERECORD) from error
    except ValueError as error:
        message = f"A step's summary is damaged ({error})."
        raise UnreadableFileError(message, where=where, fix=RERECORD) from error


def _widen(summary: StepSummary) -> None:
    """Add the columns of later categories to the modules' bytes by category, in place."""
    for device in summary.devices:
        table = device.modules
        rows = len(table.modules)
        width, rest = divmod(len(table.own), rows or 1)
        if rest == 0 and FIRST_CATEGORIES <= width < len(Category):
            own = np.array(table.own, np.int64).reshape(rows, width)
            table.own[:] = np.pad(own, ((0, 0), (0, len(Category) - width))).ravel().tolist()


def read_metadata(content: bytes, where: str = "") -> StepMetadata:
    """Return the metadata that is stored with a step's tag.

    Raises:
        UnreadableFileError: the metadata is damaged, contradicts itself or is newer than this reader. The
            error names `where`.
    """
    damaged = "The description of a step is damaged"
    try:
        metadata = StepMetadata.FromString(content)
        check_version(_SUBJECT, metadata.version, SCHEMA_VERSION, where)
        if not metadata.version:  # as where another program has our name and no content
            raise ValueError("it has no version")
        check_figures(metadata)
    except DecodeError as error:
        raise UnreadableFileError(f"{damaged}.", where=where, fix=RERECORD) from error
    except ValueError as error:
        raise UnreadableFileError(f"{damaged} ({error}).", where=where, fix=RERECORD) from error
    return metadata


Limit = tuple[str, Sequence[int], int, int]
"""What a column of numbers is called, the column, its lowest value, and the one after its highest."""


def check_summary(summary: StepSummary) -> None:
    """Refuse a summary whose parts contradict each other. Nothing checks them again after this.

    Raises:
        ValueError: a column has another length than its neighbors or points outside its table, or parts do
            not sum to their whole.
    """
    for table, lengths in _lengths(summary):
        if len(set(lengths)) > 1:
            raise ValueError(f"the columns of {table} have different lengths")
    for column, numbers, lowest, end in _limits(summary):
        if len(numbers) and not lowest <= min(numbers) <= max(numbers) < end:
            raise ValueError(f"{column} points outside its table")
    if [device.stats for device in summary.metadata.devices] != [device.stats for device in summary.devices]:
        raise ValueError("the figures of its devices are not those of its description")
    for device in summary.devices:
        if any(parent >= row for row, parent in enumerate(device.modules.parents)):
            raise ValueError("a module comes before its parent")
        if is_too_deep(device.modules.parents):
            raise ValueError(f"{DEEPEST:,} modules are in each other")
        for parts, total, expected in _sums(device):
            if total != expected:
                raise ValueError(f"{parts} of {device.name} are {total:,}, and not {expected:,}")
        for contradiction in _contradictions(device):
            raise ValueError(f"{contradiction} ({device.name})")


def check_figures(metadata: StepMetadata) -> None:
    """Refuse figures of a step that no step has.

    Raises:
        ValueError: the peak is not the highest, more stayed than was allocated, a figure is negative, or
            there are more devices than `MOST_DEVICES`.
    """
    if len(metadata.devices) > MOST_DEVICES:
        raise ValueError(f"it has {len(metadata.devices):,} devices")
    for device in metadata.devices:
        stats = device.stats
        alive = (stats.entry_bytes, stats.end_bytes)
        if not 0 <= min(alive) <= max(alive) <= stats.peak_bytes:
            raise ValueError(
                f"of {device.device}, {max(alive):,} bytes are alive at a peak of {stats.peak_bytes:,}"
            )
        if not (0 <= stats.stayed_bytes <= stats.allocated_bytes and 0 <= stats.stayed <= stats.allocations):
            raise ValueError(f"of what was allocated on {device.device}, more stayed than that")


def _lengths(summary: StepSummary) -> Iterator[tuple[str, list[int]]]:
    yield "modules", [len(summary.modules.keys), len(summary.modules.classes)]
    for name, spans in (("phases", summary.phases), ("calls", summary.calls)):
        yield name, _all(spans, "starts", "lengths", "names", "depths", "phases")
    for device in summary.devices:
        peak, curve = device.peak, device.curve
        for parts in (peak.by_category, peak.by_operator, peak.by_phase):
            yield "the peak", _all(parts, "keys", "bytes", "counts")
        yield "the largest allocations", _largest(peak.largest)
        yield "the modules' sizes", _modules(device.modules)
        yield "the curve", [curve.columns, len(curve.low), len(curve.high)]
        yield "the reserve", [curve.columns if curve.reserved else 0, len(curve.reserved)]
        yield from (
            ("an account's causes", _all(account, "causes", "cause_bytes")) for account in device.accounts
        )
        yield from (
            ("a whole device's parts", _all(reading, "parts", "part_bytes"))
            for reading in device.whole_devices
        )
        yield "the curve's parts", [curve.columns * len(curve.categories), len(curve.stacks)]


def _sums(device: DeviceSummary) -> Iterator[tuple[str, int, int]]:
    """Yield what parts are called, their sum, and the whole, in bytes."""
    peak, curve = device.peak, device.curve
    yield "the bytes of the peak", peak.bytes, device.stats.peak_bytes
    for by in ("category", "operator", "phase"):
        yield f"the peak's bytes by {by}", sum(getattr(peak, f"by_{by}").bytes), peak.bytes
    yield "the peak's bytes by module", sum(device.modules.own), peak.bytes
    if curve.columns:
        # Each row consists of differences from column to column.
        high, drawn = list(curve.high), np.array(curve.stacks, np.int64).reshape(-1, curve.columns)
        yield "the curve's highest bytes", max(accumulate(high)), device.stats.peak_bytes
        sums = drawn.sum(axis=0).tolist()
        wrong = next((column for column in range(curve.columns) if sums[column] != high[column]), 0)
        yield f"the curve's parts in column {wrong}", sums[wrong], high[wrong]


def _contradictions(device: DeviceSummary) -> Iterator[str]:
    """Yield what is said of the peak that cannot be, or that is said in another way elsewhere."""
    peak, table, stats = device.peak, device.modules, device.stats
    if (peak.event, peak.time_ns) != (stats.peak_event, stats.peak_time_ns):
        yield "the peak is at another event or time than in the figures"
    for parts in (peak.by_category, peak.by_operator, peak.by_phase):
        if len(set(parts.keys)) != len(parts.keys):
            yield "a part of the peak stands twice"
        if min((*parts.bytes, *parts.counts), default=0) < 0:
            yield "a part of the peak is negative"
    if min((*table.own, *table.own_count), default=0) < 0:
        yield "a module has a negative part of the peak"
    if sum(peak.largest.bytes) > peak.bytes:
        yield "the largest allocations are more than the peak"
    own = np.array(table.own, object).reshape(-1, len(Category)).sum(axis=0)
    of_modules = {category.name.lower(): own[category] for category in Category if own[category]}
    by_category = zip(peak.by_category.keys, peak.by_category.bytes, strict=True)
    if of_modules != {key: size for key, size in by_category if size}:
        yield "the categories of the modules are not those of the peak"
    yield from _curve_contradictions(device)


def _curve_contradictions(device: DeviceSummary) -> Iterator[str]:
    curve, stats = device.curve, device.stats
    if not curve.columns:
        return
    low, high = list(accumulate(curve.low)), list(accumulate(curve.high))
    if (curve.peak_event, curve.peak_time_ns) != (stats.peak_event, stats.peak_time_ns):
        yield "the curve's peak is at another event or time than in the figures"
    if curve.peak_column >= curve.columns or high[curve.peak_column] != stats.peak_bytes:
        yield "the curve's peak is in another column"
    if any(lowest > highest for lowest, highest in zip(low, high, strict=True)):
        yield "the curve's lowest bytes are above its highest"
    if len(set(curve.categories)) != len(curve.categories):
        yield "a category stands twice in the curve"


def _largest(blocks: Allocations) -> list[int]:
    names = ("bytes", "addresses", "categories", "phases", "modules", "operators", "names")
    later = [name for name in ("reasons", "module_confidences", "tensors") if getattr(blocks, name)]
    return _all(blocks, *names, "born_ns", "freed_ns", *later)


def _modules(table: ModuleTable) -> list[int]:
    names = ("parents", "own_count", "peak_inside", "calls", "allocations", "allocated_bytes")
    rows = _all(table, "modules", *names, "forward_ns", "backward_ns")
    return [*(len(Category) * length for length in rows), len(table.own)]


def _all(
    message: Account | WholeDevice | Parts | Allocations | ModuleTable | Spans, *names: str
) -> list[int]:
    return [len(getattr(message, name)) for name in names]


def _limits(summary: StepSummary) -> Iterator[Limit]:
    modules = len(summary.modules.keys)
    yield "a module's class", summary.modules.classes, 0, len(summary.modules.class_names) + 1
    yield "a call's module", summary.calls.names, 0, modules
    yield "a call's phase", summary.calls.phases, 0, len(Phase)
    yield "a phase", [*summary.phases.names, *summary.phases.phases], 0, len(Phase)
    for device in summary.devices:
        yield from _device_limits(device, modules)


def _device_limits(device: DeviceSummary, modules: int) -> Iterator[Limit]:
    largest, table = device.peak.largest, device.modules
    yield "the peak's phase", [device.peak.phase], 0, len(Phase)
    yield "an allocation's category", largest.categories, 0, len(Category)
    yield "an allocation's reason", largest.reasons, 0, len(Reason)
    yield "how sure an allocation's module is", largest.module_confidences, 0, 101
    yield "an allocation's phase", largest.phases, 0, len(Phase)
    yield "an allocation's module", largest.modules, -1, modules
    yield "a row's module", table.modules, -1, modules
    yield "a row's parent", table.parents, -1, len(table.parents)
    yield "an account's moment", [account.moment for account in device.accounts], 0, len(Moment)
    for reading in device.whole_devices:
        yield "a whole device's moment", [reading.moment, reading.read_at], 0, len(Moment)
    yield "the curve's category", device.curve.categories, 0, len(Category)
