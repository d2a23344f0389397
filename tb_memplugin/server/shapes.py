"""JSON objects of docs/http_api.md that several answers contain: statistics, parts, allocations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import get_annotations
from typing import Any, TypedDict, TypeVar

from tb_memplugin.analysis.divisions import Part as AnalysedPart
from tb_memplugin.analysis.moments import LiveAllocation
from tb_memplugin.analysis.reasons import reason_of
from tb_memplugin.proto.recording_pb2 import DeviceStats
from tb_memplugin.store.worker_steps import capacity_bytes, reserved_bytes
from tb_memplugin.trace import Category
from tb_memplugin.trace.notes import Level

Json = dict[str, Any]

Shape = TypeVar("Shape")

CATEGORIES = tuple(category.key for category in Category)


class StepStats(TypedDict):
    """A step's figures of one device."""

    peak_bytes: int
    peak_time_ns: int
    """The peak of the step, and when it was."""
    start_bytes: int
    """Alive when the *window* began; the same for all its steps."""
    end_bytes: int
    """Alive when the step ended."""
    window_peak_bytes: int
    """The highest, within the step, of allocations minus frees since the window began: what was alive before
    is not added."""
    peak_reserved_bytes: int | None
    """Highest reserved bytes; null on the CPU."""
    step_start_ns: int
    step_end_ns: int
    """When the step ran."""
    allocated_bytes: int
    allocations: int
    """What was allocated in the step."""
    stayed_bytes: int
    stayed: int
    """What was allocated in the step and alive at its end."""
    capacity_bytes: int | None
    """The memory of the device."""


class Sum(TypedDict):
    """Allocations together."""

    bytes: int
    """The sum of their bytes."""
    count: int
    """How many there are."""


class NamedSum(Sum):
    """Allocations together, by name."""

    key: str
    """Their name."""


class RankBytes(TypedDict):
    """Bytes of a rank."""

    worker: str
    device: str
    """Which it is."""
    bytes: int
    """What it has."""


class Part(NamedSum, total=False):
    """A part of memory, by any division."""

    categories: dict[str, int]
    """By module: its bytes by category."""


class LabeledPart(NamedSum):
    """A part of memory, by any division, and how to show its name."""

    label: str
    """What to show for it: for a stack, its leading line."""


class Allocation(TypedDict):
    """A single allocation."""

    bytes: int
    """Requested bytes."""
    category: str
    """Its category."""
    module: str | None
    operator: str | None
    """Whose it is and what allocated it; null if that is not known."""
    phase: str
    """In which it was allocated."""
    name: str | None
    """The name of a parameter."""
    tensor: str | None
    """What lies in it: `float32 [8, 2048]`, with its strides where these are not the usual ones; or null."""
    born_ns: int | None
    """When it was allocated; null: before the window."""
    freed_ns: int | None
    """When it was freed; null: not within the window."""
    address: str
    """Its address, in hexadecimal digits after `0x`."""
    why: str
    """A sentence on why it has its category ([categories.md](categories.md#why-a-block-has-its-category))."""
    module_confidence: int
    """How sure its module is, in percent: 100 where it was recorded, less where it was inferred."""


class Highest(TypedDict):
    """The highest moment of a chart."""

    event: int
    time_ns: int
    """When it is."""
    bytes: int
    """The bytes at this moment."""
    column: int
    """The column of the chart in which it is."""


class Note(TypedDict):
    """What is not exact, and why."""

    code: str
    """What it is about, a word such as `no_times`; `other` in recordings of older versions."""
    level: Level
    """Whether what is shown may mislead."""
    bytes: int | None
    """The memory that it speaks of, or null."""
    device: str
    """The device that it is about; "" if it is about no single one."""
    text: str
    """Its sentences."""


def shape_of(shape: Callable[..., Shape], result: object, **others: Any) -> Shape:
    """Return a TypedDict whose fields are those of the same names of a result, but for `others`."""
    values = {name: getattr(result, name) for name in get_annotations(shape) if name not in others}
    return shape(**values, **others)


def stats_shape(device: DeviceStats) -> StepStats:
    """Return the figures of a step, in bytes and in nanoseconds since the window's epoch."""
    return shape_of(
        StepStats,
        device.stats,
        peak_reserved_bytes=reserved_bytes(device),
        capacity_bytes=capacity_bytes(device),
    )


def parts_shape(parts: Sequence[AnalysedPart]) -> list[Part]:
    """Return parts, in the given order."""
    return [part_shape(part) for part in parts]


def part_shape(part: AnalysedPart) -> Part:
    """Return a part, with its categories where it has some."""
    shape: Part = {"key": part.key, "bytes": part.bytes, "count": part.count}
    if part.categories:
        shape["categories"] = part.categories
    return shape


def allocation_shape(block: LiveAllocation, epoch_ns: int) -> Allocation:
    """Return an allocation; times are nanoseconds since `epoch_ns`."""
    return shape_of(
        Allocation,
        block,
        category=block.category.key,
        phase=block.phase.key,
        born_ns=None if block.born_ns is None else block.born_ns - epoch_ns,
        freed_ns=None if block.freed_ns is None else block.freed_ns - epoch_ns,
        address=hex(block.address),
        why=reason_of(block),
    )
