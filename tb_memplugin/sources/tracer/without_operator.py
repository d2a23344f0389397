"""Tells of memory that torch takes or gives back without an operator.

Copies of the random generator's state: checkpointing keeps one for every layer. Storages that Python resizes,
as FSDP2 does when it gives gathered parameters back. And what `torch.load` reads. While somebody listens,
`torch.get_rng_state`, `UntypedStorage.resize_` and `PyTorchFileReader.get_storage_from_record` tell; they
return what they returned before.
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
_reader: Any = getattr(torch._C, "PyTorchFileReader", None)
_read_original: Callable[..., torch.Tensor] | None = getattr(_reader, "get_storage_from_record", None)


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


def _read(reader: Any, *which: Any) -> torch.Tensor:
    assert _read_original is not None
    read = _read_original(reader, *which)
    _tell(read.untyped_storage())  # the tensor itself has no elements
    return read


def listen(listener: Listener) -> None:
    """Call somebody, on whichever thread, with every state and every storage after it. It must not raise."""
    global _get_original, _resize_original, _read_original
    with _lock:
        if not _listeners:
            _get_original = torch.random.get_rng_state
            torch.random.get_rng_state = torch.get_rng_state = _get_rng_state
            _resize_original = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign,assignment]
            _read_original = getattr(_reader, "get_storage_from_record", None)
            if _read_original is not None:
                _reader.get_storage_from_record = _read
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
            if getattr(_reader, "get_storage_from_record", None) is _read:
                _reader.get_storage_from_record = _read_original
