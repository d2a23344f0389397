"""Checks of values in a program, which an estimate assumes to pass, as they do in a run that goes well.

Two kinds are found in the source of the line that reads the value: a condition that only decides whether an
error is raised (`if not valid.all(): raise ...`, `assert`, `torch._check`), and one that asks for values that
are not finite. torch.distributions checks its arguments in the first way, many training loops their loss in
the second.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

import torch

from tb_memplugin.estimate.answer.hints import asking_frame

_FINITE = {"isnan": False, "isinf": False, "isfinite": True}
"""Functions that look for values that are not finite, and their answer where there are none."""


_READING = frozenset({"all", "any", "equal", "allclose", "is_nonzero", "item", "_is_all_true", *_FINITE})
"""Functions that read a truth from a tensor: they tell which part of a condition was asked for."""


def passing(caller: FrameType | None) -> bool | None:
    """Return the truth with which the check of the line that calls passes; None if the line is no check."""
    frame = asking_frame(caller)
    if frame.f_code.co_filename == torch.__file__ and frame.f_code.co_name.startswith("_check"):
        return True
    parts = [
        (part, truth)
        for condition, wanted in _conditions(frame.f_code.co_filename)
        for part, truth in _parts(condition, wanted)
        if part.lineno <= frame.f_lineno <= (part.end_lineno or part.lineno)
    ]
    reading = [pair for pair in parts if _names(pair[0]) & _READING] or parts
    answers = {_answer(part, truth) for part, truth in reading}
    return answers.pop() if len(answers) == 1 else None


@lru_cache(maxsize=64)
def _conditions(file: str) -> tuple[tuple[ast.expr, bool | None], ...]:
    """Return each condition in a file, and the truth with which it raises no error; None if it never does."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    conditions: list[tuple[ast.expr, bool | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            conditions.append((node.test, True))
        elif isinstance(node, ast.If):
            otherwise = True if node.orelse and isinstance(node.orelse[-1], ast.Raise) else None
            conditions.append((node.test, False if isinstance(node.body[-1], ast.Raise) else otherwise))
    return tuple(conditions)


def _parts(condition: ast.expr, truth: bool | None) -> Iterator[tuple[ast.expr, bool | None]]:
    """Yield the operands of a condition's `not`, `and` and `or`; if each has its truth, so has the whole."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _parts(condition.operand, None if truth is None else not truth)
    elif isinstance(condition, ast.BoolOp):
        for operand in condition.values:
            yield from _parts(operand, truth)
    else:
        yield condition, truth


def _answer(part: ast.expr, truth: bool | None) -> bool | None:
    if isinstance(part, ast.Compare):  # `x.any() == False` is true where the value that is read is not
        named = any(
            isinstance(comparator, ast.Constant) and isinstance(comparator.value, bool)
            for comparator in part.comparators
        )
        return None if named else truth
    if truth is not None:
        return truth
    answers = {answer for name, answer in _FINITE.items() if name in _names(part)}
    return answers.pop() if len(answers) == 1 else None


def _names(part: ast.expr) -> frozenset[str]:
    nodes = tuple(ast.walk(part))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)) | frozenset(
        node.id for node in nodes if isinstance(node, ast.Name)
    )
