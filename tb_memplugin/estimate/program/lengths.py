"""Whether a whole number that a program reads becomes a length: a bound of a slice, a range, a tensor's size.

An index that was chosen or drawn may be any (values.py), a length may not. The compiled instructions of the
function that reads the number say what it does with it, in place or in a variable; what other functions do
with it is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dis import Instruction
from functools import lru_cache
from types import CodeType, FrameType

from tb_memplugin.estimate.answer.hints import asking_frame
from tb_memplugin.estimate.program.checks import JUMPS, instructions_of, left, operand

_SIZED = frozenset(
    (
        *("range", "arange", "empty", "zeros", "ones", "rand", "randn", "new_empty", "new_zeros", "new_ones"),
        *("narrow", "expand", "repeat", "view", "reshape"),
    )
)
"""Functions and methods whose arguments are sizes."""

_SLICES = ("BUILD_SLICE", "BINARY_SLICE", "STORE_SLICE")
_NAMES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_KEEPS = (
    *("BINARY_OP", "BINARY_ADD", "BINARY_SUBTRACT", "BINARY_MULTIPLY"),
    *("BUILD_TUPLE", "BUILD_LIST", "CALL"),
)
"""Beginnings of instructions whose result still has the number in it."""


def is_length(caller: FrameType | None) -> bool:
    """Whether the function that reads a number now makes a length of it."""
    frame = asking_frame(caller)
    return _is_length(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _is_length(code: CodeType, last: int) -> bool:
    instructions = instructions_of(code)
    read = max(row for row, step in enumerate(instructions) if step.offset <= last)
    waiting, visited = [read], set[int]()
    while waiting:
        row = waiting.pop()
        if row in visited:
            continue
        visited.add(row)
        user = _user(instructions, row)
        if user is None:
            continue
        name = instructions[user].opname
        if name in _SLICES or (name.startswith("CALL") and _callee(instructions, user) in _SIZED):
            return True
        if name in _NAMES:
            waiting += _loads(instructions, instructions[user].argval)
        elif name.startswith(_KEEPS):
            waiting.append(user)
    return False


def _user(instructions: Sequence[Instruction], row: int) -> int | None:
    """Return the row of the instruction that takes the value which one leaves; None if none surely does."""
    depth = 1
    for later in range(row + 1, len(instructions)):
        step = instructions[later]
        if step.opcode in JUMPS:
            return None
        popped = _put(step) - left(step)
        if popped >= depth:
            return later
        depth += left(step)
    return None


def _put(instruction: Instruction) -> int:
    """Return how many values an instruction puts on the stack."""
    name = instruction.opname
    if name in ("LOAD_ATTR", "LOAD_METHOD"):  # a method leaves itself beside its object, which they take
        return left(instruction) + 1
    if name.startswith(("STORE", "DELETE", "POP", "RETURN", "NOP", "PRECALL", "KW_NAMES", "RESUME")):
        return 0
    return max(left(instruction), 1)


def _callee(instructions: Sequence[Instruction], call: int) -> str | None:
    """Return the last name of what a call calls, such as `zeros` of `torch.zeros(n)`."""
    before_arguments = 1 - left(instructions[call]) - (instructions[call].arg or 0)
    callee, depth = None, 0
    for step in operand(instructions, call):
        if depth >= before_arguments and (step.opname, left(step)) != ("LOAD_ATTR", 0):
            break
        depth += left(step)
        callee = step.argval if step.opname.startswith("LOAD_") else callee
    return callee


def _loads(instructions: Sequence[Instruction], variable: object) -> Iterator[int]:
    for row, step in enumerate(instructions):
        if step.opname.startswith("LOAD_") and step.argval == variable:
            yield row
