"""A file system that fails: an error, half a write or the end of the process at any operation below a folder.

Writers use the functions of `os` alone, so that it is enough to take their places. What opens Python's own
streams (`open`, `Path.open`) does not fail: readers alone use that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tb_memplugin.store import disk_sync

Kind = Literal[
    "refused", "answer lost", "half written", "short", "killed before", "killed after", "killed half"
]

BY_PATH = (
    "lstat",
    "stat",
    "mkdir",
    "rmdir",
    "unlink",
    "link",
    "replace",
    "rename",
    "scandir",
    "truncate",
    "access",
)
BY_DESCRIPTOR = ("read", "write", "fsync", "fdatasync", "ftruncate", "fstat", "close")
KILLED = 9
FOREVER = 1 << 30


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: "refused" does nothing and raises; "answer lost" does it and raises, as network file systems do;
            "half written" writes half of the bytes and raises, "short" only writes half. The others end the
            process.
        errno: the error.
        at: the number of the operation, from 1.
        lasts: the number of operations after it that are refused as well.
        only: a part of the paths on which operations fail; others are not counted.
        operation: the only operation that fails, "" for all; others are not counted.
    """

    kind: Kind
    errno: int = 0
    at: int = 0
    lasts: int = 0
    only: str = ""
    operation: str = ""


@dataclass
class FailingFiles:
    """The operations below a folder so far, and the fault among them.

    Attributes:
        operations: the names of the operations while the fault was armed.
        hit: whether the fault happened.
    """

    root: str
    operations: list[str] = field(default_factory=list)
    hit: bool = False
    fault: Fault | None = None
    _descriptors: dict[int, str] = field(default_factory=dict)

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Count the operations, and let one fail."""
        self.operations, self.hit, self.fault = [], False, fault
        try:
            yield
        finally:
            self.fault = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Work as usual, without counting."""
        fault, self.fault = self.fault, None
        try:
            yield
        finally:
            self.fault = fault

    def install_reads(self, patch: pytest.MonkeyPatch) -> None:
        """Let the streams of readers fail, too."""
        real = Path.open

        def opening(path: Path, mode: str = "r", *args: Any, **keywords: Any) -> Any:
            if mode != "rb" or not self._is_below(path):
                return real(path, mode, *args, **keywords)
            opened = self._by_path("open", lambda path: real(Path(path), "rb"))(str(path))
            return FailingStream(opened, self)

        patch.setattr(Path, "open", opening)

    def install(self, patch: pytest.MonkeyPatch, *, flushes: bool = False) -> None:
        """Take the places of the functions of `os`.

        Recordings flush files as soon as they are added, or never.
        """
        if flushes:
            patch.setattr(disk_sync, "in_background", lambda run: run())
        else:
            patch.setattr(disk_sync.DiskSync, "start", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(os, "open", self._opening(os.open))
        for name in BY_PATH:
            patch.setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in BY_DESCRIPTOR:
            patch.setattr(os, name, self._by_descriptor(name, getattr(os, name)))

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        by_path = self._by_path("open", real)

        def opening(path: Any, *args: Any, **keywords: Any) -> int:
            descriptor: int = by_path(path, *args, **keywords)
            if self._is_below(path):
                self._descriptors[descriptor] = os.fspath(path)
            return descriptor

        return opening

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if self.fault is None or not self._is_below(args[0]) or self.fault.only not in str(args[0]):
                return real(*args, **keywords)
            try:
                return self._operation(name, lambda: real(*args, **keywords))
            except OSError as error:
                error.filename = args[0]
                raise

        return call

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *args: Any) -> Any:
            path = self._descriptors.get(descriptor)
            if name == "close":
                self._descriptors.pop(descriptor, None)
            if self.fault is None or path is None or self.fault.only not in path:
                return real(descriptor, *args)
            if name != "write":
                return self._operation(name, lambda: real(descriptor, *args), always=name == "close")
            (content,) = args
            half = lambda: real(descriptor, bytes(content)[: len(content) // 2])  # noqa: E731
            return self._operation(name, lambda: real(descriptor, content), half)

        return call

    def reading(self, name: str, real: Callable[[], Any]) -> Any:
        """Perform an operation of a stream, or not."""
        return real() if self.fault is None else self._operation(name, real, always=name == "close")

    def _operation(
        self,
        name: str,
        real: Callable[[], Any],
        half: Callable[[], Any] | None = None,
        *,
        always: bool = False,
    ) -> Any:
        """Perform an operation, or not. `always`: it is performed even where it fails, as `close` is."""
        assert self.fault is not None
        if self.fault.operation not in ("", name):
            return real()
        self.operations.append(name)
        number, kind = len(self.operations), self.fault.kind
        if not self.fault.at <= number <= self.fault.at + self.fault.lasts:
            return real()
        if number > self.fault.at:
            kind = "refused"
        self.hit = True
        if kind.startswith("killed"):
            try:
                if kind != "killed before":
                    (half or real)() if kind == "killed half" else real()
            finally:
                os._exit(KILLED)
        result = None
        if kind != "refused" or always:
            result = (half or real)() if kind in ("half written", "short") else real()
        if kind == "short":
            return result
        if name == "open" and isinstance(result, int):
            os.close(result)
        raise OSError(self.fault.errno, os.strerror(self.fault.errno))

    def _is_below(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.root)


class FailingStream:
    """A stream of a reader whose operations fail."""

    def __init__(self, stream: Any, files: FailingFiles) -> None:
        self._stream, self._files = stream, files

    def read(self, *size: int) -> bytes:
        content: bytes = self._files.reading("read", lambda: self._stream.read(*size))
        return content

    def seek(self, *place: int) -> int:
        offset: int = self._files.reading("seek", lambda: self._stream.seek(*place))
        return offset

    def __enter__(self) -> FailingStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.reading("close", self._stream.close)
