"""Run commands that read files in a child process, so that a hostile pickle cannot hang or crash them.

A pickle can contain dictionary keys that take Python hours to look up, or that crash it when it hashes them.
No code in the same process can stop that, not even on Ctrl-C. A parent process can: see `still_unpickling`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tb_memplugin.errors import MemPluginError, UnreadableFileError

READ_FILES = frozenset(
    ("import", "peak", "diff", "stages", "usage", "advice", "allocator", "profile", "json", "export")
)
"""Sub-commands that run in a child process."""

LIMIT_VARIABLE = "TB_MEMPLUGIN_LIMIT_SECONDS"
LIMIT_SECONDS = 5
"""CPU seconds that one megabyte of a pickle may take; real pickles take a hundredth of a second."""

LOOK_SECONDS = 0.25
ENDING_SECONDS = 0.002
PATIENCE_SECONDS = 2
"""How many seconds a command may take to end after Ctrl-C."""

REFUSED, INTERRUPTED, BY_SIGNAL = 2, 1, 128
CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL"}
"""Signals that end a process which runs out of stack or of system memory."""

GOES_ON, OVER = b"+", b"-"


def go_apart() -> None:
    """Fork: return in the child process, while the parent waits for it and exits with its exit code.

    On a system without fork (Windows) it returns in this process, which is then not guarded.

    Raises:
        MemPluginError: TB_MEMPLUGIN_LIMIT_SECONDS is not a number of seconds.
        SystemExit: in the parent, when the child has ended.
    """
    if not hasattr(os, "fork"):
        return
    limit = _limit_seconds()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        raise SystemExit(_Guard(child, read_end, limit).wait())
    os.close(read_end)
    from tb_memplugin.sources.snapshot.safe_pickle import still_unpickling

    still_unpickling.set(lambda going_on: _send(write_end, going_on))


def _send(pipe: int, going_on: bool) -> None:
    """Tell the parent whether unpickling goes on. If the parent is gone, the error ends this process."""
    os.write(pipe, GOES_ON if going_on else OVER)


def _limit_seconds() -> float:
    value = os.environ.get(LIMIT_VARIABLE)
    if not value:
        return LIMIT_SECONDS
    if not (value.isascii() and value.isdigit() and 0 < len(value) < 10 and int(value)):
        raise MemPluginError(
            f"{LIMIT_VARIABLE} is {value[:80]!r}, which is not a number of seconds.",
            where="the environment",
            fix=f"Set it to a whole number: export {LIMIT_VARIABLE}=60",
        )
    return int(value)


@dataclass(slots=True)
class _Guard:
    """The parent's side: it waits for the child that runs the command, and kills it if it hangs."""

    child: int
    pipe: int
    limit: float
    unpickling: bool = False
    since: float = 0.0
    interrupted: float = 0.0

    def wait(self) -> int:
        """Return the child's exit code; 2, with a message on stderr, if a pickle hung or crashed it."""
        signal.signal(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        while True:
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended:
                self._listen()
                return self._code(os.waitstatus_to_exitcode(status))
            if select.select([self.pipe], [], [], LOOK_SECONDS)[0]:
                self._listen()
            elif self.unpickling and self._used() - self.since > self.limit:
                return self._end_it()
            if self.interrupted and time.monotonic() - self.interrupted > PATIENCE_SECONDS:
                self._kill()
                return INTERRUPTED

    def _listen(self) -> None:
        """Read the child's messages, of which the last counts. If its pipe is closed, it is ending."""
        while select.select([self.pipe], [], [], 0)[0]:
            words = os.read(self.pipe, 1 << 16)
            if not words:
                time.sleep(ENDING_SECONDS)
                return
            self.unpickling, self.since = words.endswith(GOES_ON), self._used()

    def _code(self, code: int) -> int:
        if code >= 0:
            return code
        if signal.Signals(-code).name not in CRASHES:
            return BY_SIGNAL - code
        if self.unpickling:
            _refuse(
                f"The process that read the pickle crashed (signal {-code}): the dictionary keys are "
                "nested too deeply, or the system ran out of memory.",
                "Ask the sender for the file that torch.cuda.memory._dump_snapshot() wrote.",
            )
        else:
            _refuse(
                f"The command was killed (signal {-code}): the system may have run out of memory.",
                "Run it on a machine with more memory.",
            )
        return REFUSED

    def _end_it(self) -> int:
        self._kill()
        _refuse(
            "Reading the pickle takes far too long: a single megabyte of it was not done after "
            f"{self.limit:.0f} seconds. Its dictionary keys may have been made to cause this.",
            f"If you trust the file, set {LIMIT_VARIABLE} to more seconds.",
        )
        return REFUSED

    def _used(self) -> float:
        """Return the child's CPU seconds; seconds of a clock if the system does not report them."""
        try:
            fields = Path(f"/proc/{self.child}/stat").read_text("utf-8").rpartition(")")[2].split()
            return int(fields[11]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return time.monotonic()

    def _kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or time.monotonic()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # the child has just ended
            os.kill(self.child, number)


def _refuse(what: str, fix: str) -> None:
    from tb_memplugin.commands.refusals import refusal, the_command

    sys.stderr.write(f"{refusal(UnreadableFileError(what, where=the_command(), fix=fix))}\n")
