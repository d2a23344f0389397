"""Functions of ours that torch.compile leaves alone, at no cost a call.

Code of a compiled function runs with dynamo looking for more to compile, also what a tracer does there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def hidden_from_dynamo(function: Function) -> Function:
    """Mark a function: dynamo neither looks into it nor compiles it, nor what it calls.

    As `torch._dynamo.disable` does, without the wrapper and without loading dynamo, which takes a second.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(function)
    return function


def is_hidden(function: Callable[..., Any]) -> bool:
    """Whether this torch could mark it."""
    return getattr(function, "_is_skipped_by_dynamo", False)


class UncompiledHere:
    """Functions that torch.compile meets from now on, until `forget`, while a dispatch mode is on.

    They run uncompiled then, and dynamo would leave them so for good.
    """

    def __init__(self) -> None:
        self._before = len(_met())

    def forget(self) -> None:
        """Make dynamo meet them anew."""
        for reference in _met()[self._before :]:
            code = reference()
            if code is not None:
                torch._C._dynamo.eval_frame.reset_code(code)


def _met() -> Sequence[Callable[[], CodeType | None]]:
    """Weak references to the code that dynamo was asked to compile, in order."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    met: Sequence[Callable[[], CodeType | None]] = getattr(getattr(dynamo, "input_codes", None), "seen", ())
    return met if hasattr(torch._C._dynamo.eval_frame, "reset_code") else ()


def _skip(function: Any) -> None:
    frames: Any = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):
        return  # an older torch
    function._is_skipped_by_dynamo = True
