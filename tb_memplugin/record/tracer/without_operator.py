"""Report memory that torch allocates or frees without an operator that a dispatch mode sees.

These are copies of the random generator's state (checkpointing keeps one per layer), storages that Python
resizes (as FSDP2 does to free gathered parameters), what `torch.load` reads, and what printing a tensor
allocates, for which torch disables modes. While there is a listener, `torch.get_rng_state`,
`UntypedStorage.resize_`, `PyTorchFileReader.get_storage_from_record` and `torch._tensor_str._str` are patched
to report; their results do not change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from tb_memplugin.record.torch_private.tensors import PRINT, FileReader, printing


class Listener(Protocol):
    """A receiver of the reports, on the thread where they happen. Its own code must not raise."""

    def see_memory(self, memory: torch.Tensor | torch.UntypedStorage) -> None:
        """Receive a copied state, or a storage that was resized or read."""

    def around(self, call: Callable[[], Any]) -> Any:
        """Make a call that no mode sees, and return its result."""


_lock = threading.Lock()
_listeners: list[Listener] = []
_get_original: Callable[[], torch.Tensor] = torch.random.get_rng_state
_resize_original: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_
_resize_is_inherited = "resize_" not in vars(torch.UntypedStorage)
_read_original: Callable[..., torch.Tensor] | None = getattr(FileReader, "get_storage_from_record", None)
_print_original: Callable[..., Any] | None = getattr(printing, PRINT, None)


def _report(memory: torch.Tensor | torch.UntypedStorage) -> None:
    for listener in tuple(_listeners):
        listener.see_memory(memory)


def _get_rng_state() -> torch.Tensor:
    state = _get_original()
    _report(state)
    return state


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize_original(storage, size)
    _report(storage)
    return result


def _read(reader: Any, *which: Any) -> torch.Tensor:
    assert _read_original is not None
    read = _read_original(reader, *which)
    _report(read.untyped_storage())  # the tensor itself has no elements
    return read


def _print(tensor: torch.Tensor, **named: Any) -> Any:
    assert _print_original is not None
    call = partial(_print_original, tensor, **named)
    for listener in tuple(_listeners):
        call = partial(listener.around, call)
    return call()


def listen(listener: Listener) -> None:
    """Add a listener; the first one patches torch's functions."""
    global _get_original, _resize_original, _read_original, _print_original
    with _lock:
        if not _listeners:
            _get_original = torch.random.get_rng_state
            torch.random.get_rng_state = torch.get_rng_state = _get_rng_state
            _resize_original = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign,assignment]
            _read_original = getattr(FileReader, "get_storage_from_record", None)
            if _read_original is not None:
                FileReader.get_storage_from_record = _read
            _print_original = getattr(printing, PRINT, None)
            if _print_original is not None:
                setattr(printing, PRINT, _print)
        _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """Remove a listener; after the last, restore torch's functions unless other code has replaced them."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            if torch.get_rng_state is _get_rng_state:
                torch.get_rng_state = _get_original
            if torch.random.get_rng_state is _get_rng_state:
                torch.random.get_rng_state = _get_original
            if torch.UntypedStorage.resize_ is _resize:
                if _resize_is_inherited:
                    del torch.UntypedStorage.resize_
                else:
                    torch.UntypedStorage.resize_ = _resize_original  # type: ignore[method-assign,assignment]
            if getattr(FileReader, "get_storage_from_record", None) is _read:
                FileReader.get_storage_from_record = _read_original
            if getattr(printing, PRINT, None) is _print:
                setattr(printing, PRINT, _print_original)
