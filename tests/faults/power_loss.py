"""What a disk may contain after the machine has lost its power: the model, and the states that it allows.

While a program runs, its operations below a folder are recorded. A file's content is on the disk when the
file was flushed (`fsync`), and a name in a folder when the folder was. Everything after that may be there or
not, in any combination: names without their content, content that is cut, half there, or zeros, deletions
that did not happen. That is more than real file systems do, which keep some of the order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

Content = Literal["whole", "as flushed", "half", "zeros", "holes"]
CONTENTS: tuple[Content, ...] = ("whole", "as flushed", "half", "zeros", "holes")
"""What is there of bytes that were not flushed: all, none, the first half, zeros in place of all or some."""

HOLE = 64
"""Bytes that are there or not together. (On a real disk 4,096; the files of tests are smaller.)"""

_ROOT = 0


@dataclass(frozen=True)
class Operation:
    """One operation on the file or folder with the number `node`.

    Attributes:
        kind: "folder" and "file" create a node, "enter" gives it a name, "leave" takes that from it; "write"
            and "cut" change its content; "flush" puts it on the disk.
        name: the folder's node and the name in it.
        group: operations of one group happen together, as a rename does.
    """

    kind: Literal["folder", "file", "enter", "leave", "write", "cut", "flush"]
    node: int
    name: tuple[int, str] = (-1, "")
    offset: int = 0
    content: bytes = b""
    group: int = 0


@dataclass
class RecordedDisk:
    """The operations below a folder, in order, and marks between them.

    Attributes:
        marks: the number of operations before each mark, and what was marked.
    """

    root: str
    operations: list[Operation] = field(default_factory=list)
    marks: list[tuple[int, Any]] = field(default_factory=list)
    _nodes: dict[str, int] = field(default_factory=dict)
    _descriptors: dict[int, int] = field(default_factory=dict)
    _count: int = _ROOT
    _groups: int = 0

    def mark(self, value: Any) -> None:
        """Mark this moment with a value."""
        self.marks.append((len(self.operations), value))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the places of the functions of `os` that change something."""
        self._nodes[self.root] = _ROOT
        real = {name: getattr(os, name) for name in ("open", "write", "ftruncate", "fsync", "close", "mkdir")}
        real |= {name: getattr(os, name) for name in ("link", "unlink", "rmdir", "replace", "rename")}

        def opening(path: Any, flags: int, *args: Any, **keywords: Any) -> int:
            text = os.fspath(path)
            is_new = not os.path.lexists(text)
            descriptor: int = real["open"](path, flags, *args, **keywords)
            if self._is_below(text):
                if is_new:
                    self._create("file", text)
                self._descriptors[descriptor] = self._nodes[text]
            return descriptor

        def writing(descriptor: int, content: Any) -> int:
            node = self._descriptors.get(descriptor)
            offset = os.lseek(descriptor, 0, os.SEEK_CUR) if node is not None else 0
            count: int = real["write"](descriptor, content)
            if node is not None:
                added = bytes(content)[:count]
                self.operations.append(Operation("write", node, offset=offset, content=added))
            return count

        def cutting(descriptor: int, size: int) -> None:
            real["ftruncate"](descriptor, size)
            if descriptor in self._descriptors:
                self.operations.append(Operation("cut", self._descriptors[descriptor], offset=size))

        def flushing(descriptor: int) -> None:
            if descriptor in self._descriptors:
                self.operations.append(Operation("flush", self._descriptors[descriptor]))

        def closing(descriptor: int) -> None:
            self._descriptors.pop(descriptor, None)
            real["close"](descriptor)

        def making(path: Any, *args: Any, **keywords: Any) -> None:
            real["mkdir"](path, *args, **keywords)
            if self._is_below(os.fspath(path)):
                self._create("folder", os.fspath(path))

        def linking(source: str, target: str) -> None:
            real["link"](source, target)
            self._enter(target, self._nodes[source])

        def removing(name: str) -> Callable[..., None]:
            def remove(path: Any, **keywords: Any) -> None:
                real[name](path, **keywords)
                if self._is_below(os.fspath(path)):
                    self._leave(os.fspath(path))

            return remove

        def renaming(source: Any, target: Any) -> None:
            real["replace"](source, target)
            if self._is_below(os.fspath(target)):
                self._groups += 1
                node = self._nodes[os.fspath(source)]
                self._leave(os.fspath(source), self._groups)
                self._enter(os.fspath(target), node, self._groups)

        places = {
            "open": opening,
            "write": writing,
            "ftruncate": cutting,
            "fsync": flushing,
            "close": closing,
        }
        places |= {"mkdir": making, "link": linking, "unlink": removing("unlink"), "rmdir": removing("rmdir")}
        for name, function in {**places, "replace": renaming, "rename": renaming}.items():
            patch.setattr(os, name, function)

    def _is_below(self, path: Any) -> bool:
        return isinstance(path, str) and (path == self.root or path.startswith(self.root + os.sep))

    def _name(self, path: str) -> tuple[int, str]:
        return self._nodes[str(Path(path).parent)], Path(path).name

    def _create(self, kind: Literal["folder", "file"], path: str) -> None:
        self._count += 1
        self.operations.append(Operation(kind, self._count))
        self._enter(path, self._count)

    def _enter(self, path: str, node: int, group: int = 0) -> None:
        self._nodes[path] = node
        self.operations.append(Operation("enter", node, self._name(path), group=group))

    def _leave(self, path: str, group: int = 0) -> None:
        self.operations.append(Operation("leave", self._nodes.pop(path), self._name(path), group=group))

    def states(self, until: int, chance: random.Random, others: int) -> Iterator[Disk]:
        """Yield disks after a crash behind the first `until` operations.

        For each content of files: with all names, with the flushed ones alone, and with all but one. Then
        as many `others` in which chance decides on each name and each file.
        """
        done = self.operations[:until]
        pending = _pending_names(done)
        omitted = [{row} for row in pending]
        for content in CONTENTS:
            for absent in (set[int](), set(pending), *(omitted if content in ("whole", "zeros") else [])):
                yield Disk(done, absent, lambda _, content=content: content, chance)  # type: ignore[misc]
        for _ in range(others):
            absent = {row for row in pending if chance.random() < 0.4}
            yield Disk(done, absent, lambda _: chance.choice(CONTENTS), chance)


def _pending_names(done: Sequence[Operation]) -> list[int]:
    """The rows of operations on names whose folders were not flushed after them."""
    flushed = {operation.node: row for row, operation in enumerate(done) if operation.kind == "flush"}
    return [
        row
        for row, operation in enumerate(done)
        if operation.kind in ("enter", "leave") and flushed.get(operation.name[0], -1) < row
    ]


class Disk:
    """The files on a disk after a crash: what was flushed, and of everything else what the arguments say.

    Args:
        done: the operations before the crash.
        absent: the rows of operations on names that did not reach the disk.
        content_of: returns for the number of a file what is there of its bytes that were not flushed.
    """

    def __init__(
        self,
        done: Sequence[Operation],
        absent: set[int],
        content_of: Callable[[int], Content],
        chance: random.Random,
    ) -> None:
        groups = {done[row].group for row in absent} - {0}
        entries: dict[int, dict[str, int]] = {}
        folders = {_ROOT}
        for row, operation in enumerate(done):
            folder, name = operation.name
            if operation.kind == "folder":
                folders.add(operation.node)
            elif operation.kind in ("enter", "leave") and row not in absent and operation.group not in groups:
                if operation.kind == "enter":
                    entries.setdefault(folder, {})[name] = operation.node
                else:
                    entries.get(folder, {}).pop(name, None)
        self._files: dict[str, bytes] = {}
        self._folders: list[str] = []
        contents: dict[int, bytes] = {}
        todo = [(_ROOT, "")]
        while todo:
            folder, path = todo.pop()
            self._folders.append(path)
            for name, node in sorted(entries.get(folder, {}).items()):
                if node in folders:
                    todo.append((node, f"{path}/{name}"))
                    continue
                if node not in contents:
                    contents[node] = _content(done, node, content_of(node), chance)
                self._files[f"{path}/{name}"] = contents[node]

    @property
    def key(self) -> int:
        """A number that is the same for disks of the same content."""
        return hash((tuple(sorted(self._files.items())), tuple(sorted(self._folders))))

    def write_to(self, folder: Path) -> None:
        """Create the folders and files below a folder."""
        for path in self._folders:
            (folder / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for path, content in self._files.items():
            (folder / path.lstrip("/")).write_bytes(content)


def _content(done: Sequence[Operation], node: int, left: Content, chance: random.Random) -> bytes:
    changes = [one for one in done if one.node == node and one.kind in ("write", "cut", "flush")]
    flushed = max((row for row, one in enumerate(changes) if one.kind == "flush"), default=-1)
    before = _applied(b"", changes[: flushed + 1])
    after = _applied(before, changes[flushed + 1 :])
    added = len(after) - len(before)
    if left == "whole" or after == before:
        return after
    if left == "as flushed" or added < 0:
        return before
    if left == "half":
        return after[: len(before) + added // 2]
    new = bytearray(after)
    for start in range(len(before), len(after), HOLE):
        if left == "zeros" or chance.random() < 0.5:
            end = min(start + HOLE, len(after))
            new[start:end] = bytes(end - start)
    return bytes(new)


def _applied(content: bytes, changes: Sequence[Operation]) -> bytes:
    new = bytearray(content)
    for one in changes:
        if one.kind == "cut":
            del new[one.offset :]
        elif one.kind == "write":
            new[one.offset : one.offset + len(one.content)] = one.content
    return bytes(new)
