"""Load pickles that contain only plain data; nothing in them is imported or called."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

from tb_memplugin.budget import free_bytes, memory_budget, out_of_memory, too_much_memory
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.read.snapshot.pickle_reader import DAMAGED_FIX, PickleReader
from tb_memplugin.trace.notes import Note

LONGEST_NAME = 200
"""The largest number of characters of a refused name that a message shows."""

REFUSED_FIX = (
    "Do not load this file with pickle.load or torch.load. A memory snapshot contains only numbers, "
    "strings, lists and dicts. Ask the sender for the file that torch.cuda.memory._dump_snapshot() "
    "wrote."
)
GROWTH, HEADROOM_BYTES = 64, 256 << 20
"""The memory allowed per byte of a pickle, plus what any pickle may use; real ones use 10 bytes per byte."""

DAMAGE = (
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
"""Exceptions that the unpickler raises for invalid bytes, apart from MemoryError."""


class RefusedPickleError(UnreadableFileError):
    """A pickle refers to something outside itself, which could run code."""


def read_pickle(source: BinaryIO | bytes, where: str) -> tuple[object, tuple[Note, ...]]:
    """Return the object in a pickle of plain data: numbers, strings, bytes, lists, tuples, sets, dicts.

    If the stream goes on after the pickle, a note says so.

    Every global, persistent id and extension code is refused before anything is imported, so no pickle can
    run code. A pickle that declares more bytes than it has, or a larger memo than it can fill, is refused
    before memory is allocated. Peak memory is that of `pickle.load` plus a few chunks. Python's cyclic
    garbage collector is paused meanwhile: a plain pickle creates millions of containers and no garbage.

    Args:
        source: a binary stream at the pickle's first byte, or the bytes.

    Raises:
        RefusedPickleError: the pickle refers to a global, a persistent id or an extension code.
        UnreadableFileError: the data is truncated, empty, not a pickle, or uses far too much memory.
        OSError: reading the stream failed.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    reader = PickleReader(stream, where, growth_watch(where))
    # An extension code that was resolved earlier would come from the cache and bypass `find_class`.
    copyreg.clear_extension_cache()
    try:
        with collector_at_rest():
            content = PlainUnpickler(reader, where).load()
        return content, _notes(reader)
    except UnreadableFileError:
        raise
    except MemoryError as error:
        raise out_of_memory(where, "The pickle") from error
    except DAMAGE as error:
        raise UnreadableFileError(_diagnosis(reader.position, error), where=where, fix=DAMAGED_FIX) from error


def _notes(reader: PickleReader) -> tuple[Note, ...]:
    end = reader.position
    if not reader.goes_on():
        return ()
    text = f"The file goes on after its first {end:,} bytes, which are a whole pickle; the rest is not read."
    return (Note(text, "file_goes_on"),)


def _diagnosis(size: int, error: BaseException) -> str:
    if size == 0:
        return "The file is empty."
    if isinstance(error, EOFError):
        return f"The pickle ends too early, after {size:,} bytes: the file is truncated."
    reason = f"{type(error).__name__}: {_short(str(error))}"
    return f"The file is not a pickle of plain data, or it is damaged ({reason})."


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


class PlainUnpickler(pickle.Unpickler):
    """Unpickles plain data from a `PickleReader`.

    Args:
        reader: the reader at the pickle's first byte.
    """

    def __init__(self, reader: PickleReader | io.BufferedReader, where: str) -> None:
        super().__init__(reader)
        self._where = where

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every global: the unpickler calls this for all opcodes that load one."""
        self._refuse(f"The pickle asks for the global {_short(f'{module}.{name}')!r}, which could run code")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse every persistent id: it refers to an object outside the pickle."""
        name = _short(pid) if isinstance(pid, str) else type(pid).__name__
        self._refuse(f"The pickle asks for an object outside it, by the persistent id {name!r}")

    def _refuse(self, problem: str) -> NoReturn:
        raise RefusedPickleError(f"{problem}: refused.", where=self._where, fix=REFUSED_FIX)


def growth_watch(where: str) -> Callable[[int], None]:
    """Return a check of the process's memory growth against the bytes read so far and the free memory."""
    before, most = _resident_bytes(), free_bytes()

    def check(position: int) -> None:
        grown = _resident_bytes() - before
        if grown > most:
            raise UnreadableFileError(
                f"The pickle needs more memory than there is: {grown:,} bytes after {position:,} of its own.",
                where=where,
                fix="Load it on a machine with more memory.",
            )
        if grown > memory_budget(position):
            raise too_much_memory(where, memory_budget(position), "The pickle")
        if grown > GROWTH * position + HEADROOM_BYTES:
            raise UnreadableFileError(
                f"The pickle uses far too much memory: {grown:,} bytes after {position:,} of its own.",
                where=where,
                fix=REFUSED_FIX,
            )

    return check


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes, 0 if it is not known."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
