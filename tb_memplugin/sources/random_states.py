"""Tells of copies of the random generator's state: tensors that torch makes without an operator.

Checkpointing keeps one for every layer. While somebody listens, `torch.get_rng_state` tells; it returns what
it returned before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

Listener = Callable[[torch.Tensor], None]

_lock = threading.Lock()
_listeners: list[Listener] = []
_original: Callable[[], torch.Tensor] = torch.random.get_rng_state


def _get_rng_state() -> torch.Tensor:
    state = _original()
    for listener in tuple(_listeners):
        listener(state)
    return state


def listen(listener: Listener) -> None:
    """Call somebody, on whichever thread, with every state that is copied. It must not raise."""
    global _original
    with _lock:
        if not _listeners:
            _original = torch.random.get_rng_state
            torch.random.get_rng_state = torch.get_rng_state = _get_rng_state
        _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """End that; with the last one torch's own function is back, unless somebody else replaced it since."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            if torch.get_rng_state is _get_rng_state:
                torch.get_rng_state = _original
            if torch.random.get_rng_state is _get_rng_state:
                torch.random.get_rng_state = _original
