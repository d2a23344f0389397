"""The results of a tracer: figures by layer and by named phase, and the events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.tracer.layers import LayerFigures
from tb_memplugin.trace import MemoryTrace

ROOT = "(root)"
"""The name of the outermost module, whose FQN is empty."""


@dataclass(frozen=True)
class LayerMemoryStats:
    """Figures of one layer, including the layers inside it, in forward and backward.

    The first seven fields are those of Memory Tracer, whose scripts also create such objects and read them
    with `vars()`.

    Attributes:
        layer_name: the layer's FQN, `(root)` for the model itself.
        peak_allocated: highest live bytes on the device while the layer ran.
        peak_reserved: highest bytes that the allocator had reserved meanwhile. If an allocator keeps no
            reserve (as on the CPU), this equals `peak_allocated`.
        total_allocations, total_deallocations: the numbers of allocations and frees.
        avg_fragmentation: mean of (reserved - allocated) / reserved when the layer is entered and left,
            0 to 1.
        duration_ms: time in the layer's forward and backward, milliseconds.
        allocated_bytes: the sum of the bytes of its allocations.
        calls: forward calls.
        forward_ms, backward_ms: the parts of `duration_ms`.
        peak_excess_bytes: without the tracer, `peak_allocated` may be up to this many bytes lower.
    """

    layer_name: str
    peak_allocated: int
    peak_reserved: int
    total_allocations: int
    total_deallocations: int
    avg_fragmentation: float
    duration_ms: float
    allocated_bytes: int = 0
    calls: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    peak_excess_bytes: int = 0


@dataclass(slots=True)
class PhaseMemoryStats:
    """A phase that `track_phase` named: allocated bytes before and after it, and the peak in between."""

    name: str
    before_bytes: int = 0
    after_bytes: int = 0
    peak_bytes: int = 0

    @property
    def delta_bytes(self) -> int:
        """The bytes that the phase left allocated; negative if it freed more than it allocated."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class MemoryEvent:
    """One event, with the device's levels after it. It has the fields of Memory Tracer, also for `vars()`.

    Attributes:
        timestamp: seconds since the trace began.
        event_type: `alloc`, `free`, `layer_enter`, `layer_exit`, or `snapshot` (start and end of the trace).
        size_bytes: the bytes of an alloc or free, else 0.
        layer_name: the layer that ran, None outside all layers.
        allocated_bytes, reserved_bytes: the live bytes, and the bytes that the allocator has reserved.
        fragmentation_ratio: (reserved - allocated) / reserved, 0 if nothing is reserved.
    """

    timestamp: float
    event_type: str
    size_bytes: int
    layer_name: str | None
    allocated_bytes: int
    reserved_bytes: int
    fragmentation_ratio: float


EVENT_TYPES = ("alloc", "free", "layer_enter", "layer_exit", "snapshot")

Row = tuple[int, int, int, int, int, int]
"""(epoch ns, index in `EVENT_TYPES`, bytes, module's row or -1, allocated, reserved)."""


@dataclass(frozen=True, slots=True)
class TracerResult:
    """Everything that was recorded in one `with tracer.trace(...)` block.

    `rows` are the latest events, `dropped` counts older ones that were dropped, and `total` counts both;
    `peak_allocated` and `peak_reserved` are in bytes.
    """

    trace: MemoryTrace
    layers: Mapping[str, LayerMemoryStats]
    phases: Sequence[PhaseMemoryStats]
    rows: Sequence[Row]
    names: Sequence[str]
    start_ns: int
    stop_ns: int
    peak_allocated: int
    peak_reserved: int
    dropped: int
    total: int

    def events(self) -> Iterator[MemoryEvent]:
        """Yield the latest events, oldest first."""
        for time_ns, kind, size, row, allocated, reserved in self.rows:
            yield MemoryEvent(
                timestamp=(time_ns - self.start_ns) / 1e9,
                event_type=EVENT_TYPES[kind],
                size_bytes=size,
                layer_name=self.names[row] if row >= 0 else None,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                fragmentation_ratio=fragmentation(allocated, reserved),
            )


def fragmentation(allocated: int, reserved: int) -> float:
    """Return the share of the reserve that no live block uses, 0 to 1."""
    return max(0.0, (reserved - allocated) / reserved) if reserved > 0 else 0.0


def layer_names(names: ModuleNames) -> list[str]:
    """Return the display name of each row: the FQN, or `(root)`."""
    return [module.key or ROOT for module in names.modules]


def layer_stats(
    names: ModuleNames,
    figures: Sequence[LayerFigures],
    reserved: Sequence[int] | None = None,
    mean_fragmentation: Sequence[float] | None = None,
) -> dict[str, LayerMemoryStats]:
    """Return the figures of layers that ran, parents before children, each including the layers inside it.

    Args:
        figures: the figures of each row without the layers inside it; changed in place.
        reserved: the highest reserve of each row, in bytes; None if it equals the peak.
        mean_fragmentation: the mean fragmentation of each row; None means 0.
    """
    totals = list(figures)
    tops = list(reserved) if reserved is not None else []
    called = [layer.calls > 0 for layer in totals]
    for row in range(len(totals) - 1, 0, -1):
        parent = names.modules[row].parent
        if parent < 0:
            continue
        inner, outer = totals[row], totals[parent]
        if inner.peak >= outer.peak:
            outer.peak, outer.excess = inner.peak, max(inner.excess, outer.excess)
        outer.allocations += inner.allocations
        outer.allocated_bytes += inner.allocated_bytes
        outer.frees += inner.frees
        outer.backward_ns += inner.backward_ns
        if not called[parent]:
            outer.forward_ns += inner.forward_ns
        if tops:
            tops[parent] = max(tops[parent], tops[row])
    stats = {}
    for row, (name, layer) in enumerate(zip(layer_names(names), totals, strict=True)):
        if layer.peak >= 0:
            ratio = mean_fragmentation[row] if mean_fragmentation is not None else 0.0
            stats[name] = _stats(name, layer, tops[row] if tops else layer.peak, ratio)
    return stats


def _stats(name: str, figures: LayerFigures, reserved: int, ratio: float) -> LayerMemoryStats:
    return LayerMemoryStats(
        layer_name=name,
        peak_allocated=figures.peak,
        peak_reserved=reserved,
        total_allocations=figures.allocations,
        total_deallocations=figures.frees,
        avg_fragmentation=ratio,
        duration_ms=(figures.forward_ns + figures.backward_ns) / 1e6,
        allocated_bytes=figures.allocated_bytes,
        calls=figures.calls,
        forward_ms=figures.forward_ns / 1e6,
        backward_ms=figures.backward_ns / 1e6,
        peak_excess_bytes=figures.excess[1] if figures.excess[0] == figures.peak else 0,
    )
