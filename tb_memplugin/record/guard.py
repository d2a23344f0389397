"""Where the errors of this package end: they are undone and logged once, and the training goes on.

torch and the user's loop call our code through patched functions, hooks, threads, weak references and
methods. They all go through one function, `enter` in `entry`, which passes what was raised to a `Guard`. Only
what runs around the call of a module has the `try` within it: each of our Python calls there would be an
event in the user's own profile, and Python ignores what the end of an object raises. A `try` that catches
nothing costs no time.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from tb_memplugin.errors import NO_DESCRIPTORS, NO_SPACE, MemPluginError, fix_of, is_of_signal
from tb_memplugin.logs import instance_logger
from tb_memplugin.record.torch_private.dispatch import without_torch_functions

P = ParamSpec("P")
Result = TypeVar("Result")
Other = TypeVar("Other")

Failed = Callable[[str, BaseException], None]
"""Called with what was done, and with what was raised then: see `Guard.end`."""

REPORT = "set the logger tb_memplugin to DEBUG to get the traceback, and report it."

_package_logger = instance_logger()


class Guarded(Protocol):
    """An object with guarded methods."""

    def fail(self, where: str, error: BaseException) -> None:
        """Undo what the object has changed and log the error, see `Guard.end`."""


Own = TypeVar("Own", bound=Guarded)


class Guard:
    """Ends the errors of one recorder. Each kind of error is logged once: a failure of a local file system by
    its errno and where it was (the disk, where that is full), of an object store by where it was, an error of
    this package by its message, any other by its type and the line that raised it. That of a file system or a
    tracker is logged once by recorders of different kinds that exist together, as a handler and a monitor;
    but what is lost is told, also where another recorder has told that it is only late.

    Args:
        loss: what an error costs the user, as the beginning of a sentence: "The memory of this window is not
            recorded".
        logger: the logger for messages. None: that of the package.
    """

    def __init__(self, loss: str, logger: logging.Logger | None = None) -> None:
        self._loss, self.logger = loss, logger or _package_logger
        self._logged: set[str] = set()
        self._errors_to_log = math.inf
        self._waiting = ("", "")

    def log_only_next(self) -> None:
        """Of the errors until the next call of this, log the first: the others may be its consequences."""
        self._errors_to_log = 1

    def end(
        self,
        where: str,
        error: BaseException,
        *undo: Callable[[], object],
        loss: str | None = None,
        later: bool = False,
        once: str = "",
        is_late: bool = False,
    ) -> None:
        """End an error: undo, then log it.

        Args:
            where: what was done when the error was raised, such as "an optimizer's step".
            undo: functions that remove what is ours. All are called, whatever they raise.
            loss: replaces the guard's.
            later: log the error when `warn_waiting` is called.
            once: replaces the kind of the error.
            is_late: nothing is lost, what failed is done later.

        Raises:
            KeyboardInterrupt, SystemExit: `error` is one, or one was raised while undoing.
            Exception: `error`, which a signal handler of the program has raised: a timeout, for example.
        """
        try:
            call_all(*undo)
        except Exception as second:  # no memory for a call, for example
            if is_of_signal(second):
                raise
            for function in undo:
                with suppress(Exception):
                    function()
        if ends_program(error):
            raise error
        try:
            self._log(where, error, loss or self._loss, once or kind_of(error), later=later, is_late=is_late)
        except RecursionError:
            _late[(self.end, where)] = None
        except Exception as second:  # a handler of the user's logging failed
            _debug("logging an error failed", second)

    def end_flush(self, error: BaseException) -> None:
        """End an error of the thread that flushes to the disk."""
        self.end("the disk", error, loss="What was recorded may not outlive a crash of this machine")

    def _log(
        self, where: str, error: BaseException, loss: str, kind: str, *, later: bool, is_late: bool
    ) -> None:
        self.logger.debug("%s failed", where, exc_info=error)
        if not self._errors_to_log:
            return
        self._errors_to_log -= 1
        message = str(error)
        if not isinstance(error, MemPluginError):
            message = (
                f"{loss} ({type(error).__name__}: {error}). The training continues without it.\n"
                f"  where: {where}\n  fix: {fix_of(error, REPORT) if isinstance(error, OSError) else REPORT}"
            )
        if later and not isinstance(error, RecursionError):  # it may be the end of the process
            self._waiting = message, kind
        else:
            self.warn(message, once=kind, is_late=is_late)

    def warn_waiting(self) -> None:
        """Log the last error that waits to be logged."""
        (message, kind), self._waiting = self._waiting, ("", "")
        if message:
            self.warn(message, once=kind)

    def warn(self, message: str, *, once: str = "", is_late: bool = False) -> None:
        """Log a warning, once per message, or once per `once` where it is given. `is_late`: see `end`."""
        keys = {message, once or message}
        with _lock:  # a thread may log the same fault at the same time
            if keys & self._logged or not self.logger.isEnabledFor(logging.WARNING):
                return
            self._logged |= keys
            if once.startswith((_FILE_SYSTEM, TRACKER)):
                other = _logged_by.get(once, self)
                if other._loss != self._loss:  # a handler's, where a monitor writes beside it
                    return
                if not is_late:
                    _logged_by[once] = self
        self.logger.warning("%s", message)


_lock = threading.RLock()
_FILE_SYSTEM = "file system"
TRACKER = "tracker"
"""What the kind of an error of an experiment tracker begins with."""
_logged_by: weakref.WeakValueDictionary[str, Guard] = weakref.WeakValueDictionary()
"""The guard that has logged a failure of a file system or a tracker, by its kind."""


def _none(*_: object) -> None:
    return None


@overload
def guarded(
    where: str, *, before_end: Callable[..., None] = ...
) -> Callable[[Callable[Concatenate[Own, P], Result]], Callable[Concatenate[Own, P], Result | None]]: ...


@overload
def guarded(
    where: str, instead: Callable[[], Other]
) -> Callable[[Callable[Concatenate[Own, P], Result]], Callable[Concatenate[Own, P], Result | Other]]: ...


def guarded(
    where: str, instead: Callable[[], Any] = _none, *, before_end: Callable[..., None] = _none
) -> Any:
    """Pass what a method raises to the `fail` of its object. No `__torch_function__` is called in it.

    Args:
        where: see `Guard.end`.
        instead: returns what the method then returns.
        before_end: see `entry`.
    """
    return lambda method: entry(
        method, None, where, lambda *_: instead(), before_end=before_end, reads_tensors=True
    )


def entry(
    function: Callable[..., Any],
    failed: Failed | None,
    where: str,
    instead: Callable[..., Any] = _none,
    *,
    before_end: Callable[..., None] = _none,
    calls_after: int | None = None,
    reads_tensors: bool = False,
) -> Callable[..., Any]:
    """Return what torch, Python or the user's loop calls in place of a function of ours.

    Args:
        function: the function. Its caller's caller is who called.
        failed: called with `where` and what the function raised, and raises again what ends the program.
            None: `fail` of the first argument.
        where: see `Guard.end`.
        instead: called with the same arguments after an error, for the result.
        before_end: called with the same arguments before what ends the program is raised again.
        calls_after: not None: the result is a function of torch or of the user, which is called with the
            arguments after so many, and what it raises is not ours.
        reads_tensors: whether to see to it that no `__torch_function__` is called in the function.
    """

    @wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        try:
            if reads_tensors:
                with without_torch_functions():
                    return function(*args, **kwargs)
            if calls_after is None:
                return function(*args, **kwargs) if kwargs else function(*args)
            called = [function(*args, **kwargs)]
        except BaseException as error:
            fail = args[0].fail if failed is None else failed
            try:
                fail(where, error)
            except RecursionError:  # the program's own calls may still fit below the limit
                if not isinstance(error, RecursionError):
                    raise
                _late[(fail, where)] = None
            except BaseException as second:  # raised by `fail` itself, if it is another
                if second is error or ends_program(second):
                    before_end(*args)
                    raise
                UNOWNED.end(where, second)
            called = [instead(*args)]
        if calls_after is None:
            return called[0]
        return called.pop()(*args[calls_after:], **kwargs)  # its traceback must not keep it

    return enter


_late: dict[tuple[Failed, str], None] = {}


@atexit.register
def end_late() -> None:
    """End the errors that were raised too near the limit of recursion to be ended there."""
    while _late:
        late, _ = _late.popitem()
        failed, where = late
        try:
            failed(where, RecursionError("near the limit of recursion"))
        except RecursionError:  # so is this
            _late[late] = None
            raise


def interrupt_later(error: BaseException) -> object:
    """Return an object whose end raises an error like this one in the code that this thread runs then.

    Python ignores what is raised while an object is freed.
    """
    error.__traceback__ = None  # it would keep the frame that has the object
    thread, kind = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(type(error))
    end = staticmethod(partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, thread, kind))
    freed: object = type("Interrupt", (), {"__del__": end})()
    return freed


def on_free(function: Callable[[], object], failed: Failed, where: str) -> Callable[[object], object]:
    """Return the callback of a weak reference. What ends the program reaches it: Python would ignore that.

    A function that Python calls when an object is freed may raise what a signal raises before its first
    statement. A generator is already within its `try` when it goes on.

    Args:
        function: called when the object is freed; again, where a signal came then.
        failed, where: see `entry`.
    """

    def wait() -> Generator[None, object, None]:
        try:
            yield
            function()
        except GeneratorExit:  # the reference was freed before its object
            return
        except BaseException as error:
            try:
                if ends_program(error):
                    function()
                failed(where, error)
            except BaseException as ending:
                interrupt = interrupt_later(ending)
                del interrupt
        yield

    waiting = wait()
    next(waiting)
    return waiting.send


class Ending:
    """Calls a function when an object is freed, at the end of the process, or when it is called itself.

    What the function raises reaches only who calls this object; else it is ended, see `on_free`.

    Args:
        owner: the object. The function must not have a reference to it.
        function: called until it has returned once.
        failed, where: see `entry`.
    """

    def __init__(self, owner: object, function: Callable[[], object], failed: Failed, where: str) -> None:
        self._function = function
        self._at_exit = entry(self.__call__, failed, where)
        self._reference = weakref.ref(owner, on_free(self, failed, where))
        atexit.register(self._at_exit)

    def __call__(self) -> None:
        """Call the function, unless it has returned before."""
        self._function()
        self._function = _none
        atexit.unregister(self._at_exit)


def log_for_debugging(where: str, error: BaseException) -> None:
    """End an error of what removes something of ours, which is then removed in another way."""
    if ends_program(error):
        raise error
    _debug(f"{where} failed", error)


def call_all(*functions: Callable[[], object]) -> None:
    """Call all functions, also after one has raised. Errors are logged for debugging only.

    Raises:
        KeyboardInterrupt, SystemExit, Exception: one of the functions raised it, or a signal handler of the
            program did; the others are called before.
    """
    ending: BaseException | None = None
    for function in functions:
        try:
            function()
        except BaseException as error:
            if ends_program(error):
                ending = error
            else:
                _debug("undoing an error failed, too", error)
    if ending is not None:
        raise ending


def ends_program(error: BaseException) -> bool:
    """Whether an error is not ours to end: Ctrl-C, or what a signal handler of the program has raised."""
    return not isinstance(error, Exception) or is_of_signal(error)


def kind_of(error: BaseException) -> str:
    """Return what tells the kind of an error."""
    cause = error.__cause__ if isinstance(error, MemPluginError) else error
    if isinstance(cause, OSError) and cause.errno in NO_DESCRIPTORS:
        return "too many open files"  # wherever the first one was missed
    if isinstance(error, MemPluginError):
        if not isinstance(cause, OSError) or cause.errno is None:
            return str(error)
        is_remote = "://" in error.where  # an object store's client has several errnos for one fault
        place = _disk_of(error.where) if cause.errno in NO_SPACE else error.where
        return f"{_FILE_SYSTEM} {type(error).__name__} {'' if is_remote else cause.errno} {place}"
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__)]
    return f"{type(error).__name__} {lines[-1] if lines else ''}"


def _disk_of(path: str) -> str:
    """Return what is common to all paths on a disk; the path if that is not known."""
    with suppress(OSError):
        return f"disk {Path(path).stat().st_dev}"
    return path


def _debug(message: str, error: BaseException) -> None:
    with suppress(Exception):
        _package_logger.debug(message, exc_info=error)


UNOWNED = Guard("A recording of tb_memplugin ended early")
"""Ends the errors of recorders that have no guard of their own."""
