"""The enumerations of a trace: kinds of events, categories of memory, phases of a training step."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What an event did. The values are written to disk: append new ones, never renumber."""

    ALLOC = 0
    FREE_COMPLETED = 1
    """The block was returned to the allocator and is no longer live."""
    FREE_REQUESTED = 2
    """The owner released the block, but another stream may still use it."""
    STORAGE_FREE = 3
    """A storage of the start state was freed. tb_memplugin observed it; the profiler did not report it."""
    SEGMENT_ALLOC = 4
    SEGMENT_FREE = 5
    SEGMENT_MAP = 6
    SEGMENT_UNMAP = 7
    OOM = 8
    MARK = 9


class Category(IntEnum):
    """What a block is used for, in the order in which charts stack it. The values are written to disk."""

    PARAMETER = 0
    BUFFER = 1
    OPTIMIZER_STATE = 2
    GRADIENT = 3
    ACTIVATION = 4
    AUTOGRAD_DETAIL = 5
    RECOMPUTED = 6
    TEMPORARY = 7
    WORKSPACE = 8
    INPUT = 9
    COMMUNICATION = 10
    UNKNOWN = 11

    @property
    def key(self) -> str:
        """The name in JSON and URLs: `optimizer_state`."""
        return self.name.lower()


class Phase(IntEnum):
    """The part of a training step in which an event happened. The values are written to disk."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    BEFORE = 4
    """Before the profiled window: the phase of blocks that were alive when it began."""

    @property
    def key(self) -> str:
        """The name in JSON and URLs: `backward`."""
        return self.name.lower()
