"""Pickles of plain data only: nothing in them can be imported, called, or looked up outside them."""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NoReturn

from tb_memplugin.errors import UnreadableFileError

CHUNK_BYTES = 1 << 20
LONGEST_NAME = 200
"""Characters of a refused name that a message repeats."""

REFUSED_FIX = (
    "Do not load this file with pickle.load or torch.load. A memory snapshot holds numbers, texts, lists and "
    "dicts alone: ask whoever sent it for the file that torch.cuda.memory._dump_snapshot() wrote."
)
DAMAGED_FIX = "Copy the file again, or take a new snapshot: torch.cuda.memory._dump_snapshot(path)."

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


def load_plain(source: BinaryIO | bytes, where: str) -> object:
    """The object in a pickle that consists of plain data: numbers, texts, bytes, lists, tuples, sets, dicts.

    Every global, every persistent id and every extension code is refused before anything is imported,
    so no pickle can run code. A pickle that claims more bytes than are there is refused before memory
    is taken for them. Peak memory is that of `pickle.load` plus `CHUNK_BYTES`. Python's cycle collector
    rests meanwhile: a plain pickle makes millions of containers and no garbage.

    Args:
        source: a binary stream at the pickle's first byte, or the bytes.
        where: the file, as errors should name it.

    Raises:
        UnreadableFileError: it asks for a global, a persistent id or an extension code; or it is
            truncated, empty, or no pickle.
        OSError: the stream does.
    """
    reader = _Reader(io.BytesIO(source) if isinstance(source, bytes) else source, where)
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
        raise UnreadableFileError(_diagnosis(reader.size, error), where=where, fix=DAMAGED_FIX) from error


def _diagnosis(size: int, error: BaseException) -> str:
    if size == 0:
        return "The file is empty."
    if isinstance(error, EOFError):
        return f"The pickle ends too early, after {size:,} bytes: the file is truncated."
    reason = f"{type(error).__name__}: {_short(str(error))}"
    return f"The file is no pickle of plain data, or it is damaged ({reason})."


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Without the cycle collector, if it was on; whichever of several loads turned it off turns it on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, reader: _Reader, where: str) -> None:
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
        raise UnreadableFileError(f"{what}: refused.", where=self._where, fix=REFUSED_FIX)


class _Reader:
    """The stream as the unpickler reads it: in chunks, and never more than there is.

    Without `readinto`, so that the C unpickler passes every length that it read through `read`.
    """

    def __init__(self, stream: BinaryIO, where: str) -> None:
        if not stream.seekable():
            stream = io.BytesIO(stream.read())
        begin = stream.tell()
        self.size = stream.seek(0, io.SEEK_END) - begin
        stream.seek(begin)
        self._stream = stream
        self._where = where
        self._left = self.size
        self._chunk = b""
        self._at = 0

    def read(self, count: int) -> bytes:
        if count < 0 or count > self._left > 0:
            raise UnreadableFileError(
                f"The pickle claims {count:,} more bytes where {self._left:,} are left: "
                "it is truncated or damaged.",
                where=self._where,
                fix=DAMAGED_FIX,
            )
        data = self._chunk[self._at : self._at + count]
        self._at += len(data)
        if len(data) < count:
            data += self._stream.read(count - len(data))
        self._left -= len(data)
        return data

    def peek(self, _count: int) -> bytes:
        if self._at >= len(self._chunk):
            self._chunk, self._at = self._stream.read(CHUNK_BYTES), 0
        return self._chunk[self._at :] if self._at else self._chunk

    def readline(self) -> bytes:
        line = bytearray()
        while chunk := self.peek(1):
            end = chunk.find(b"\n") + 1
            line += self.read(end or len(chunk))
            if end:
                break
        return bytes(line)
