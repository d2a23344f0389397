"""The small vocabularies of a trace: what an event is, what memory is for, when it was born."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What happened to memory at an event. Values are written to disk: append, never renumber."""

    ALLOC = 0
    FREE_COMPLETED = 1
    """The block went back to the allocator; from here on it is not live."""
    FREE_REQUESTED = 2
    """The owner let go of the block, but another stream may still use it."""
    STORAGE_FREE = 3
    """A storage of the start state died. Seen by us, not reported by the profiler."""
    SEGMENT_ALLOC = 4
    SEGMENT_FREE = 5
    SEGMENT_MAP = 6
    SEGMENT_UNMAP = 7
    OOM = 8
    MARK = 9


class Category(IntEnum):
    """What a block is for, in the order in which charts stack it. Values are written to disk."""

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
    """The part of a training step in which something happened. Values are written to disk."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    BEFORE = 4
    """Before the profiled window began: the phase of what was alive when it did."""

    @property
    def key(self) -> str:
        """The name in JSON and URLs: `backward`."""
        return self.name.lower()
