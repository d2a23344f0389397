"""Exclude functions of tb_memplugin from torch.compile, without a cost per call.

While a compiled function runs, dynamo also tries to compile the functions called there, including those of a
tracer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tb_memplugin.record.torch_private.compiler import (
    DISABLED,
    FrameAction,
    FrameStrategy,
    code_seen,
    reset_code,
    set_strategy,
    skip_code,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def hidden_from_dynamo(function: Function) -> Function:
    """Mark a function so that dynamo compiles neither it nor what it calls.

    This does what `torch._dynamo.disable` does, but without a wrapper and without loading dynamo, which
    takes a second.
    """
    setattr(function, DISABLED, True)
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
        self._before = len(code_seen())

    def forget(self) -> None:
        """Make dynamo treat these functions as not seen yet."""
        for reference in code_seen()[self._before :]:
            code = reference()
            if code is not None and reset_code is not None:
                reset_code(code)


def _skip(function: Any) -> None:
    function._is_skipped_by_dynamo = _set_strategy(function, "SKIP")


def _set_strategy(function: Any, of_callees: str) -> bool:
    """Skip a function's frames, and treat those of its callees as given. Return whether torch can do so."""
    if set_strategy is None:  # an older torch
        if skip_code is not None:
            skip_code(function.__code__)
        return False
    try:
        set_strategy(function.__code__, FrameStrategy(FrameAction.SKIP, getattr(FrameAction, of_callees)))
    except (AttributeError, TypeError):
        return False
    return True
