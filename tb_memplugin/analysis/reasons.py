"""Why a block has its category: one sentence, from the reason that its source recorded."""

from __future__ import annotations

from collections.abc import Callable

from tb_memplugin.analysis.moments import LiveAllocation, live_allocation
from tb_memplugin.trace import Category, MemoryTrace, Phase, Reason
from tb_memplugin.trace.tables import NOT_NAMED, OUTSIDE, ROOT

_PHASES = {
    Phase.OTHER: "outside forward, backward and optimizer",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in an optimizer step",
    Phase.BEFORE: "before the window",
}

_POINTERS = {
    Category.PARAMETER: "it is the memory of a parameter",
    Category.BUFFER: "it is the memory of a buffer",
    Category.GRADIENT: "it was in .grad of a parameter",
    Category.OPTIMIZER_STATE: "it was in an optimizer's state",
}


def why(trace: MemoryTrace, row: int) -> str:
    """Return why an allocation has its category, as one sentence without a full stop.

    Args:
        row: a row of `trace.allocations`.
    """
    return reason_of(live_allocation(trace, row))


def reason_of(block: LiveAllocation) -> str:
    """Return why a block has its category, as one sentence without a full stop: `gradient of w: it was …`."""
    sentence = f"{_subject(block)}: {_SENTENCES[block.reason](block)}"
    if block.module_confidence < 100 and block.module not in (None, NOT_NAMED):
        sentence += f" (the module is inferred, {block.module_confidence} % sure)"
    return sentence


def _subject(block: LiveAllocation) -> str:
    kind = block.category.key.replace("_", " ")
    if block.reason is Reason.HELD and block.name:
        return f"{kind} {block.name}"
    return f"{kind} ({block.name})" if block.name and block.reason is not Reason.GROWN else kind


def _held(block: LiveAllocation) -> str:
    pointed = _POINTERS.get(block.category, "the recorder knew its tensor")
    return f"{pointed}, by its address"


def _in_forward(block: LiveAllocation) -> str:
    freed = "and not freed when its operator ended"
    return f"allocated in the forward{_of_module(block)} {freed}"


def _in_recomputation(block: LiveAllocation) -> str:
    return f"allocated by a module that ran again during backward{_of_module(block)}"


def _freed_in_backward(block: LiveAllocation) -> str:
    return f"allocated in backward{_of_module(block)} and freed in backward"


def _outlives_backward(block: LiveAllocation) -> str:
    return f"allocated in backward{_of_module(block)} and still alive after it"


def _freed_in_operator(block: LiveAllocation) -> str:
    return f"freed before {block.operator or 'the operator that allocated it'} returned"


def _unknown(block: LiveAllocation) -> str:
    return f"allocated {_PHASES[block.phase]}; no rule says what it is"


def _communicates(block: LiveAllocation) -> str:
    return f"allocated by {block.operator}" if block.operator else "allocated to communicate"


def _grown(block: LiveAllocation) -> str:
    growth = block.name or "grows by the same bytes in each call"
    return f"{growth}, where each block replaces that of the call before"


def _of_module(block: LiveAllocation) -> str:
    module = block.module
    if module is None or module == NOT_NAMED:
        return ""
    if module.startswith(OUTSIDE):
        return " outside all modules"
    return f" of {module or ROOT}"


def _fixed(text: str) -> Callable[[LiveAllocation], str]:
    return lambda _: text


_SENTENCES: dict[Reason, Callable[[LiveAllocation], str]] = {
    Reason.NOT_RECORDED: _fixed("the recording does not say why"),
    Reason.NO_RULE: _unknown,
    Reason.HELD: _held,
    Reason.ENTERED: _fixed("it was an argument of a module called from outside all modules"),
    Reason.FREED_IN_OPERATOR: _freed_in_operator,
    Reason.IN_FORWARD: _in_forward,
    Reason.IN_RECOMPUTATION: _in_recomputation,
    Reason.FREED_IN_BACKWARD: _freed_in_backward,
    Reason.OUTLIVES_BACKWARD: _outlives_backward,
    Reason.FREED_IN_STEP: _fixed("allocated in an optimizer step and freed by its end"),
    Reason.OUTLIVES_STEP: _fixed("allocated in an optimizer step and still alive after it"),
    Reason.NOT_IN_STATE: _fixed(
        "allocated in an optimizer step and still alive after it, but not in the optimizer's state"
    ),
    Reason.FREED_BEFORE_PHASE: _fixed(
        "allocated outside forward, backward and optimizer, and freed before the next of them"
    ),
    Reason.ALIVE_IN_FORWARD: _fixed("made outside modules before a forward, and released after it"),
    Reason.KEPT: _fixed("made outside modules, and kept for more than a step; no rule says what it is"),
    Reason.COMMUNICATION_OPERATOR: _communicates,
    Reason.SHARDING: _fixed("allocated while FSDP2 gathered parameters or reduced gradients"),
    Reason.SIZE: _fixed("it has a size that only such blocks have"),
    Reason.SHARED_BATCH: _fixed(
        "shared memory from before the window that was freed in it and that no model or optimizer holds"
    ),
    Reason.LABEL: _fixed("the program labelled it so"),
    Reason.FRAMES: _fixed("functions in its call stack make such blocks"),
    Reason.FREED_BY_AUTOGRAD: _fixed("freed in backward, so a forward saved it for that"),
    Reason.SAME_SIZES: _fixed(
        "with others, it has exactly the sizes of blocks that belong together with such blocks"
    ),
    Reason.IN_FILE: _fixed("the file says so"),
    Reason.KERNEL_MODEL: _fixed("the estimate knows that this operator takes such memory"),
    Reason.REACHABLE: _fixed("it was alive when the recording began, where a search of all tensors found it"),
    Reason.GROWN: _grown,
    Reason.PASSED_BACK: _fixed("a module returned it, and received it again in its next call"),
    Reason.WRITTEN_IN_CALLS: _fixed(
        "each call of a module received it and wrote to it, and nothing wrote to it between the calls"
    ),
    Reason.COPY: _fixed("it is one of many with the names or the sizes of all parameters, in their order"),
}
