"""Pickles of plain data only: nothing in them can be imported, called, or looked up outside them."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, NoReturn

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.sources.collector import collector_at_rest
from tb_memplugin.sources.snapshot.pickle_reader import DAMAGED_FIX, PickleReader

LONGEST_NAME = 200
"""Characters of a refused name that a message repeats."""

REFUSED_FIX = (
    "Do not load this file with pickle.load or torch.load. A memory snapshot holds numbers, texts, lists and "
    "dicts alone: ask whoever sent it for the file that torch.cuda.memory._dump_snapshot() wrote."
)
GROWTH, HEADROOM_BYTES = 64, 256 << 20
"""Bytes of memory that a byte of a pickle may take, and what any pickle may; real ones take 10 a byte."""

_AVAILABLE = re.compile(r"^MemAvailable:\s+([0-9]{1,15}) kB$", re.MULTILINE)

still_unpickling: ContextVar[Callable[[bool], None]] = ContextVar(
    "still_unpickling", default=lambda _going_on: None
)
"""Told True while a pickle is read, before every megabyte, and False when that is over.

A pickle may choose dictionary keys that take Python hours to look up, or so deeply nested that hashing
them ends the process. Nothing in the process can stop that; another process that listens here can."""

_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    ImportError,
    RecursionError,
)
"""What the unpickler raises on bytes that make no sense, besides a lack of memory."""


class RefusedPickleError(UnreadableFileError):
    """A pickle asks for something outside itself, which could run code."""


def load_plain(source: BinaryIO | bytes, where: str) -> object:
    """The object in a pickle that consists of plain data: numbers, texts, bytes, lists, tuples, sets, dicts.

    Every global, every persistent id and every extension code is refused before anything is imported,
    so no pickle can run code. A pickle that claims more bytes than are there, or a memo larger than it
    can fill, is refused before memory is taken for them. Peak memory is that of `pickle.load` plus some
    chunks. Python's cycle collector rests meanwhile: a plain pickle makes millions of containers and no
    garbage.

    Args:
        source: a binary stream at the pickle's first byte, or the bytes.
        where: the file, as errors should name it.

    Raises:
        RefusedPickleError: it asks for a global, a persistent id or an extension code.
        UnreadableFileError: it is truncated, empty, or no pickle, or takes absurd amounts of memory.
        OSError: the stream does.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    reader = PickleReader(stream, where, _growth_watch(where))
    # A code that this process resolved before would come from the cache, past `find_class`.
    copyreg.clear_extension_cache()
    try:
        with collector_at_rest():
            return _PlainUnpickler(reader, where).load()
    except UnreadableFileError:
        raise
    except MemoryError as error:
        raise UnreadableFileError(
            "The pickle needs more memory than there is.",
            where=where,
            fix=f"{DAMAGED_FIX} If the file is whole, load it where there is more memory.",
        ) from error
    except _DAMAGE as error:
        raise UnreadableFileError(_diagnosis(reader.position, error), where=where, fix=DAMAGED_FIX) from error
    finally:
        still_unpickling.get()(False)


def _diagnosis(size: int, error: BaseException) -> str:
    if size == 0:
        return "The file is empty."
    if isinstance(error, EOFError):
        return f"The pickle ends too early, after {size:,} bytes: the file is truncated."
    reason = f"{type(error).__name__}: {_short(str(error))}"
    return f"The file is no pickle of plain data, or it is damaged ({reason})."


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, reader: PickleReader, where: str) -> None:
        super().__init__(reader)
        self._where = where

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse: the unpickler asks here for every global, of whichever opcode."""
        self._refuse(f"The pickle asks for the global {_short(f'{module}.{name}')!r}, which could run code")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse: a persistent id stands for an object outside the pickle."""
        name = _short(pid) if isinstance(pid, str) else type(pid).__name__
        self._refuse(f"The pickle asks for an object outside it, by the persistent id {name!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise RefusedPickleError(f"{what}: refused.", where=self._where, fix=REFUSED_FIX)


def _growth_watch(where: str) -> Callable[[int], None]:
    """A check of the process's memory against the bytes read so far, and against what was free."""
    before, most = _resident_bytes(), _free_bytes()
    going_on = still_unpickling.get()

    def check(position: int) -> None:
        going_on(True)
        grown = _resident_bytes() - before
        if grown > most:
            raise UnreadableFileError(
                f"The pickle needs more memory than there is: {grown:,} bytes after {position:,} of its own.",
                where=where,
                fix="Load it where there is more memory.",
            )
        if grown > GROWTH * position + HEADROOM_BYTES:
            raise UnreadableFileError(
                f"The pickle takes absurd amounts of memory: {grown:,} bytes after {position:,} of its own.",
                where=where,
                fix=REFUSED_FIX,
            )

    return check


def _free_bytes() -> int:
    """Memory that is free now, by the system; more than any machine has where it does not tell."""
    try:
        found = _AVAILABLE.search(Path("/proc/meminfo").read_text("ascii"))
        return int(found[1]) << 10 if found else sys.maxsize
    except (OSError, ValueError):
        return sys.maxsize


def _resident_bytes() -> int:
    """Memory of this process, 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
