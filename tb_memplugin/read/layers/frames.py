"""The Python frames of call stacks as numbers, outermost first, and what each means for module calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tb_memplugin.read.layers.source_text import Line, SourceText
from tb_memplugin.trace.frames import Frame, distinct, read_frame
from tb_memplugin.trace.kinds import ColumnEnum

MODULE_FILE = "torch/nn/modules/module.py"


class Role(ColumnEnum):
    """What a frame is for module calls."""

    PLAIN = 0
    CALL = 1
    """`nn.Module._call_impl`."""
    FORWARD = 2
    """A function named `forward`."""
    APPLY = 3
    """`nn.Module._apply`."""
    RECOMPUTE = 4
    """Checkpointing, which runs a forward again."""
    HOOKS = 5
    """The function inside `_call_impl` that runs a module's hooks and its `forward`."""
    LEFT_OUT = 6
    """What stands between a module's `__call__` and its `forward` and says nothing."""


class PythonFrame(NamedTuple):
    """A Python frame: `function` is a number that frames of the same function share."""

    function: int
    line: int
    role: Role
    file: str
    name: str


class Frames:
    """The distinct Python frames of stacks; a stack becomes a tuple of their numbers, outermost first.

    Args:
        read_text: whether the files of the frames may be read.
    """

    def __init__(self, stacks: Sequence[Sequence[str]], *, read_text: bool = True) -> None:
        python = {text: frame for text in distinct(stacks) if (frame := read_frame(text)).is_python}
        lines = ((frame.file, frame.line, frame.function) for frame in python.values())
        self.text = SourceText(lines, read=read_text)
        if self.text.is_known:
            self.text.check(_module_calls(stacks, python))
        self._calls_forward: dict[int, bool] = {}
        self.all: list[PythonFrame] = []
        self._functions: dict[tuple[str, str, int], int] = {}
        self._numbers = {text: self._add(frame) for text, frame in python.items()}
        self._call = self._add(Frame("_call_impl", MODULE_FILE, 0))

    def of_stack(self, stack: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of a stack's Python frames, outermost first; empty for a stack without any.

        What checkpointing runs again may be a `forward` that no module call encloses: it gets one.

        Args:
            stack: the texts of its frames, innermost first.
        """
        find = self._numbers.get
        numbers = tuple([number for text in reversed(stack) if (number := find(text, -1)) >= 0])
        if self.text.is_known:
            numbers = self._with_calls(numbers)
        roles = [self.all[number].role for number in numbers]
        if Role.RECOMPUTE in roles:
            last = len(roles) - roles[::-1].index(Role.RECOMPUTE)
            called = next((role for role in roles[last:] if role in _CALLED), None)
            if called == Role.FORWARD:
                return (*numbers[:last], self._call, *numbers[last:])
        return numbers

    def _with_calls(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Insert a module call where a line calls a module's `forward` itself."""
        result: list[int] = []
        for number in numbers:
            if self.all[number].role == Role.FORWARD and result and self._may_call_forward(result[-1]):
                result.append(self._call)
            result.append(number)
        return tuple(result)

    def _may_call_forward(self, number: int) -> bool:
        """Whether the line of a frame calls the `forward` of a module itself."""
        if number not in self._calls_forward:
            targets = self.text.called(self.all[number].file, self.all[number].line)
            self._calls_forward[number] = any(target.is_forward for target in targets)
        return self._calls_forward[number]

    def _add(self, frame: Frame) -> int:
        """Return the number of a new frame, -1 if it is left out."""
        role = _role(frame.function, frame.file)
        if role == Role.LEFT_OUT:
            return -1
        key = (frame.file, frame.function, self.text.function_line(frame.file, frame.line))
        function = self._functions.setdefault(key, len(self._functions))
        self.all.append(PythonFrame(function, frame.line, role, frame.file, frame.function))
        return len(self.all) - 1


def _module_calls(stacks: Iterable[Sequence[str]], python: dict[str, Frame]) -> set[tuple[Line, Line]]:
    """Return the line that called and the line of the `forward` that ran, of each distinct module call."""
    result: set[tuple[Line, Line]] = set()
    roles = {text: _role(frame.function, frame.file) for text, frame in python.items()}
    for stack in stacks:
        ran: Frame | None = None
        in_call = False
        for text in (text for text in stack if text in python):
            role = roles[text]
            if role == Role.FORWARD:
                ran = python[text] if not in_call else ran
            if role == Role.CALL:
                in_call = True
            elif in_call and role not in (Role.LEFT_OUT, Role.HOOKS):
                if ran is not None:
                    result.add(((python[text].file, python[text].line), (ran.file, ran.line)))
                ran, in_call = python[text] if role == Role.FORWARD else None, False
    return result


_OF_MODULE = {"_call_impl": Role.CALL, "inner": Role.HOOKS, "_apply": Role.APPLY}
_CALLED = (Role.FORWARD, Role.CALL)


def _role(function: str, file: str) -> Role:
    if function == "forward":
        return Role.FORWARD
    file = file.replace("\\", "/")
    if file.endswith(MODULE_FILE):
        return _OF_MODULE.get(function, Role.LEFT_OUT)
    if file.endswith("torch/utils/checkpoint.py") and function in ("recompute_fn", "unpack_hook", "backward"):
        return Role.RECOMPUTE
    return Role.PLAIN
