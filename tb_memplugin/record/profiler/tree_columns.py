"""What the walk over torch.profiler's event tree finds: rows of packed numbers, and columns of them.

A row is a `bytes` object: it takes a third of the memory of its numbers as Python objects, all rows become
columns in one call, and the garbage collector does not count them.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from tb_memplugin.analysis.source_lines import is_user_code
from tb_memplugin.read.python_frames import CallTree
from tb_memplugin.record.profiler.roles import Role
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Int64, differences

pack_memory = Struct("5q").pack
"""Pack an allocator event: time, address, signed bytes, the allocator's total after it, position's row."""

pack_position = Struct("3q").pack
"""Pack a position in the tree: the row of the outermost operator, the row of the innermost autograd node, and
the innermost Python frame (a key of `frames`), each -1 for none."""

pack_operator = Struct("4q").pack
"""Pack an operator, in the order of `Operators`."""

pack_node = Struct("4qQ").pack
"""Pack an autograd node, in the order of `Nodes`; a thread of 2**64 - 1, for none, is read as -1."""

pack_maker = Struct("3q").pack
"""Pack an operator that may have made an autograd node: start, sequence number, the frame around it."""

_INSTALLED = re.compile(r".*/(((site|dist)-packages|lib(64)?/python[\d.]+)/.+)", re.DOTALL)


def with_library_folder(file: str) -> str:
    """Return a file's path from `site-packages` or the standard library's folder on, if it is in one.

    torch's profiler cuts off each folder of `sys.path`, so that these look like the user's own files.
    """
    name = re.split(r"[/\\]", file, maxsplit=1)[0].removesuffix(".py")
    module = getattr(sys.modules.get(name), "__dict__", {})
    path = next(iter(module.get("__path__") or (module.get("__file__"),)))
    installed = _INSTALLED.fullmatch(f"{Path(str(path)).parent}/{file}".replace("\\", "/"))
    return installed[1] if installed and is_user_code(f"- {file}:0") else file


def as_profiled(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace of an allocator's history with paths of Python files as they are in a profile."""
    folders = [f"{folder}{os.sep}" for folder in sorted({*map(os.path.abspath, sys.path)}, reverse=True)]

    @cache
    def named(text: str) -> str:
        file = read_frame(text).file
        folder = next(filter(file.startswith, folders), "")
        return text.replace(file, with_library_folder(file.removeprefix(folder)), 1) if folder else text

    return replace(trace, stacks=tuple(tuple(map(named, stack)) for stack in trace.stacks))


class Operators(NamedTuple):
    """The outermost operators that allocate, free, or may have made autograd nodes: int64, shape (n,).

    `node` is the row of the innermost autograd node, -1 for none. `sequence` is the autograd sequence number
    of operators outside all autograd nodes, optimizer steps and outermost module calls, -2 for others.
    """

    start_ns: Int64
    end_ns: Int64
    node: Int64
    sequence: Int64


class Nodes(NamedTuple):
    """Autograd nodes: int64, shape (n,). `parent` is the row of the node around it, -1 for none; `thread`
    is the profiler's.
    """

    start_ns: Int64
    end_ns: Int64
    parent: Int64
    sequence: Int64
    thread: Int64


@dataclass
class ProfilerTree:
    """The result of the walk, in no particular order; times in epoch nanoseconds.

    `fields` contains the fields of allocator events if devices other than the CPU may occur. `makers` is
    empty if no stacks were recorded. `threads` contains, for each run of events on one of the profiler's
    threads, the thread and how many rows of memory, operators and makers had been found when the run ended.
    """

    memory: list[bytes] = field(default_factory=list)
    positions: list[bytes] = field(default_factory=list)
    fields: list[Any] = field(default_factory=list)
    operator_names: list[str] = field(default_factory=list)
    operator_rows: list[bytes] = field(default_factory=list)
    node_names: list[str] = field(default_factory=list)
    node_rows: list[bytes] = field(default_factory=list)
    ranges: dict[Role, list[tuple[str, int, int]]] = field(default_factory=dict)
    makers: list[bytes] = field(default_factory=list)
    frames: CallTree = field(default_factory=lambda: CallTree(with_library_folder))
    threads: list[tuple[int, int, int, int]] = field(default_factory=list)

    @cached_property
    def operators(self) -> Operators:
        """The operators, in the order of `operator_names`."""
        return Operators(*_columns(self.operator_rows, 4))

    @cached_property
    def nodes(self) -> Nodes:
        """The autograd nodes, in the order of `node_names`."""
        return Nodes(*_columns(self.node_rows, 5))

    def memory_columns(self) -> tuple[Int64, ...]:
        """Return allocator events as columns: time, address, signed bytes, total, operator, node, frame."""
        *columns, position = _columns(self.memory, 5)
        return (*columns, *_columns(self.positions, 3)[:, position])

    def maker_columns(self) -> Int64:
        """Return start, autograd sequence number and frame of `makers`: shape (3, makers)."""
        return _columns(self.makers, 3)

    def end_run(self, thread: int) -> None:
        """Assign everything found since the end of the last run to a thread."""
        self.threads.append((thread, len(self.memory), len(self.operator_rows), len(self.makers)))

    def thread_of(self, kind: int) -> Int64:
        """Return the profiler's thread of each row of memory (kind 1), operators (2) or makers (3)."""
        numbers = np.array([row[0] for row in self.threads], np.uint64).view(np.int64)  # see pack_node
        ends = np.array([row[kind] for row in self.threads], np.int64)
        return np.repeat(numbers, differences(ends))

    def range_spans(self, role: Role) -> tuple[Int64, Int64]:
        """Return the starts and ends of the ranges with a role, sorted by start."""
        spans = sorted((start, end) for _, start, end in self.ranges.get(role, ()))
        return np.array([start for start, _ in spans], np.int64), np.array(
            [end for _, end in spans], np.int64
        )


def _columns(rows: list[bytes], count: int) -> Int64:
    """Return rows of `count` packed numbers as columns: int64, shape (count, rows)."""
    columns: Int64 = np.frombuffer(b"".join(rows), np.int64).reshape(-1, count).T.copy()
    return columns
