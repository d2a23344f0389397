"""Values that only a real run knows, and what the user says they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError

_NOT_THE_PROGRAM = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
KINDS = ("number", "truth", "share", "count")

Hints = Mapping[str, Any] | Callable[["Question"], Any] | None


@dataclass(frozen=True, slots=True)
class Question:
    """What a program asks of values that fake tensors do not have.

    Attributes:
        kind: "number" (`.item()` of a float), "count" (of an integer), "truth" (of a boolean), or "share":
            how many elements a mask selects, as a fraction of them, or as their number where it is an int.
        operator: the operator that asks.
        shape, dtype: of the tensor.
        file, line: of the program, the innermost frame outside of torch.
    """

    kind: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    line: int

    @property
    def place(self) -> str:
        """`train.py:42`."""
        return f"{Path(self.file).name}:{self.line}"


def question(kind: str, operator: Any, tensor: torch.Tensor) -> Question:
    """A question that the running program asks."""
    file, line = _program()
    return Question(kind, str(operator), tuple(tensor.shape), tensor.dtype, file, line)


def answer(hints: Hints, asked: Question) -> Any:
    """The user's answer, None where there is none. A place is looked up before a kind."""
    if hints is None:
        return None
    if callable(hints):
        return hints(asked)
    path = Path(asked.file).as_posix()
    for key, value in hints.items():
        name, _, line = key.rpartition(":")
        if name and line == str(asked.line) and f"/{path}".endswith(f"/{name}"):
            return value
    return hints.get(asked.kind)


def checked(hints: Any) -> Hints:
    """Hints that can be asked.

    Raises:
        MemPluginError: neither a mapping, nor a function, nor None; or a key that no question has.
    """
    if hints is None or callable(hints):
        return hints  # type: ignore[no-any-return]  # a function of the user's
    if not isinstance(hints, Mapping):
        raise MemPluginError(
            f"hints is a {type(hints).__name__}.",
            where="MemoryEstimator",
            fix='Give a dict such as {"train.py:42": 3, "share": 0.15}, or a function of a Question.',
        )
    for key in hints:
        if key not in KINDS and not str(key).rpartition(":")[2].isdigit():
            raise MemPluginError(
                f"The hint {str(key)[:80]!r} belongs to nothing.",
                where="hints",
                fix=f'Name a line, "file.py:42", or one of {", ".join(KINDS)}.',
            )
    return hints


def read_hints(texts: Sequence[str]) -> dict[str, Any] | None:
    """Hints as people write them on a command line: `train.py:42=7`, `share=0.15`, `truth=False`.

    Raises:
        MemPluginError: one of them is no name and value, or belongs to nothing.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            found[key] = _value(value)
        except ValueError:
            raise MemPluginError(
                f"{text[:80]!r} is no hint.",
                where="--hint",
                fix="Write train.py:42=7, share=0.15 or truth=False.",
            ) from None
    checked(found)
    return found or None


def _value(text: str) -> float:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def unanswered(asked: Question) -> MemPluginError:
    """The error for a question that no guess would answer."""
    what = "whether a condition holds" if asked.kind == "truth" else "a whole number"
    how, example = (", True or False", "True") if asked.kind == "truth" else ("", "7")
    return MemPluginError(
        f"The program reads {what} from a tensor's values ({asked.operator} of shape {asked.shape}, "
        f"{asked.dtype}), which fake tensors do not have.",
        where=f"{asked.file}:{asked.line}",
        fix=f'Say it{how}: MemoryEstimator(hints={{"{asked.place}": {example}}}), or on the command line '
        f"--hint {asked.place}={example}.",
    )


def _program() -> tuple[str, int]:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
