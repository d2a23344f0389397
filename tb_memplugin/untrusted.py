"""Read a file in a process of its own, which is held to a budget, and pass the trace back as a side file.

A side file is columns of numbers and texts: reading it back runs nothing, and checks every number in it.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from tb_memplugin.budget import OverBudgetError, confine, out_of_memory, seconds_budget, too_much_time
from tb_memplugin.errors import MemPluginError, NotRecordedError, UnreadableFileError
from tb_memplugin.read.snapshot.safe_pickle import RefusedPickleError
from tb_memplugin.store.windows import read_window, write_window
from tb_memplugin.trace import MemoryTrace

ERRORS = {
    kind.__name__: kind
    for kind in (MemPluginError, UnreadableFileError, NotRecordedError, RefusedPickleError, OverBudgetError)
}
"""The errors that a reader raises, by the names under which they pass from the child."""

TRACE, ERROR, SYSTEM_ERROR = b"T", b"E", b"O"
"""The first byte of the child's answer: a side file follows, or JSON of an error."""

_CHILD = """
import json, sys
asked = json.loads(sys.stdin.buffer.read())
sys.path[:] = asked.pop("modules")
from tb_memplugin import loading, untrusted
untrusted.answer(loading.load, asked, sys.stdout.buffer)
"""


def load_apart(path: str, **options: Any) -> MemoryTrace:
    """Return what `load(path, **options)` returns, read in a new process that is held to the file's budget.

    Args:
        path: a file, or a recorded run's folder.
        options: further arguments of `load`; they must be possible in JSON.

    Raises:
        UnreadableFileError: reading takes more than the file's budget of memory or time, or ends the process.
        MemPluginError, OSError: as `load`.
    """
    asked = {"modules": sys.path, "source": path, **options}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD],
            input=json.dumps(asked).encode(),
            capture_output=True,
            check=False,
            timeout=seconds_budget() if sys.platform == "win32" else None,  # it limits no CPU seconds
        )
    except subprocess.TimeoutExpired as error:
        raise too_much_time(path, seconds_budget()) from error
    kind, content = done.stdout[:1], done.stdout[1:]
    if kind == TRACE and not done.returncode:
        return read_window(lambda offset, count: content[offset : offset + count], len(content), path)
    if kind == ERROR:
        answer = json.loads(content)
        raise ERRORS.get(answer["kind"], MemPluginError)(
            answer["what"], where=answer["where"], fix=answer["fix"]
        )
    if kind == SYSTEM_ERROR:
        answer = json.loads(content)
        raise OSError(answer["number"], answer["what"], path)
    raise _ended(path, done)


def answer(load: Callable[..., MemoryTrace], asked: dict[str, Any], stream: BinaryIO) -> None:
    """In the new process: load, and write the trace or the error to a stream."""
    path = asked["source"]
    answer = io.BytesIO()
    try:
        confine(lambda _path, _seconds: None)
        answer.write(TRACE)
        write_window(answer, load(**asked))
    except MemPluginError as error:
        answer = _error_answer(error)
    except MemoryError:
        answer = _error_answer(out_of_memory(path))
    except OSError as error:
        answer = _answer(SYSTEM_ERROR, number=error.errno, what=error.strerror or str(error))
    stream.write(answer.getbuffer())
    stream.flush()


def _error_answer(error: MemPluginError) -> io.BytesIO:
    return _answer(ERROR, kind=type(error).__name__, what=error.what, where=error.where, fix=error.fix)


def _answer(begin: bytes, **content: Any) -> io.BytesIO:
    return io.BytesIO(begin + json.dumps(content).encode())


def _ended(path: str, done: subprocess.CompletedProcess[bytes]) -> UnreadableFileError:
    """Return the error for a process that ended without an answer."""
    if hasattr(signal, "SIGXCPU") and done.returncode == -signal.SIGXCPU:
        return too_much_time(path, seconds_budget())
    last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}; {last}"
    return UnreadableFileError(
        f"The process that read the file crashed ({how}): the file is nested too deeply, or the system ran "
        "out of memory.",
        where=path,
        fix="Ask the sender for the file that torch.cuda.memory._dump_snapshot() or the profiler wrote.",
    )
