"""Commands that read files go on in a child process, so that no pickle can hang or crash them for good.

A pickle's dictionary keys may be such that Python looks them up for hours, or ends when it hashes them.
No code in that process could stop it, not even Ctrl-C. Its parent can: see `still_unpickling`.
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
"""Sub-commands that are guarded."""

LIMIT_VARIABLE = "TB_MEMPLUGIN_LIMIT_SECONDS"
LIMIT_SECONDS = 5
"""What a megabyte of a pickle may take of a processor; real ones take a hundredth of a second."""

LOOK_SECONDS = 0.25
ENDING_SECONDS = 0.002
PATIENCE_SECONDS = 2
"""How long a command may take to end after Ctrl-C."""

REFUSED, INTERRUPTED, BY_SIGNAL = 2, 1, 128
CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL"}
"""How a process ends that runs out of stack, or of the system's memory."""

GOES_ON, OVER = b"+", b"-"


def go_apart() -> None:
    """Return in a child process; this one waits for it and ends with its exit code.

    Where a system cannot fork (Windows), it returns in this process, unguarded.

    Raises:
        MemPluginError: TB_MEMPLUGIN_LIMIT_SECONDS is no number of seconds.
        SystemExit: in the parent, when the child has ended.
    """
    if not hasattr(os, "fork"):
        return
    limit = _limit_seconds()
    heard, told = os.pipe()
    child = os.fork()
    if child:
        os.close(told)
        raise SystemExit(_Guard(child, heard, limit).wait())
    os.close(heard)
    from tb_memplugin.sources.snapshot.safe_pickle import still_unpickling

    still_unpickling.set(lambda going_on: _tell(told, going_on))


def _tell(pipe: int, going_on: bool) -> None:
    """Tell the parent; a parent that is gone ends this process."""
    os.write(pipe, GOES_ON if going_on else OVER)


def _limit_seconds() -> float:
    told = os.environ.get(LIMIT_VARIABLE)
    if not told:
        return LIMIT_SECONDS
    if not (told.isascii() and told.isdigit() and 0 < len(told) < 10 and int(told)):
        raise MemPluginError(
            f"{LIMIT_VARIABLE} is {told[:80]!r}, which is no number of seconds.",
            where="the environment",
            fix=f"Set it to a whole number: export {LIMIT_VARIABLE}=60",
        )
    return int(told)


@dataclass(slots=True)
class _Guard:
    """The parent of a command that reads files."""

    child: int
    heard: int
    limit: float
    unpickling: bool = False
    since: float = 0.0
    interrupted: float = 0.0

    def wait(self) -> int:
        """The child's exit code; 2, with a word on stderr, where a pickle hung or crashed it."""
        signal.signal(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        while True:
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended:
                self._listen()
                return self._code(os.waitstatus_to_exitcode(status))
            if select.select([self.heard], [], [], LOOK_SECONDS)[0]:
                self._listen()
            elif self.unpickling and self._used() - self.since > self.limit:
                return self._end_it()
            if self.interrupted and time.monotonic() - self.interrupted > PATIENCE_SECONDS:
                self._kill()
                return INTERRUPTED

    def _listen(self) -> None:
        """What the child said last counts; when it closed its end, it is about to be over."""
        while select.select([self.heard], [], [], 0)[0]:
            words = os.read(self.heard, 1 << 16)
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
                f"The pickle made its reader crash (signal {-code}): its keys are nested without end, or the "
                "system's memory ran out.",
                "Ask whoever sent it for the file that torch.cuda.memory._dump_snapshot() wrote.",
            )
        else:
            _refuse(
                f"The command was ended from outside (signal {-code}): the system's memory may have run out.",
                "Try it where there is more memory.",
            )
        return REFUSED

    def _end_it(self) -> int:
        self._kill()
        _refuse(
            f"The pickle takes absurdly long: no end of one of its megabytes after {self.limit:.0f} seconds. "
            "Its dictionary keys seem to be made for that.",
            f"If you trust the file, set {LIMIT_VARIABLE} to more seconds.",
        )
        return REFUSED

    def _used(self) -> float:
        """Seconds that the child took of a processor; of a clock, where the system does not tell."""
        try:
            told = Path(f"/proc/{self.child}/stat").read_text("utf-8").rpartition(")")[2].split()
            return int(told[11]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return time.monotonic()

    def _kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or time.monotonic()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(self.child, number)


def _refuse(what: str, fix: str) -> None:
    from tb_memplugin.commands.refusals import refusal

    where = " ".join(sys.argv[1:])[:200]
    sys.stderr.write(f"{refusal(UnreadableFileError(what, where=where, fix=fix))}\n")
