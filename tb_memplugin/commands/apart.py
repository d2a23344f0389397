"""Run commands that read files in a child process, so that a hostile file cannot hang, crash or fill them.

A pickle can contain dictionary keys that take Python hours to look up, or that crash it when it hashes them.
No code in the same process can stop that, not even on Ctrl-C. A child that is held to a budget is ended by
the system: see `tb_memplugin.budget`. Its parent says what happened.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from tb_memplugin.budget import confine, more_memory, too_much_time
from tb_memplugin.commands.tables import refusal, the_command
from tb_memplugin.errors import UnreadableFileError

PATIENCE_SECONDS = 2
"""How many seconds a command may take to end after Ctrl-C."""

REFUSED, INTERRUPTED, BY_SIGNAL = 2, 1, 128
CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL"}
"""Signals that end a process which runs out of stack or of system memory."""

OUT_OF_TIME = "SIGXCPU"
LONGEST_PATH = 4000
OPENED = struct.Struct(f"<QH{LONGEST_PATH}s")
"""What the child says of the file that it opened last: its CPU seconds, and its path in UTF-8."""


def fork_guarded() -> None:
    """Fork: return in the child process, while the parent waits for it and exits with its exit code.

    The child is held to the budget of the files that it opens. On a system without fork (Windows) this
    returns in the same process, which is then not guarded.

    Raises:
        MemPluginError: an environment variable that sets a limit is not a number.
        SystemExit: in the parent, when the child has ended.
    """
    if not hasattr(os, "fork"):
        return
    opened = Opened()
    confine(opened.report)
    child = os.fork()
    if child:
        raise SystemExit(_Guard(child, opened).wait())


@dataclass(slots=True)
class Opened:
    """Memory that parent and child share: which file the child opened last, and how long that may take."""

    memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, OPENED.size))

    def report(self, path: str, seconds: int) -> None:
        """In the child, say that a file is opened, and the CPU seconds that it may take."""
        text = path.encode("utf-8", "surrogateescape")[:LONGEST_PATH]
        self.memory[:] = OPENED.pack(seconds, len(text), text)

    def last(self) -> tuple[str, int]:
        """Return both for the file that was opened last; "" and 0 if none was."""
        seconds, length, text = OPENED.unpack(self.memory[:])
        return text[:length].decode("utf-8", "replace"), seconds


@dataclass(slots=True)
class _Guard:
    """The parent's side: it waits for the child that runs the command, and says what ended it."""

    child: int
    opened: Opened
    was_interrupted: bool = False
    was_killed: bool = False

    def wait(self) -> int:
        """Return the child's exit code; 2, with a message on stderr, if a file hung or crashed it."""
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGALRM, self._end)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        _, status = os.waitpid(self.child, 0)
        signal.alarm(0)
        code = os.waitstatus_to_exitcode(status)
        return INTERRUPTED if self.was_killed or code == -signal.SIGINT else self._code(code)

    def _code(self, code: int) -> int:
        if code >= 0:
            return code
        if signal.Signals(-code).name not in {*CRASHES, OUT_OF_TIME}:
            return BY_SIGNAL - code
        sys.stderr.write(f"{refusal(ended_by(-code, self.opened))}\n")
        return REFUSED

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        """Interrupt a child that goes on, which `kill -INT` did not reach as Ctrl-C does; then kill it."""
        self.was_killed = self.was_interrupted
        self._pass_on(signal.SIGKILL if self.was_interrupted else signal.SIGINT, None)
        self.was_interrupted = True
        signal.alarm(PATIENCE_SECONDS)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        signal.alarm(PATIENCE_SECONDS)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # the child has just ended
            os.kill(self.child, number)


def ended_by(number: int, opened: Opened) -> UnreadableFileError:
    """Return the error for a process that read files and was ended by a signal of this number."""
    path, seconds = opened.last()
    if signal.Signals(number).name == OUT_OF_TIME:
        return too_much_time(path or the_command(), seconds)
    if not path:
        message = f"The command was killed (signal {number}): the system may have run out of memory."
        fix = "Run it on a machine with more memory."
        return UnreadableFileError(message, where=the_command(), fix=fix)
    message = (
        f"The process that read the file crashed (signal {number}): the file is nested too deeply, or takes "
        "more memory than a file of this size may, or than there is."
    )
    fix = more_memory()
    return UnreadableFileError(message, where=path, fix=fix)
