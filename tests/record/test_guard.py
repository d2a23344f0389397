"""Each kind of error is logged once."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.guard import Ending, Guard, end_late, entry, guarded, on_free
from tests.record.signals import free_after_signal, interrupts


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def warnings():
    return Warnings()


@pytest.fixture
def guard(warnings):
    logger = logging.Logger("test")
    logger.addHandler(warnings)
    return Guard("nothing is recorded", logger)


def refusal(where: str, number: int, text: str) -> MemPluginError:
    error = MemPluginError(f"It could not be written: {text}.", where=where)
    error.__cause__ = OSError(number, text)
    return error


@pytest.mark.parametrize(
    ("where", "numbers", "count"),
    [
        ("/runs/a", [errno.ENOSPC, errno.ENOSPC], 1),
        ("/runs/a", [errno.ENOSPC, errno.EACCES], 2),
        ("s3://runs/a", [errno.EIO, errno.EREMOTEIO], 1),  # s3fs: of a HEAD and of a PUT that got a 500
    ],
)
def test_a_failure_to_write_is_logged_once_whatever_its_words(guard, warnings, where, numbers, count):
    for text, number in enumerate(numbers):
        guard.end("a window", refusal(where, number, str(text)))
    assert len(warnings.texts) == count


def test_recorders_of_two_kinds_that_exist_together_log_a_failure_of_the_file_system_once(guard, warnings):
    """One whose warnings are not shown has logged nothing, and one that is gone will not be asked."""
    silent = logging.Logger("silent", logging.ERROR)
    handler, monitor = Guard("a", guard.logger), Guard("b", guard.logger)
    full = refusal("/runs/together", errno.ENOSPC, "full")
    for each in (Guard("no", silent), handler, monitor):
        each.end("a window", full)
    assert len(warnings.texts) == 1
    again = Guard("a", guard.logger)  # the next handler's windows are lost, too
    again.end("a window", full)
    assert len(warnings.texts) == 2
    del each, handler, monitor, again
    Guard("b", guard.logger).end("a window", full)
    assert len(warnings.texts) == 3


def test_what_two_threads_log_at_once_is_logged_once(guard, warnings, monkeypatch):
    others: list[threading.Thread] = []

    def while_another_thread_warns(level: int) -> bool:
        if not others:
            others.append(threading.Thread(target=lambda: guard.warn("The disk is full.")))
            others[0].start()
            others[0].join(0.2)  # it waits for this one
        return level == logging.WARNING

    monkeypatch.setattr(guard.logger, "isEnabledFor", while_another_thread_warns)
    guard.warn("The disk is full.")
    others[0].join(10)
    assert warnings.texts == ["The disk is full."]


def test_what_another_part_of_the_recorder_has_logged_in_the_same_words_is_not_logged_again(guard, warnings):
    error = refusal("/runs/a", errno.ENOSPC, "full")
    guard.warn(str(error))
    guard.end("a window", error)
    assert warnings.texts == [str(error)]


def test_an_error_is_logged_also_when_nothing_can_be_undone(guard, warnings, monkeypatch):
    def call_all(*_):
        raise MemoryError

    monkeypatch.setattr("tb_memplugin.record.guard.call_all", call_all)
    guard.end("a window", ValueError("v"), list)
    assert len(warnings.texts) == 1
    assert "nothing is recorded (ValueError: v)" in warnings.texts[0]


class Recorder:
    def __init__(self, guard):
        self.fail = guard.end

    @guarded("a window")
    def record(self, interrupt):
        interrupt()
        for _ in range(1000):  # the error is raised before one of the next instructions
            pass


class Job:
    def end(self, *_):
        raise TimeoutError("the job's time is over")

    __call__ = end


def end_and_forget(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise TimeoutError("the job's time is over")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
@pytest.mark.parametrize(
    "handler",
    [lambda *_: 1 / 0, Job().end, Job(), partial(Job().end, "job 1"), end_and_forget],
    ids=["function", "method", "object", "partial", "forgotten"],
)
def test_what_a_signal_handler_of_the_program_raises_within_ours_reaches_the_program(
    guard, warnings, handler
):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((ZeroDivisionError, TimeoutError)):
            Recorder(guard).record(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert warnings.texts == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_what_a_handler_of_a_script_raises_reaches_it_too():
    """The globals of a script have no package."""
    script = """
import os, signal
from tb_memplugin.record.guard import Guard, guarded
class Recorder:
    def fail(self, where, error): Guard("lost").end(where, error)
    record = guarded("a step")(lambda self, call: call())
def stop(number, frame): raise TimeoutError("of the program")
def fail(): raise ValueError("of the recorder")
signal.signal(signal.SIGUSR1, stop)
Recorder().record(fail)
try: Recorder().record(lambda: (os.kill(os.getpid(), signal.SIGUSR1), list(range(99))))
except TimeoutError: print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "stopped\n"


def refuse_caller(name):
    caller = sys._getframe(1)
    raise PermissionError(f"{name} is not for {caller.f_code.co_name}")


def refuse_event(event, args):
    raise PermissionError(f"{event} of {args[0].f_code.co_name}")


@pytest.mark.parametrize(
    "call",
    [lambda: refuse_caller("open"), lambda: refuse_event("sys._getframe", (sys._getframe(),))],
    ids=["a patched function that looks for its caller", "an audit hook"],
)
def test_what_a_function_of_the_program_raises_that_knows_the_frame_of_ours_is_ended(guard, warnings, call):
    Recorder(guard).record(call)
    (warning,) = warnings.texts
    assert "nothing is recorded (PermissionError: " in warning


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("kind", [Exception, StoppedError])
def test_what_another_thread_throws_into_ours_reaches_the_program(guard, warnings, kind):
    thread = ctypes.c_ulong(threading.get_ident())
    with pytest.raises(kind):
        Recorder(guard).record(
            lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(kind))
        )
    assert warnings.texts == []


class Freed:
    pass


def test_a_signal_that_comes_as_an_object_is_freed_reaches_the_program_and_what_had_to_be_done_is_done(guard):
    objects, calls = [Freed()], []
    reference = weakref.ref(objects[0], on_free(lambda: calls.append("freed"), guard.end, "the end"))
    with interrupts(), pytest.raises(KeyboardInterrupt):
        free_after_signal(objects)
    assert (reference(), calls) == (None, ["freed"])


def test_a_weak_reference_that_is_freed_before_its_object_calls_nobody(guard):
    objects, calls = [Freed()], []
    reference = weakref.ref(objects[0], on_free(lambda: calls.append("freed"), guard.end, "the end"))
    del reference
    objects.clear()
    assert calls == []


def test_an_error_at_the_end_of_the_process_is_one_warning_and_what_failed_is_done_again(
    guard, warnings, monkeypatch
):
    at_exit: list[Callable[[], object]] = []
    calls: list[str] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr("atexit.unregister", lambda call: at_exit.__setitem__(slice(at_exit.count(call)), []))

    def function():
        calls.append("called")
        if len(calls) < 3:
            raise ValueError("no room")

    owner = Freed()
    ending = Ending(owner, function, guard.end, "the end")
    with pytest.raises(ValueError, match="no room"):
        ending()
    at_exit[0]()
    del owner
    assert (len(calls), at_exit) == (3, [])
    ending()
    assert len(calls) == 3
    assert [text.split(".")[0] for text in warnings.texts] == ["nothing is recorded (ValueError: no room)"]


def beyond_the_limit(*_, **__):
    raise RecursionError


def test_so_near_the_limit_of_recursion_that_no_error_can_be_ended_it_is_ended_later(guard, warnings):
    room = False

    def end(where, error):
        if not room:
            raise RecursionError
        guard.end(where, error)

    called = entry(beyond_the_limit, end, "a module's call", lambda *_: sum, calls_after=0)
    assert called([1, 2]) == 3
    assert warnings.texts == []
    room = True
    end_late()
    end_late()
    assert [text.split(".")[0] for text in warnings.texts] == [
        "nothing is recorded (RecursionError: near the limit of recursion)"
    ]
    with pytest.raises(RecursionError):
        entry(lambda: [][0], beyond_the_limit, "a module's call")()


def test_an_error_that_cannot_be_logged_near_the_limit_of_recursion_is_logged_at_the_end(
    guard, warnings, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(guard, "_log", beyond_the_limit)
        for _ in range(3):
            guard.end("a window", RecursionError(), later=True)
    assert warnings.texts == []
    end_late()
    assert [text.splitlines()[1] for text in warnings.texts] == ["  where: a window"]


def test_an_error_of_what_ends_an_error_does_not_reach_the_program(guard, warnings, monkeypatch):
    def fail(where, error):
        raise ValueError("second")

    monkeypatch.setattr("tb_memplugin.record.guard.UNOWNED", guard)
    assert entry(lambda: [][0], fail, "a module's call", lambda *_: 3)() == 3
    assert ["nothing is recorded (ValueError: second)" in text for text in warnings.texts] == [True]


def test_what_the_program_calls_behind_an_entry_raises_its_own_errors_and_is_not_kept_by_them():
    class Call:
        def __call__(self, *_):
            raise KeyError("the program's")

    called = Call()
    reference = weakref.ref(called)
    enter = entry(lambda *_: reference(), None, "a module's call", calls_after=1)
    with pytest.raises(KeyError, match="the program's") as caught:
        enter(None, 1)
    del called
    assert (caught.traceback[1].name, caught.traceback[1].locals["called"]) == ("enter", [])
