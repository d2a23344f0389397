"""The memory trace and its replay. Imports nothing larger than numpy."""

from tb_memplugin.trace.allocator import Annotations, OutOfMemory, Segments
from tb_memplugin.trace.kinds import Category, Kind, Phase
from tb_memplugin.trace.replay import Allocations
from tb_memplugin.trace.tables import Device, Events, Module, Spans, StartState, Step, events, start_state
from tb_memplugin.trace.trace import MemoryTrace

__all__ = [
    "Allocations",
    "Annotations",
    "Category",
    "Device",
    "Events",
    "Kind",
    "MemoryTrace",
    "Module",
    "OutOfMemory",
    "Phase",
    "Segments",
    "Spans",
    "StartState",
    "Step",
    "events",
    "start_state",
]
