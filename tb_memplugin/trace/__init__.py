"""The memory trace and its replay. Imports nothing larger than numpy."""

from tb_memplugin.trace.allocator import Annotations, OutOfMemory, Segments
from tb_memplugin.trace.counters import (
    Cause,
    Counter,
    CounterReading,
    DevicePart,
    Moment,
    WholeDevice,
    at_every_moment,
)
from tb_memplugin.trace.kinds import STACKING_ORDER, Category, Kind, Phase, Reason
from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.replay import Allocations
from tb_memplugin.trace.tables import (
    Device,
    Events,
    Module,
    Spans,
    StartState,
    Step,
    TensorMetadata,
    events,
    start_state,
)
from tb_memplugin.trace.trace import MemoryTrace

__all__ = [
    "STACKING_ORDER",
    "Allocations",
    "Annotations",
    "Category",
    "Cause",
    "Counter",
    "CounterReading",
    "Device",
    "DevicePart",
    "Events",
    "Kind",
    "MemoryTrace",
    "Module",
    "Moment",
    "Note",
    "OutOfMemory",
    "Phase",
    "Reason",
    "Segments",
    "Spans",
    "StartState",
    "Step",
    "TensorMetadata",
    "WholeDevice",
    "at_every_moment",
    "events",
    "start_state",
]
