"""The memory trace and its replay. Imports numpy and nothing bigger."""

from tb_memplugin.trace.kinds import Category, Kind, Phase
from tb_memplugin.trace.replay import Allocations
from tb_memplugin.trace.tables import Device, Events, Module, Spans, StartState, Step, events
from tb_memplugin.trace.trace import MemoryTrace

__all__ = [
    "Allocations",
    "Category",
    "Device",
    "Events",
    "Kind",
    "MemoryTrace",
    "Module",
    "Phase",
    "Spans",
    "StartState",
    "Step",
    "events",
]
