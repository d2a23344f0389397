"""Keep torch.compile away: from functions of tb_memplugin, and from torch while it is patched.

While a compiled function runs, dynamo also tries to compile the functions called there, including those of a
tracer. So they are excluded, without a cost per call. Patches are taken off while it traces, and while code
runs that it compiled.

What it traced of a patch would stay in its graphs, with guards that fail when the patch goes; and a patch on
what it has guarded makes it compile again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from tb_memplugin.record.guard import UNOWNED, Failed, call_all, entry
from tb_memplugin.record.torch_private.compiler import (
    DISABLED,
    ENTRY,
    FrameAction,
    FrameStrategy,
    callbacks_and_frames,
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


class Patch(Protocol):
    """A patch of torch that can be put on and taken off at any time, on any thread."""

    guarded: bool
    """Whether compiled code may have guards on what is patched."""

    @property
    def is_wanted(self) -> bool:
        """Whether its owner needs it. If not, it stays off, also where `remove` has failed."""

    @property
    def failed(self) -> Failed:
        """Called with what was raised while torch.compile began or ended."""

    def put_on(self) -> None:
        """Change torch. Does nothing if it is changed already."""

    def take_off(self) -> None:
        """Restore torch. Does nothing if it is as it was."""


_WHERE = "torch.compile"

lock = threading.RLock()
"""Held while patches change, and by those who keep what patches read: of two locks, an object that dies while
a thread holds one may want the other, and wait for ever.
"""
_patches: weakref.WeakKeyDictionary[Patch, None] = weakref.WeakKeyDictionary()
"""Those that `remove` was not called with. One whose owner has forgotten it is not put on again."""

_original_entry: Any = None
_in_compiled: set[int] = set()
"""The threads that run compiled code."""
_is_tracing = False
is_known = False
"""Whether torch.compile is loaded and heard of. While it is not, who may run before it should call `look`."""


def add(patch: Patch) -> None:
    """Put a patch on, except while it must be off, until `remove`."""
    with lock:
        _patches[patch] = None
        try:
            _set(patch)
            look()
        except BaseException:
            call_all(partial(remove, patch))
            raise


def remove(patch: Patch) -> None:
    """Take a patch off for good. Safe to call twice."""
    with lock:
        _patches.pop(patch, None)  # before what may fail, else it would be put on again
        try:
            patch.take_off()
        finally:
            look()


def look() -> None:
    """Hear of torch.compile, if that is loaded, as long as there are patches."""
    global is_known, _original_entry
    loaded = callbacks_and_frames()
    if loaded is None:
        return
    handler, frames = loaded
    with lock:
        is_registered = _before_tracing in handler.start_callbacks  # `torch._dynamo.reset` clears them
        entry = getattr(frames, ENTRY, None)
        if _patches and not is_registered:
            handler.register_start_callback(_before_tracing)
            handler.register_end_callback(_after_tracing)
        elif is_registered and not _patches:
            handler.remove_start_callback(_before_tracing)
            handler.remove_end_callback(_after_tracing)
        if _patches and entry is not None and entry is not _enter_compiled:
            _original_entry = entry
            setattr(frames, ENTRY, _enter_compiled)
        elif entry is _enter_compiled and not _patches:
            setattr(frames, ENTRY, _original_entry)
            _in_compiled.clear()
        is_known = bool(_patches)


def _set(patch: Patch) -> None:
    if not patch.is_wanted or _is_tracing or (_in_compiled and patch.guarded):
        patch.take_off()
    else:
        patch.put_on()


def _set_all() -> None:
    for patch in tuple(_patches):
        try:
            _set(patch)
        except BaseException as error:
            call_all(patch.take_off)
            patch.failed(_WHERE, error)


def _set_tracing(is_tracing: bool, *_: object) -> None:
    global _is_tracing
    with lock:
        _is_tracing = is_tracing
        _set_all()


def _set_compiled(callback: Any) -> Any:
    """Return torch's function that begins (with a callback) and ends (without) compiled code."""
    thread = threading.get_ident()
    if bool(callback) is not (thread in _in_compiled):  # not where an optimizer only keeps dynamo away
        with lock:
            (_in_compiled.add if callback else _in_compiled.discard)(thread)
            _set_all()
    return _original_entry


def _fail(where: str, error: BaseException) -> None:
    """Take all patches off, after an error beside the compiler, until this thread leaves compiled code."""
    _in_compiled.add(threading.get_ident())
    UNOWNED.end(where, error, *(patch.take_off for patch in tuple(_patches)))


_before_tracing = entry(partial(_set_tracing, True), _fail, _WHERE)
_after_tracing = entry(partial(_set_tracing, False), _fail, _WHERE)
_enter_compiled = entry(_set_compiled, _fail, _WHERE, lambda _: _original_entry, calls_after=0)

for _function in (_set, _set_all, _set_compiled, _enter_compiled):  # the last one: all entries
    skipped_by_dynamo(_function)
