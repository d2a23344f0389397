"""Why a block has its category: one sentence, from the reason that its source recorded."""

from __future__ import annotations

from tb_memplugin.analysis.moments import LiveAllocation, live_allocation
from tb_memplugin.trace import Category, MemoryTrace, Phase, Reason
from tb_memplugin.trace.tables import CERTAIN, NOT_NAMED, OUTSIDE, module_text

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
    why = _SENTENCES[block.reason].format(
        phase=_PHASES[block.phase],
        pointer=_POINTERS.get(block.category, "the recorder knew its tensor"),
        operator=block.operator or "the operator that allocated it",
        of_module=_of_module(block),
        communicating=f"by {block.operator}" if block.operator else "to communicate",
        growth=block.name or "grows by the same bytes in each call",
    )
    sentence = f"{_subject(block)}: {why}"
    if block.module_confidence < CERTAIN and block.module not in (None, NOT_NAMED):
        sentence += f" (the module is inferred, {block.module_confidence} % sure)"
    return sentence


def _subject(block: LiveAllocation) -> str:
    kind = block.category.key.replace("_", " ")
    if block.reason is Reason.HELD and block.name:
        return f"{kind} {block.name}"
    return f"{kind} ({block.name})" if block.name and block.reason is not Reason.GROWN else kind


def _of_module(block: LiveAllocation) -> str:
    module = block.module
    if module is None or module == NOT_NAMED:
        return ""
    if module.startswith(OUTSIDE):
        return " outside all modules"
    return f" of {module_text(module)}"


_SENTENCES = {
    Reason.NOT_RECORDED: "the recording does not say why",
    Reason.NO_RULE: "allocated {phase}; no rule says what it is",
    Reason.HELD: "{pointer}, by its address",
    Reason.ENTERED: "it was an argument of a module called from outside all modules",
    Reason.FREED_IN_OPERATOR: "freed before {operator} returned",
    Reason.IN_FORWARD: "allocated in the forward{of_module} and not freed when its operator ended",
    Reason.IN_RECOMPUTATION: "allocated by a module that ran again during backward{of_module}",
    Reason.FREED_IN_BACKWARD: "allocated in backward{of_module} and freed in backward",
    Reason.OUTLIVES_BACKWARD: "allocated in backward{of_module} and still alive after it",
    Reason.FREED_IN_STEP: "allocated in an optimizer step and freed by its end",
    Reason.OUTLIVES_STEP: "allocated in an optimizer step and still alive after it",
    Reason.NOT_IN_STATE: (
        "allocated in an optimizer step and still alive after it, but not in the optimizer's state"
    ),
    Reason.FREED_BEFORE_PHASE: (
        "allocated outside forward, backward and optimizer, and freed before the next of them"
    ),
    Reason.ALIVE_IN_FORWARD: "made outside modules before a forward, and alive in it",
    Reason.KEPT: "made outside modules, and kept for more than a step; no rule says what it is",
    Reason.COMMUNICATION_OPERATOR: "allocated {communicating}",
    Reason.SHARDING: "allocated while FSDP2 gathered parameters or reduced gradients",
    Reason.SIZE: "it has a size that only such blocks have",
    Reason.SHARED_BATCH: (
        "shared memory from before the window that was freed in it and that no model or optimizer holds"
    ),
    Reason.LABEL: "the program labelled it so",
    Reason.FRAMES: "functions in its call stack make such blocks",
    Reason.FREED_BY_AUTOGRAD: "freed in backward, so a forward saved it for that",
    Reason.SAME_SIZES: (
        "with others, it has exactly the sizes of blocks that belong together with such blocks"
    ),
    Reason.IN_FILE: "the file says so",
    Reason.KERNEL_MODEL: "the estimate knows that this operator takes such memory",
    Reason.REACHABLE: "it was alive when the recording began, where a search of all tensors found it",
    Reason.GROWN: "{growth}, where each block replaces that of the call before",
    Reason.PASSED_BACK: "a module returned it, and received it again in its next call",
    Reason.WRITTEN_IN_CALLS: (
        "each call of a module received it and wrote to it, and nothing wrote to it between the calls"
    ),
    Reason.COPY: "it is one of many with the names or the sizes of all parameters, in their order",
}
