"""Hints: the user's answers for tensor values that only a real run knows."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError

_TORCH = str(Path(torch.__file__).parent)
_THIS_PACKAGE = str(Path(__file__).parents[2])
_BETWEEN = re.compile(
    r"tb_memplugin[/\\]estimate[/\\]|torch[/\\](_subclasses|_ops|_tensor|overrides|utils[/\\]_)"
)
"""Files of the frames between the line that reads a value and the estimate."""

KINDS = ("number", "truth", "share", "count")

Hints = Mapping[str, Any] | Callable[["Question"], Any] | None


@dataclass(frozen=True, slots=True)
class Question:
    """A program's question about a tensor's values, which fake tensors do not have.

    Attributes:
        kind: "number" (`.item()` of a float), "count" (of an integer), "truth" (of a boolean), or "share"
            (how many elements a mask selects; the answer is a fraction of them, or their number if an int).
        operator: the operator that reads the value.
        shape, dtype: shape and dtype of the tensor.
        file, line: the innermost frame of the program that is outside torch.
    """

    kind: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    line: int

    @property
    def place(self) -> str:
        """The file name and line, such as `train.py:42`."""
        return f"{Path(self.file).name}:{self.line}"


class Answers(dict[str, Any]):
    """The user's hints by key. `used` are the keys that answered a question."""

    def __init__(self, hints: Mapping[str, Any]) -> None:
        super().__init__(hints)
        self.used: set[str] = set()

    def unused_lines(self) -> list[str]:
        """Return the keys of lines, such as `train.py:42`, at which the program asked nothing."""
        return [key for key in self if key not in KINDS and key not in self.used]


def question(kind: str, operator: Any, tensor: torch.Tensor, caller: FrameType | None = None) -> Question:
    """Return the question that the running program asks now.

    Args:
        caller: the frame that called the operator (`CountingFakeMode.caller`); None if none runs.
    """
    file, line = _program(caller)
    return Question(kind, str(operator), tuple(tensor.shape), tensor.dtype, file, line)


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of the question for an element of this dtype."""
    if dtype is torch.bool:
        return "truth"
    return "number" if dtype.is_floating_point or dtype.is_complex else "count"


def answer(hints: Hints, asked: Question) -> Any:
    """Return the user's answer, None if there is none. A hint for the line goes before one for the kind."""
    if hints is None:
        return None
    if callable(hints):
        return hints(asked)
    path = Path(asked.file).as_posix()
    for key, value in hints.items():
        name, _, line = key.rpartition(":")
        if name and line == str(asked.line) and f"/{path}".endswith(f"/{name}"):
            if isinstance(hints, Answers):
                hints.used.add(key)
            return value
    return hints.get(asked.kind)


def checked(hints: Any) -> Hints:
    """Return the hints after a check of their form, a mapping as `Answers`.

    Raises:
        MemPluginError: they are not a mapping, a function or None; or a key matches no possible question.
    """
    if hints is None or callable(hints) or isinstance(hints, Answers):
        return hints  # type: ignore[no-any-return]  # the user's function
    if not isinstance(hints, Mapping):
        raise MemPluginError(
            f"hints is a {type(hints).__name__}.",
            where="MemoryEstimator",
            fix='Give a dict such as {"train.py:42": 3, "share": 0.15}, or a function of a Question.',
        )
    for key in hints:
        if key not in KINDS and not str(key).rpartition(":")[2].isdigit():
            raise MemPluginError(
                f"The hint {str(key)[:80]!r} does not match any kind of question.",
                where="hints",
                fix=f'Use a line, "file.py:42", or one of {", ".join(KINDS)}.',
            )
    return Answers(hints)


def read_hints(texts: Sequence[str]) -> dict[str, Any] | None:
    """Parse hints from the command line: `train.py:42=7`, `share=0.15`, `truth=False`.

    Raises:
        MemPluginError: a text is not KEY=VALUE, or its key matches no possible question.
    """
    hints: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            hints[key] = _value(value)
        except ValueError:
            raise MemPluginError(
                f"{text[:80]!r} is not a hint.",
                where="--hint",
                fix="Write train.py:42=7, share=0.15 or truth=False.",
            ) from None
    checked(hints)
    return hints or None


def _value(text: str) -> float:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdecimal() else float(text)


class UnansweredError(MemPluginError):
    """A question that has no hint and that cannot be answered by a guess."""

    asked: Question
    most: int | None
    is_index: bool


def went_on(asked: Question, truth: bool) -> str:
    """Return the note on a condition that is assumed."""
    return (
        f"The condition at {asked.place} depends on values: it is assumed to be {truth}, with which the "
        "program goes on; a hint can set it."
    )


def counted(asked: Question, most: int) -> str:
    """Return the note on how many elements of a mask are assumed to be True."""
    return (
        f"How many elements {asked.place} counts depends on values: {most:,} is assumed, the maximum or the "
        "equal part of a choice; a hint can set it."
    )


def unreached(asked: Question, least: int) -> str:
    """Return the note on what `bincount` counts."""
    return f"No number that {asked.place} counts is assumed to reach its minlength, {least}."


def numbered(asked: Question) -> str:
    """Return the note on a float that is assumed."""
    return f"The number that {asked.place} reads from a tensor is assumed to be 1.0; a hint can set it."


def indexed(asked: Question) -> str:
    """Return the note on an index that is assumed."""
    return f"The index that {asked.place} reads is assumed to be 0; a hint can set it."


GENERATES = (
    "While transformers generates, it is assumed that no sequence is padded, and that all are generated to "
    "their greatest length; a hint can change that."
)
"""The note on what its loops over tokens ask."""

LBFGS = (
    "torch.optim.LBFGS is assumed to make all max_iter iterations of a step. It keeps two vectors as large "
    "as the parameters from each iteration, up to history_size: after more steps it may hold more."
)
"""The note on what the optimizer asks."""

EVERY_STEP = (
    "GradScaler is assumed to take every optimizer step. It skips the first ones while its scale, 65,536 at "
    "the start, is too high for the gradients in half precision."
)
"""The note on what it asks: whether a gradient overflowed. `answer` adds the bytes."""


def unanswered(
    asked: Question, most: int | None = None, *, is_index: bool = False, by: str = ""
) -> UnansweredError:
    """Return the error for a question that has no hint and that cannot be answered by a guess.

    `most` is the greatest value that it can have, where that is known; any would do for an index. `by` is the
    function that asks for it.
    """
    value = "whether a condition holds" if asked.kind == "truth" else "a whole number"
    how, example = (", True or False", "True") if asked.kind == "truth" else ("", "7")
    error = UnansweredError(
        f"The program reads {value} from a tensor ({asked.operator} of shape {asked.shape}, "
        f"{asked.dtype}), which an estimate does not know{by and f', but {by}() needs'}.",
        where=f"{asked.file}:{asked.line}",
        fix=f'Say it{how}: MemoryEstimator(hints={{"{asked.place}": {example}}}), or on the command line '
        f"--hint {asked.place}={example}.",
    )
    error.asked, error.most, error.is_index = asked, most, is_index
    return error


def asking_frame(caller: FrameType | None) -> FrameType:
    """Return the frame of the line that reads a value now, in the program or in a library."""
    frame = caller or sys._getframe(1)
    while frame.f_back is not None and _BETWEEN.search(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _program(caller: FrameType | None) -> tuple[str, int]:
    """Return the program's file and line; torch's own if no program called it, as in an optimizer's step."""
    frame = asking = asking_frame(caller)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_THIS_PACKAGE):
        frame = asking
    return frame.f_code.co_filename, frame.f_lineno
