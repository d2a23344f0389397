"""Python frames as torch.profiler names them, and the call stacks that they form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from tb_memplugin.trace import MemoryTrace, Note
from tb_memplugin.trace.tables import Int32, Int64

Key = TypeVar("Key")

MOST_FRAMES = 256
"""The largest number of frames that are kept of a stack: the innermost ones."""

_FRAME = re.compile(r"(?P<file>.*)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
"""A Python function's name in the profiler: `train.py(12): step`."""

_WATCHED = "tb_memplugin/record/module_calls.py:"

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{1,16}(?=>$)")
"""The address of a built-in method's object in its name, which differs between calls from the same line."""


def frame_text(name: str, path_of: Callable[[str], str] = str) -> str:
    """Return a frame's text, `function file:line`, or a built-in function's name without its address.

    The profiler gives a function's first line. Code outside functions has none, so its line is 0, not known.

    Args:
        path_of: returns how to write the path of a file that the profiler names.
    """
    match = _FRAME.fullmatch(name)
    if match is None:
        return _ADDRESS.sub("", name)
    line = 0 if match["function"] == "<module>" else match["line"]
    return f"{match['function']} {path_of(match['file'])}:{line}"


def _begins_profile(name: str) -> bool:
    """Whether a frame is torch's function that begins a profile: what it calls is the first to be seen."""
    return name.endswith(": _start_trace") and "profiler.py(" in name


def note_on_cut(stacks: int, trace: MemoryTrace) -> Note:
    """Return the note on stacks that were too deep to be kept whole, with the bytes that have one."""
    deep = np.array([len(stack) >= MOST_FRAMES for stack in trace.stacks] + [False], bool)
    blocks = trace.allocations
    cut = deep[blocks.stack] | deep[blocks.forward]
    return Note(
        f"{stacks:,} call stacks have more than {MOST_FRAMES} frames; their outer frames are cut off, those "
        f"of {int(blocks.bytes[cut].sum()):,} bytes.",
        "stacks_cut",
        int(blocks.bytes[cut].sum()),
    )


def is_watched_call(text: str) -> bool:
    """Whether a frame is that of `module_calls`, in which a recorder calls the modules that it watches."""
    function, _, file = text.partition(" ")
    return function in ("_run", "__get__") and _WATCHED in file.replace("\\", "/")


class Caller(Protocol):
    """The frame that called a function, as the profiler keeps it: the whole path of its file."""

    line_number: int
    file_name: str
    function_name: str


class CallTree:
    """The tree of frames that called one another: each chain of frames is stored once, under a key.

    Args:
        path_of: as in `frame_text`.
    """

    def __init__(self, path_of: Callable[[str], str] = str) -> None:
        self._path_of = path_of
        self._texts: dict[str, str] = {}
        self._keys: dict[tuple[str, int], int] = {}
        self._frames: list[tuple[str, int]] = []
        self._at_lines: dict[tuple[int, int], int] = {}

    def add(self, name: str, outer: int) -> int:
        """Return the key of a frame with the profiler's `name`, called from the frame `outer` (-1: none).

        A frame of ours, in which a watched module is called, is left out: its key is that of `outer`.
        """
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = frame_text(name, self._path_of)
        if is_watched_call(text):
            return outer
        return self._key(text, outer)

    def at_call(self, key: int, caller: Caller) -> int:
        """Return the key of a frame at the line where it called something, told by the call.

        The key stays the same if the caller is another function: one whose frame is left out.
        """
        at = key, caller.line_number
        found = self._at_lines.get(at)
        if found is None:
            found = self._at_lines[at] = self._with_line(key, caller)
        return found

    def _with_line(self, key: int, caller: Caller) -> int:
        text, outer = self._frames[key]
        function, _, file = text.rpartition(":")[0].partition(" ")
        try:
            is_caller = caller.function_name == function and caller.file_name.endswith(file)
        except UnicodeDecodeError:  # the function is gone, and other bytes lie where its name was
            return key
        return self._key(f"{function} {file}:{caller.line_number}", outer) if is_caller else key

    def _key(self, text: str, outer: int) -> int:
        frame = text, outer
        key = self._keys.setdefault(frame, len(self._frames))
        if key == len(self._frames):
            self._frames.append(frame)
        return key

    def were_running(
        self, frames: Sequence[tuple[str, int, Key]], first_call_ns: Callable[[Key], int]
    ) -> None:
        """Leave out the lines of functions that were running when the profile began.

        Their names have the line that ran then (torch: csrc/autograd/profiler_python.cpp), which is neither
        the function's first line nor the one that allocates.

        Args:
            frames: name, start and key of frames, before any is added: at least of the first of each thread.
            first_call_ns: returns when the frame of a key first called anything, else when it ended.
        """
        begin = min((first_call_ns(key) for name, _, key in frames if _begins_profile(name)), default=0)
        for name in (name for name, start_ns, _ in frames if start_ns < begin):
            whole = frame_text(name, self._path_of)
            text, line, _ = whole.rpartition(":")
            self._texts[name] = f"{text}:0" if line else whole

    def stacks(self, keys: Int64) -> tuple[Int32, tuple[tuple[str, ...], ...], int]:
        """Return each key's row in the stacks (-1 for none), the stacks, and how many of them were cut.

        Args:
            keys: the keys of the innermost frames, -1 for none.
        """
        rows: dict[tuple[str, ...], int] = {}
        used, inverse = np.unique(keys, return_inverse=True)
        row_of = np.full(len(used), -1, np.int32)
        cut = 0
        for number, key in enumerate(used.tolist()):
            if key >= 0:
                stack = _outwards(self._frames, key)
                cut += len(stack) > MOST_FRAMES
                row_of[number] = rows.setdefault(stack[:MOST_FRAMES], len(rows))
        return row_of[inverse], tuple(rows), cut


def _outwards(frames: list[tuple[str, int]], key: int) -> tuple[str, ...]:
    """Return the texts from one frame outwards, at most one more than are kept."""
    texts: list[str] = []
    while key >= 0 and len(texts) <= MOST_FRAMES:
        text, key = frames[key]
        texts.append(text)
    return tuple(texts)
