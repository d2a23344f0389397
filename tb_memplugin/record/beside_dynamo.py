"""Exclude functions of tb_memplugin from torch.compile, without a cost per call.

While a compiled function runs, dynamo also tries to compile the functions called there, including those of a
tracer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def hidden_from_dynamo(function: Function) -> Function:
    """Mark a function so that dynamo compiles neither it nor what it calls.

    This does what `torch._dynamo.disable` does, but without a wrapper and without loading dynamo, which
    takes a second.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(function)
    return function


def not_compiled_alone(function: Function) -> Function:
    """Mark a function so that dynamo does not compile it when Python calls it.

    Within a function that it compiles, dynamo still traces it, without a break in the graph.
    """
    _skip(function)
    return function


def skipped_by_dynamo(function: Function) -> Function:
    """Mark a function so that dynamo does not compile it, but may compile what it calls."""
    _set_strategy(function, "DEFAULT")
    return function


def is_hidden(function: Callable[..., Any]) -> bool:
    """Whether the function is marked, which is not possible in older versions of torch."""
    return getattr(function, "_is_skipped_by_dynamo", False)


class UncompiledHere:
    """The functions that torch.compile first sees between creation and `forget`, under a dispatch mode.

    They run uncompiled under the mode, and without `forget` dynamo would never compile them later either.
    """

    def __init__(self) -> None:
        self._before = len(_compiled_code())

    def forget(self) -> None:
        """Make dynamo treat these functions as not seen yet."""
        for reference in _compiled_code()[self._before :]:
            code = reference()
            if code is not None:
                torch._C._dynamo.eval_frame.reset_code(code)


def _compiled_code() -> Sequence[Callable[[], CodeType | None]]:
    """Return weak references to the code objects that dynamo was asked to compile, in order."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    codes: Sequence[Callable[[], CodeType | None]] = getattr(getattr(dynamo, "input_codes", None), "seen", ())
    return codes if hasattr(torch._C._dynamo.eval_frame, "reset_code") else ()


def _skip(function: Any) -> None:
    function._is_skipped_by_dynamo = _set_strategy(function, "SKIP")


def _set_strategy(function: Any, of_callees: str) -> bool:
    """Skip a function's frames, and treat those of its callees as given. Return whether torch can do so."""
    frames: Any = torch._C._dynamo.eval_frame
    try:
        actions = frames._FrameAction
        strategy = frames._FrameExecStrategy(actions.SKIP, getattr(actions, of_callees))
        frames.set_code_exec_strategy(function.__code__, strategy)
    except (AttributeError, TypeError):  # an older torch
        if hasattr(frames, "skip_code"):
            frames.skip_code(function.__code__)
        return False
    return True
