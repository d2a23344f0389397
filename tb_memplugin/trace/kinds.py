"""The enumerations of a trace: kinds of events, categories of memory, phases of a training step."""

from __future__ import annotations

from enum import EnumMeta, IntEnum
from typing import TYPE_CHECKING


class _LooksUpInC(EnumMeta):
    """Runs no Python code where numpy asks a member's class for `__array_ufunc__`: `column == Kind.ALLOC`.

    numpy drops what is raised there, and `EnumMeta.__getattr__` (until Python 3.11) may raise a Ctrl-C.
    """

    if not TYPE_CHECKING:  # a wrong name of a member stays an error
        __getattr__ = type.__getattribute__


class ColumnEnum(IntEnum, metaclass=_LooksUpInC):
    """An enumeration whose members are values of a numpy array."""


class KeyedEnum(ColumnEnum):
    """An enumeration whose members have a name in JSON and URLs."""

    @property
    def key(self) -> str:
        """The name in JSON and URLs: `optimizer_state`."""
        return self.name.lower()


class Kind(ColumnEnum):
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


SEGMENT_KINDS = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE, Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)
"""The kinds of events that change the reserved memory."""

GROWS, SHRINKS, EXPANDS = SEGMENT_KINDS[::2], SEGMENT_KINDS[1::2], SEGMENT_KINDS[2:]
"""Those by which it grows, by which it shrinks, and those of expandable segments."""


class Category(KeyedEnum):
    """What a block is used for. The values are written to disk: append new ones, never renumber.

    Charts stack them in `STACKING_ORDER`.
    """

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
    CACHE = 12
    """Kept and reused from call to call, such as the keys and values of attention."""
    PARAMETER_COPY = 13
    """A copy of a parameter that is not used as one now: EMA weights, a deepcopy, a clone of a state dict."""


STACKING_ORDER = (
    Category.PARAMETER,
    Category.PARAMETER_COPY,
    Category.BUFFER,
    Category.OPTIMIZER_STATE,
    Category.CACHE,
    Category.GRADIENT,
    Category.ACTIVATION,
    Category.AUTOGRAD_DETAIL,
    Category.RECOMPUTED,
    Category.TEMPORARY,
    Category.WORKSPACE,
    Category.INPUT,
    Category.COMMUNICATION,
    Category.UNKNOWN,
)
"""The categories in the order in which charts stack them, from the bottom: what lives longest comes first."""


MODELS_OWN = (
    Category.PARAMETER,
    Category.PARAMETER_COPY,
    Category.BUFFER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
)
"""Categories that are one holder each: they are spread over all layers."""

NOT_DATA = (*MODELS_OWN, Category.WORKSPACE, Category.COMMUNICATION)
"""Categories that do not grow with the batch."""


class Reason(ColumnEnum):
    """Why a block has its category. The values are written to disk: append new ones, never renumber.

    `analysis.why` makes a sentence of each.
    """

    NOT_RECORDED = 0
    NO_RULE = 1
    """No rule applies: the category is unknown."""
    HELD = 2
    """A parameter, buffer, gradient or optimizer's state pointed to it."""
    ENTERED = 3
    """It was an argument of an outermost module call."""
    FREED_IN_OPERATOR = 4
    IN_FORWARD = 5
    IN_RECOMPUTATION = 6
    FREED_IN_BACKWARD = 7
    OUTLIVES_BACKWARD = 8
    FREED_IN_STEP = 9
    """Allocated in an optimizer step and freed by its end."""
    OUTLIVES_STEP = 10
    """Allocated in an optimizer step, and alive after it."""
    NOT_IN_STATE = 11
    """As `OUTLIVES_STEP`, but not in the state of the optimizer, which is known."""
    FREED_BEFORE_PHASE = 12
    """Allocated between phases, and freed before the next one."""
    ALIVE_IN_FORWARD = 13
    """Allocated between phases before a forward, and alive in it."""
    KEPT = 14
    """Allocated between phases, and kept for longer than a step."""
    COMMUNICATION_OPERATOR = 15
    SHARDING = 16
    """Allocated while FSDP2 gathered parameters or reduced gradients."""
    SIZE = 17
    """It has a size that only such blocks have."""
    SHARED_BATCH = 18
    """Shared memory from before the window that was freed in it, and that no model holds."""
    LABEL = 19
    """The label that the program gave it."""
    FRAMES = 20
    """Functions in its stack."""
    FREED_BY_AUTOGRAD = 21
    """Allocated in no known phase, and freed in backward."""
    SAME_SIZES = 22
    """It and others have exactly the sizes of blocks whose category is known."""
    IN_FILE = 23
    """The file has the category."""
    KERNEL_MODEL = 24
    """The estimate's model of a kernel or a library."""
    REACHABLE = 25
    """A scan of live tensors saw it, under the name in its label."""
    GROWN = 26
    """It replaced a block that was smaller by as much as that replaced another."""
    PASSED_BACK = 27
    """An outermost module call returned it, and a later one received it."""
    COPY = 28
    """It has the values, or the place in a list or dict, of a copy of a parameter."""
    WRITTEN_IN_CALLS = 29
    """Outermost calls of a module received it and wrote to it, and nothing did so between them."""


class Phase(KeyedEnum):
    """The part of a training step in which an event happened. The values are written to disk."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    BEFORE = 4
    """Before the profiled window: the phase of blocks that were alive when it began."""
