"""Functions that only call another one, so that the Python stack is deeper wherever they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def deeper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with two more frames around `function`."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer
