"""Tells of memory that torch takes or gives back without an operator.

Copies of the random generator's state: checkpointing keeps one for every layer. And storages that Python
resizes, as FSDP2 does when it gives gathered parameters back. While somebody listens, `torch.get_rng_state`
and `UntypedStorage.resize_` tell; they return what they returned before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Listener = Callable[[torch.Tensor | torch.UntypedStorage], None]

_lock = threading.Lock()
_listeners: list[Listener] = []
_get_original: Callable[[], torch.Tensor] = torch.random.get_rng_state
_resize_original: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_


def _tell(what: torch.Tensor | torch.UntypedStorage) -> None:
    for listener in tuple(_listeners):
        listener(what)


def _get_rng_state() -> torch.Tensor:
    state = _get_original()
    _tell(state)
    return state


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize_original(storage, size)
    _tell(storage)
    return result


def listen(listener: Listener) -> None:
    """Call somebody, on whichever thread, with every state and every storage after it. It must not raise."""
    global _get_original, _resize_original
    with _lock:
        if not _listeners:
            _get_original = torch.random.get_rng_state
            torch.random.get_rng_state = torch.get_rng_state = _get_rng_state
            _resize_original = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign,assignment]
        _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """End that; with the last one torch's own functions are back, unless somebody replaced them since."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            if torch.get_rng_state is _get_rng_state:
                torch.get_rng_state = _get_original
            if torch.random.get_rng_state is _get_rng_state:
                torch.random.get_rng_state = _get_original
            if torch.UntypedStorage.resize_ is _resize:
                torch.UntypedStorage.resize_ = _resize_original  # type: ignore[method-assign,assignment]
