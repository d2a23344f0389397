"""Conditions: an estimate assumes that checks pass, as in a run that goes well, and that the program goes on.

Two kinds are found in the function that reads the value: a condition that only decides whether an error is
raised (`if not valid.all(): raise ...`, `assert`, `torch._check`), by what follows, and a question for values
that are not finite, by what is read. torch.distributions checks its arguments in the first way, many training
loops their loss in the second. Its compiled instructions say so; its source need not be there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dis import HAVE_ARGUMENT, Instruction, get_instructions, hasjabs, hasjrel, opmap, stack_effect
from functools import lru_cache
from types import CodeType, FrameType

import torch

from tb_memplugin.estimate.answer.hints import asking_frame

_FINITE = {"isnan": False, "isinf": False, "isfinite": True}
"""Functions that look for values that are not finite, and their answer where there are none."""

_SAME_VALUE = ("CALL", "TO_BOOL", "COPY", "EXTENDED_ARG", "NOP", "PRECALL")
"""Beginnings of instructions between a read and the jump that leave the truth as it is."""

_OF_MODULES = ("LOAD_GLOBAL", "LOAD_NAME")
"""Instructions that load a variable of the module or a built-in function, in functions and outside."""

_OF_OBJECTS = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that load an attribute: torch's `all`, not Python's."""

_GENERATES = re.compile(r"transformers[/\\](generation[/\\]|models[/\\]\w+[/\\]generation_)")
"""Files with transformers' loops over tokens."""

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RERAISE")
JUMPS = frozenset((*hasjabs, *hasjrel))


def passing(caller: FrameType | None) -> bool | None:
    """Return the truth with which the check of the line that calls passes; None if the line is no check."""
    frame = asking_frame(caller)
    if frame.f_code.co_filename == torch.__file__ and frame.f_code.co_name.startswith("_check"):
        return True
    if frame.f_code.co_name == "_engine_run_backward" and torch.is_anomaly_check_nan_enabled():
        return False  # no gradient is NaN
    return _passing(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _passing(code: CodeType, last: int) -> bool | None:
    """Return the truth with which a value that is read at offset `last` raises no error."""
    instructions = instructions_of(code)
    rows = {step.offset: row for row, step in reversed(list(enumerate(instructions)))}
    read = max(row for offset, row in rows.items() if offset <= last)
    if _compares_with_a_truth(instructions, read):
        return None
    jump, negated = _condition(instructions, read)
    if jump == len(instructions):
        return _finite(instructions, read)
    jumps_if = ("TRUE" in instructions[jump].opname) ^ negated
    there, next_row = rows[instructions[jump].argval], jump + 1
    raises_there = _raises(instructions, rows, there, next_row)
    raises_next = _raises(instructions, rows, next_row, there)
    if raises_there != raises_next:
        return jumps_if if raises_next else not jumps_if
    return _finite(instructions, read)


def generating(caller: FrameType | None) -> bool | None:
    """Return the truth with which transformers generates unpadded sequences to their greatest length.

    Its files ask whether a mask is 1 everywhere, whether a sequence ends with padding, and after each token
    whether all are finished, or with beams whether some are not. None for questions of other files.
    """
    frame = asking_frame(caller)
    if not _GENERATES.search(frame.f_code.co_filename):
        return None
    return _generating(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _generating(code: CodeType, last: int) -> bool:
    instructions = instructions_of(code)
    read = max(row for row, step in enumerate(instructions) if step.offset <= last)
    names = [str(step.argval) for step in operand(instructions, read) if step.opname in _OF_OBJECTS]
    return any(name == "all" or "has_unfinished" in name for name in names)


def going_on(caller: FrameType | None) -> bool | None:
    """Return the truth with which a program goes on: does what an `if` holds, but leaves no loop or function.

    None where no truth does: of two ways that do different things none is more than the other, unless it is
    asked whether a mask selects `any`, and a loop that ends by values would not end.
    """
    frame = asking_frame(caller)
    return _going_on(frame.f_code, frame.f_lasti)


def holds_if_equal(caller: FrameType | None) -> bool:
    """Return the truth of the comparison that is asked for now, if both of its sides are equal."""
    frame = asking_frame(caller)
    steps = [step for step in instructions_of(frame.f_code) if step.offset <= frame.f_lasti]
    compared = next((step for step in reversed(steps) if step.opname == "COMPARE_OP"), None)
    return compared is not None and compared.argval in ("<=", ">=", "==")


@lru_cache(maxsize=256)
def _going_on(code: CodeType, last: int) -> bool | None:
    instructions = instructions_of(code)
    rows = {step.offset: row for row, step in reversed(list(enumerate(instructions)))}
    read = max(row for offset, row in rows.items() if offset <= last)
    jump, negated = _condition(instructions, read)
    if instructions[read].opname.startswith("CALL"):  # either of two numbers
        return True if _first_name(instructions, read) in ("max", "min") else None
    if jump == len(instructions) or _compares_with_a_truth(instructions, read):
        return None
    there = rows[instructions[jump].argval]
    if there <= jump:  # the end of a loop
        return None
    jumps_if = ("TRUE" in instructions[jump].opname) ^ negated
    loop = _loop_around(instructions, rows, jump)
    starts = (_after_all_conditions(instructions, rows, jump), there)
    body, beyond = (_reached(instructions, rows, start, loop) for start in starts)
    if there in body:  # what the `if` holds goes on after it
        return not jumps_if
    if body & beyond:  # two ways meet again: one of them may do nothing but choose what is there
        only = [any(_calls(instructions[row]) for row in way) for way in (body - beyond, beyond - body)]
        if only[0] != only[1]:
            return only[0] ^ jumps_if
        return True if "any" in _names(instructions, read) else None  # a mask selects everything
    goes_on = [
        any("BACKWARD" in instructions[row].opname if loop else _calls(instructions[row]) for row in way)
        for way in (body, beyond)
    ]
    if goes_on not in (([True, False], [False, True], [True, True]) if loop else ([False, True],)):
        return None
    in_body = len(body) > len(beyond) if goes_on[0] == goes_on[1] else goes_on[0]
    return in_body ^ jumps_if


def _calls(instruction: Instruction) -> bool:
    return instruction.opname.startswith("CALL")


def _first_name(instructions: Sequence[Instruction], read: int) -> object:
    names = [step.argval for step in operand(instructions, read) if step.opname in _OF_MODULES]
    return names[0] if names else None


def _after_all_conditions(instructions: Sequence[Instruction], rows: dict[int, int], jump: int) -> int:
    """Return the row after the last of the conditions that `and` joins, of which one is at row `jump`."""
    start, there = jump + 1, instructions[jump].argval
    for row in range(start, len(instructions)):
        step = instructions[row]
        if step.opcode in JUMPS and step.argval == there:
            start = row + 1
        elif step.opcode in JUMPS or step.opname.startswith(("STORE", *_ENDS)):
            break
    return start


def _loop_around(
    instructions: Sequence[Instruction], rows: dict[int, int], row: int
) -> tuple[int, int] | None:
    """Return the first and last row of the innermost loop around a row, None outside of loops."""
    loops = [
        (rows[step.argval], end)
        for end, step in enumerate(instructions)
        if end > row and step.opcode in JUMPS and rows[step.argval] <= row
    ]
    firsts = {first for first, _ in loops}
    innermost = max(firsts, default=None)
    return None if innermost is None else (innermost, max(end for first, end in loops if first == innermost))


def _reached(
    instructions: Sequence[Instruction], rows: dict[int, int], start: int, loop: tuple[int, int] | None
) -> set[int]:
    """Return the rows that are reached from one without leaving the loop, or beginning it anew."""
    waiting, visited = [start], set[int]()
    first, end = loop or (0, len(instructions) - 1)
    while waiting:
        row = waiting.pop()
        if row in visited or not first <= row <= end:
            continue
        visited.add(row)
        instruction = instructions[row]
        ends = instruction.opname in _ENDS or instruction.opname == "RAISE_VARARGS"
        jumps = instruction.opcode in JUMPS
        if jumps and rows[instruction.argval] > row:
            waiting.append(rows[instruction.argval])
        if not ends and (not jumps or "IF" in instruction.opname or "ITER" in instruction.opname):
            waiting.append(row + 1)
    return visited


def instructions_of(code: CodeType) -> list[Instruction]:
    """Return the instructions of a function, those of two variables as two."""
    steps: list[Instruction] = []
    for step in get_instructions(code):
        if isinstance(step.argval, tuple) and step.opname.count("_FAST") == 2:
            names = step.opname.replace("_BORROW", "").split("_FAST", 1)
            for name, variable in zip((f"{names[0]}_FAST", names[1][1:]), step.argval, strict=True):
                steps.append(step._replace(opname=name, opcode=opmap[name], arg=0, argval=variable))
        elif step.opname != "NOT_TAKEN":
            steps.append(step)
    return steps


def _condition(instructions: Sequence[Instruction], read: int) -> tuple[int, bool]:
    """Return the row of the jump that the value decides, and whether it is negated before.

    The row is the number of instructions if something else is done with the value.
    """
    negated = False
    for row in range(read, len(instructions) - 1):
        name = instructions[row].opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            return row, negated
        negated ^= name == "UNARY_NOT"
        if name != "UNARY_NOT" and not name.startswith(_SAME_VALUE) and not _is_kept(instructions, row):
            break
    return len(instructions), negated


def _is_kept(instructions: Sequence[Instruction], row: int) -> bool:
    """Whether an instruction stores the value in a variable that the next one loads, or is that next one."""
    first, second = instructions[row], instructions[row + 1]
    if first.opname.startswith("LOAD"):
        first, second = instructions[row - 1], first
    is_pair = first.opname.startswith("STORE") and second.opname.startswith("LOAD")
    return is_pair and first.argval == second.argval


def _raises(instructions: Sequence[Instruction], rows: dict[int, int], start: int, other: int) -> bool:
    """Whether every way from a row on ends with an error; ways to the `other` branch do not count."""
    waiting, visited, raised = [start], {other}, False
    goal = _exit(instructions, other)
    while waiting:
        row = waiting.pop()
        if row in visited or (goal and _exit(instructions, row) == goal):
            continue
        visited.add(row)
        instruction = instructions[row]
        if instruction.opname == "RAISE_VARARGS":
            raised = True
            continue
        if instruction.opname in _ENDS or row + 1 == len(instructions):
            return False
        if instruction.opcode in JUMPS:
            waiting.append(rows[instruction.argval])
        if instruction.opcode not in JUMPS or "IF" in instruction.opname or "ITER" in instruction.opname:
            waiting.append(row + 1)
    return raised


def _exit(instructions: Sequence[Instruction], row: int) -> list[tuple[str, object]]:
    """Return the instructions of a `return` of a constant, of which there may be copies; none for others."""
    pair = [(step.opname, step.argval) for step in instructions[row : row + 2]]
    if pair and pair[0][0] == "RETURN_CONST":
        return pair[:1]
    return pair if [name for name, _ in pair] == ["LOAD_CONST", "RETURN_VALUE"] else []


def operand(instructions: Sequence[Instruction], read: int) -> Sequence[Instruction]:
    """Return the instructions that compute what is read, found by what each leaves on the stack."""
    reader = instructions[read]
    wanted = 1 if reader.opcode in JUMPS else 1 - left(reader)
    first, depth = read, 0
    while first and depth < wanted and instructions[first - 1].opcode not in JUMPS:
        first -= 1
        depth += left(instructions[first])
    return instructions[first : read + 1]


def left(instruction: Instruction) -> int:
    """Return by how many values an instruction raises the stack."""
    if instruction.opname in ("PRECALL", "CALL"):  # Python 3.11 divides the effect among them
        return 0 if instruction.opname == "PRECALL" else -1 - (instruction.arg or 0)
    argument = instruction.arg if instruction.opcode >= HAVE_ARGUMENT else None
    return stack_effect(instruction.opcode, argument, jump=False)


def _compares_with_a_truth(instructions: Sequence[Instruction], read: int) -> bool:
    """Whether the condition is like `x.any() == False`, true where the value that is read is not."""
    around = [*operand(instructions, read), *instructions[read + 1 : read + 4]]
    compares = any(instruction.opname in ("COMPARE_OP", "IS_OP") for instruction in around)
    return compares and any(
        instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, bool) for instruction in around
    )


def _names(instructions: Sequence[Instruction], read: int) -> list[str]:
    return [str(instruction.argval) for instruction in operand(instructions, read)]


def _finite(instructions: Sequence[Instruction], read: int) -> bool | None:
    answers = {_FINITE[name] for name in _names(instructions, read) if name in _FINITE}
    inverted = sum(step.opname == "UNARY_INVERT" for step in operand(instructions, read)) % 2 == 1
    return answers.pop() ^ inverted if len(answers) == 1 else None
