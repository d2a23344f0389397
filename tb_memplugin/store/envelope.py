"""The format of a side file: a head, compressed chunks, and an index; chunks and index have checksums."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import BinaryIO, NoReturn

import zstandard
from google.protobuf.message import DecodeError

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import Chunk, Footer
from tb_memplugin.store.paths import HEAD_MAGIC

VERSION = 1
"""The version of the envelope and its content. Readers accept their own version and older ones."""

TAIL_MAGIC = b"TBMEMEND"
HEAD = struct.Struct("<8sII")  # magic, version, zero
TAIL = struct.Struct("<QIi8s")  # footer's length, its CRC-32, version, magic

MOST_FOOTER = 16 << 20
MOST_NAMES = 512 << 20
"""The largest sizes of the index and of the decompressed names, in bytes: more is damage or an attack."""

ReadRange = Callable[[int, int], bytes]
"""`read(offset, size)` returns at most `size` bytes of the file."""

RERECORD = (
    "Record the window again; the others stay readable. Keep the file: tb-memplugin doctor --repair LOGDIR "
    "saves what is intact."
)
KEEP = "Keep the file: what is intact in it is read. tb-memplugin doctor --repair LOGDIR saves that."
UPGRADE = "Install the newest version of tb-memplugin on this machine."


def without_content(head: bytes) -> str:
    """Return what to say of a file that begins so, if its content is missing; else ""."""
    if any(head):
        return ""
    state = "begins with zeros only" if head else "is empty"  # a file system may know a file's name and size
    return f"The file {state}: the machine stopped before its content was on the disk."


def check_version(subject: str, version: int, newest: int, where: str) -> None:
    """Refuse a version that is newer than this reader. `subject` begins the sentence: "The file has format".

    Raises:
        UnreadableFileError: the version is newer than `newest`. The error names `where`.
    """
    if version > newest:
        message = f"{subject} version {version}; this tb_memplugin reads up to {newest}."
        raise UnreadableFileError(message, where=where, fix=UPGRADE)


def unpacked(packed: bytes, size: int, most: int) -> bytes:
    """Return the decompressed bytes of a message that says that it has `size` of them.

    Raises:
        ValueError: it says more than `most`, or has another size.
        ZstdError: it is damaged.
    """
    if size > most:
        raise ValueError("it claims an impossible size")
    if zstandard.get_frame_parameters(packed).content_size != size:
        raise ValueError("its size is wrong")
    return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)


class EnvelopeWriter:
    """Writes chunks one after another, then the footer that contains their positions."""

    def __init__(self, stream: BinaryIO, level: int = 1) -> None:
        self._stream = stream
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._offset = stream.write(HEAD.pack(HEAD_MAGIC, VERSION, 0))

    def add(self, chunk: Chunk, raw: bytes) -> Chunk:
        """Compress and write one chunk's bytes. Return its description, completed with their position."""
        chunk.raw_size = len(raw)
        if raw:
            packed = self._compressor.compress(raw)
            chunk.offset, chunk.size, chunk.checksum = self._offset, len(packed), zlib.crc32(packed)
            self._offset += self._stream.write(packed)
        return chunk

    def fill(self, size: int) -> None:
        """Write zeros until the file has this size."""
        self._offset += self._stream.write(bytes(max(0, size - self._offset)))

    def finish(self, footer: Footer) -> int:
        """Write the index and the tail.

        Returns:
            The size of the whole file in bytes.
        """
        footer.version = VERSION
        packed = footer.SerializeToString()
        self._offset += self._stream.write(packed)
        self._offset += self._stream.write(TAIL.pack(len(packed), zlib.crc32(packed), VERSION, TAIL_MAGIC))
        return self._offset


class EnvelopeReader:
    """Reads the index when created, and chunks on request by byte range.

    Args:
        read: returns a range of the file's bytes.
        size: the file's size in bytes.

    Attributes:
        read: what chunks are read with from now on.
        footer: the index.

    Raises:
        UnreadableFileError: the file is truncated, not a side file, damaged, or newer than this reader.
    """

    def __init__(self, read: ReadRange, size: int, name: str) -> None:
        self.read, self._size, self._name = read, size, name
        self.footer = self._footer()

    def raw(self, chunk: Chunk, size: int) -> bytes:
        """Return the decompressed bytes of a chunk.

        Args:
            chunk: a chunk that the footer describes.
            size: the required decompressed size in bytes; a chunk that declares another size is refused.

        Raises:
            UnreadableFileError: the file is damaged or truncated.
        """
        if chunk.raw_size != size:
            self._refuse("Part of the file claims another size than its rows need.")
        if not size:
            return b""
        packed = self.packed(chunk)
        try:
            if zstandard.get_frame_parameters(packed).content_size != size:
                self._refuse("Part of the file claims another size than its rows need.")
            return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
        except zstandard.ZstdError as error:
            self._refuse(f"Part of the file cannot be decompressed ({error}).")

    def packed(self, chunk: Chunk) -> bytes:
        """Return the bytes of a chunk as they are in the file.

        Raises:
            UnreadableFileError: the file is damaged or truncated.
        """
        if chunk.offset + chunk.size > self._size:
            self._refuse("The file ends before its last part: it is truncated.")
        packed = self.read(chunk.offset, chunk.size)
        if len(packed) != chunk.size or zlib.crc32(packed) != chunk.checksum:
            self._refuse("A checksum in the file is wrong: it is damaged.")
        return packed

    def _footer(self) -> Footer:
        head = self.read(0, HEAD.size)
        if len(head) < HEAD.size or head[:8] != HEAD_MAGIC:
            message = "This is not a tb_memplugin side file."
            self._refuse(without_content(head) or message)
        self._check_version(HEAD.unpack(head)[1])
        tail = self.read(max(self._size - TAIL.size, 0), TAIL.size)
        if self._size < HEAD.size + TAIL.size or tail[-8:] != TAIL_MAGIC:
            self._refuse("The file has no end: it is truncated.")
        length, checksum, version, _ = TAIL.unpack(tail)
        self._check_version(version)
        start = self._size - TAIL.size - length
        if start < HEAD.size or length > MOST_FOOTER:
            self._refuse("The file's index claims to be larger than the file: it is damaged.")
        packed = self.read(start, length)
        if zlib.crc32(packed) != checksum:
            self._refuse("The checksum of the file's index is wrong: it is damaged.")
        try:
            footer = Footer.FromString(packed)
        except DecodeError:
            self._refuse("The file's index cannot be read: it is damaged.")
        self._check_version(footer.version)
        return footer

    def _check_version(self, version: int) -> None:
        check_version("The file has format", version, VERSION, self._name)
        if version < 1:
            self._refuse(f"The file claims format version {version}, which does not exist.")

    def _refuse(self, message: str) -> NoReturn:
        raise UnreadableFileError(message, where=self._name, fix=RERECORD)
