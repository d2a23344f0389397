"""Follow call stacks in time to the calls of modules that they belong to.

A stack says which functions were open at which lines. Two stacks, one after another, belong to the same calls
as far as their frames are equal and, in the first that differs, the line can have moved on to the next.
A line that goes back is a loop within the function or a new call of it; see `Calls._is_new`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tb_memplugin.read.layers.frames import Frames, Role
from tb_memplugin.read.layers.source_text import likeness
from tb_memplugin.trace.tables import Bool, Int32, Int64

RARE = 0.05
"""A line with a smaller share of a function's sure beginnings is not where its calls begin."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a module.

    Attributes:
        parent: the call in whose forward it was called; None for an outermost call.
        site: the frames (numbers) from the parent's forward to the call, outermost first.
        inside: the frames from the call to the module's forward, which is the last one.
        function: the number of the function that the call ran.
        row: its row among all calls, in the order in which they begin.
        recomputed: whether checkpointing ran the forward again.
        repeats: the call that it repeats, if checkpointing ran it again.
        name: its name below the parent, as `names` finds it; of the model itself, it is empty.
        position: which attribute of its parent it is, in the order in which the class makes them; else 0.
        is_by_text: whether a source text has the name.
        without_index: its name if the index of its loop is not known.
        is_apart: whether its parent allocated with another line after its last call with this one.
        is_unsure: whether what a loop of it ran may as well be another call of it.
        may_skip: whether a condition in the loop decided that.
        elements: the classes of the modules in it, if it is a Sequential and a source text has them.
        first, last: the sites of the calls with which its allocations began and ended; () for its own.
        children: the calls that it made, by site.
    """

    parent: Call | None
    site: tuple[int, ...]
    inside: tuple[int, ...]
    function: int
    row: int
    recomputed: bool = False
    repeats: Call | None = None
    name: str = ""
    position: int = 0
    is_by_text: bool = False
    first: tuple[int, ...] | None = None
    last: tuple[int, ...] | None = None
    without_index: str = ""
    in_loop: bool = False
    is_apart: bool = False
    is_unsure: bool = False
    may_skip: bool = False
    elements: tuple[str, ...] | None = None
    children: dict[tuple[int, ...], list[Call]] = field(default_factory=dict)

    def fqn(self) -> str:
        """Return the module's name: those of the calls around it and its own."""
        parts: list[str] = []
        call = self
        while call.parent is not None:
            parts.append((call.repeats or call).name)
            call = call.parent
        parts.append(call.name)
        return ".".join(part for part in reversed(parts) if part)

    def allocates(self, site: tuple[int, ...]) -> None:
        """It allocates, in a call that it makes at a site, or itself: ()."""
        self.last = site
        if self.first is None:
            self.first = site


@dataclass(slots=True, eq=False)
class _Open:
    """A function that runs, at `number`, its frame."""

    number: int
    function: int
    line: int
    role: Role
    first: int
    call: Call | None = None
    has_forward: bool = False
    first_request: tuple[int, int] | None = None


class Calls:
    """Finds the module calls of stacks that are added in time order.

    Args:
        stacks: the numbers of the frames of each stack, outermost first.
        earlier: the result of a first pass over the same stacks, which knows where functions begin.
    """

    def __init__(
        self, frames: Frames, stacks: Sequence[tuple[int, ...]], earlier: Calls | None = None
    ) -> None:
        self.all: list[Call] = []
        self._frames = frames
        self._stacks = stacks
        self._times = 1
        self._earlier = earlier
        self._threads: dict[int, list[_Open]] = {}
        self.beginnings: dict[int, Counter[int]] = {}

    def follow(self, requests: Iterable[tuple[int, int, bool]], times: int = 1) -> list[int]:
        """Add stacks in time order; before, every function that was open has returned.

        Args:
            requests: of each allocation or free, the row of its stack, its bytes, and whether it allocates.

        Returns:
            The row in `all` of the call of each, -1 for none.
        """
        self._threads.clear()
        self._times = times
        owner: list[int] = []
        for row, size, is_alloc in requests:
            if is_alloc:
                call = self.add(row, size)
                owner.append(-1 if call is None else call.row)
            else:
                self.add_free(row)
                owner.append(-1)
        return owner

    def repeat(self, calls: Sequence[Call]) -> None:
        """Add calls that are like some others, which came one after another."""
        for call in calls:
            shift = len(self.all) - call.row
            parent = None if call.parent is None else self.all[call.parent.row + shift]
            again = self._add(parent, call.site, call.inside, call.function)
            again.recomputed, again.is_unsure = call.recomputed, call.is_unsure
            again.first, again.last, again.is_apart = call.first, call.last, call.is_apart

    def add(self, row: int, size: int) -> Call | None:
        """Return the module call in which a stack (its row) allocated `size` bytes."""
        stack = self._stacks[row]
        opened = self._threads.setdefault(self._frames.all[stack[0]].function, [])
        shared, is_sure = self._shared(opened, stack, is_free=False)
        if shared == len(stack) == len(opened) and self._repeats(opened, (size, row)):
            shared, is_sure = self._innermost_call(opened), False
        self._open(opened, stack, shared, is_sure=is_sure)
        leaf = opened[-1]
        if leaf.first_request is None:
            leaf.first_request = (size, row)
        call = next((frame.call for frame in reversed(opened) if frame.call is not None), None)
        if call is not None:
            call.allocates(())
            inner = call
            while inner.parent is not None and inner.parent.last != inner.site:
                inner.parent.allocates(inner.site)
                inner = inner.parent
        return call

    def add_free(self, row: int) -> None:
        """A stack (its row) released a block: what it no longer contains has returned."""
        stack = self._stacks[row]
        every = self._frames.all
        if len(stack) > 1 and every[stack[-1]].role == Role.CALL:  # its callee has returned, and so has it
            stack = stack[:-1]
        opened = self._threads.setdefault(every[stack[0]].function, [])
        shared, is_sure = self._shared(opened, stack, is_free=True)
        if shared >= 0:
            self._open(opened, stack, shared, is_sure=is_sure)

    def _shared(self, opened: list[_Open], stack: tuple[int, ...], *, is_free: bool) -> tuple[int, bool]:
        """Return how many open functions a stack continues, and whether the others surely are new calls.

        The first is -1 if the stack says only that what the innermost function called has returned.
        """
        every = self._frames.all
        for depth, (number, function) in enumerate(zip(stack, opened, strict=False)):
            if number == function.number:
                continue
            frame = every[number]
            if frame.function != function.function:
                return depth - (depth > 0 and self._is_another(opened[depth - 1], stack[depth:])), True
            if frame.line < function.line:
                if is_free and depth == len(stack) - 1:
                    del opened[depth + 1 :]
                    return -1, True
                if self._is_new(opened[: depth + 1], number):
                    return depth - (function.role == Role.HOOKS), False
            function.number, function.line = number, frame.line
            return depth + 1, True
        return min(len(stack), len(opened)), True

    def _is_another(self, call: _Open, inner: tuple[int, ...]) -> bool:
        """Whether the stack inside a module call cannot be that of the call: it had its forward already."""
        roles = (self._frames.all[number].role for number in inner)
        return (
            call.has_forward
            and next((role for role in roles if role in (Role.FORWARD, Role.CALL)), None) == Role.FORWARD
        )

    def _is_new(self, opened: list[_Open], number: int) -> bool:
        """Whether the innermost function, whose line went back, was called again, and is not in a loop."""
        function, frame = opened[-1], self._frames.all[number]
        if function.role in (Role.CALL, Role.HOOKS):
            return True
        text = self._frames.text
        if text.one_statement(frame.file, frame.line, function.line):
            return False
        in_loop = text.in_one_loop(frame.file, frame.line, function.line)
        if in_loop is False:
            return True
        beginnings = self._earlier.beginnings if self._earlier else {}
        began = beginnings.get(function.function, Counter[int]())
        often = [line for line, count in began.items() if count >= RARE * sum(began.values())]
        if not often:
            return frame.line <= function.first
        if frame.line not in often:
            return frame.line < min(often)
        if not in_loop or frame.line == function.first:
            return not in_loop or self._may_run_again(opened)
        return False

    def _may_run_again(self, opened: list[_Open]) -> bool:
        """Whether the innermost call may be another, and not a loop with its first line and its last."""
        call = inner = next((function.call for function in reversed(opened) if function.call), None)
        while call and call.parent and self._had_all(call):
            if call.parent.first != call.site:
                return False  # another call of the parent would begin with another
            call = call.parent
        if inner:
            inner.is_unsure = True
        return True

    def _had_all(self, call: Call) -> bool:
        """Whether the text of the line that made a call has no other of its class that it could make."""
        frame = self._frames.all[call.site[-1]] if call.site else None
        if frame is None or not call.parent or frame.role != Role.FORWARD or not call.inside:
            return False
        text, ran = self._frames.text, self._frames.all[call.inside[-1]]
        if text.most_calls(frame.file, frame.line) is None:
            return False
        name = text.class_name(ran.file, ran.line)
        fits = [likeness(name, target.class_name) for target in text.called(frame.file, frame.line)]
        return [each.function for each in call.parent.children[call.site]].count(call.function) >= fits.count(
            max(fits)
        )

    def _repeats(self, opened: list[_Open], request: tuple[int, int]) -> bool:
        """Whether the stack of the innermost function's first request, again, is a new call of its module.

        It is one if the module has no others inside, and its code from the call on is PyTorch's own.
        """
        leaf, call = opened[-1], self._innermost_call(opened)
        if call < 0 or leaf.first_request != request or opened[call].call.children:  # type: ignore[union-attr]
            return False
        own = [self._frames.all[function.number].file for function in opened[call + 1 :]]
        return bool(own) and all("torch/nn/" in file for file in own)

    @staticmethod
    def _innermost_call(opened: list[_Open]) -> int:
        return next((at for at in range(len(opened) - 1, -1, -1) if opened[at].call is not None), -1)

    def _open(self, opened: list[_Open], stack: tuple[int, ...], shared: int, *, is_sure: bool) -> None:
        """Close what is open from `shared` on, and open the rest of the stack."""
        every = self._frames.all
        if shared == len(stack) == len(opened):
            return
        del opened[shared:]
        shared = self._before_second_forward(opened, stack, shared)
        if shared == len(stack):
            return
        inner = self._innermost_call(opened)
        for depth in range(shared, len(stack)):
            frame = every[stack[depth]]
            function = _Open(stack[depth], frame.function, frame.line, frame.role, frame.line)
            if frame.role == Role.CALL:
                if inner >= 0 and self._is_one_too_many(opened[inner].call, stack[inner + 1 : depth]):
                    self._open(opened, stack, inner, is_sure=False)
                    return
                function.call = self._call(opened, inner, stack, depth)
                inner = depth
            elif is_sure:
                self.beginnings.setdefault(frame.function, Counter())[frame.line] += self._times
            if frame.role == Role.FORWARD and inner >= 0 and not opened[inner].has_forward:
                opened[inner].has_forward = True
                self._begin_forward(opened[inner].call, frame.function, stack, depth)
            opened.append(function)

    def _is_one_too_many(self, parent: Call | None, site: tuple[int, ...]) -> bool:
        """Whether the text of a site has no further call, so that the parent itself was called again."""
        if parent is None or not site or not (siblings := parent.children.get(site)):
            return False
        frame = self._frames.all[site[-1]]
        if frame.role != Role.FORWARD:
            return False
        most = self._frames.text.most_calls(frame.file, frame.line)
        return most is not None and len(siblings) >= most

    @staticmethod
    def _begin_forward(call: Call | None, function: int, stack: tuple[int, ...], depth: int) -> None:
        """The forward of a call begins; before, hooks may have allocated."""
        if call is not None:
            call.function, call.inside = function, stack[depth - len(call.inside) + 1 : depth + 1]

    def _before_second_forward(self, opened: list[_Open], stack: tuple[int, ...], shared: int) -> int:
        """Return `shared`, or the depth of the innermost call if the stack has a second forward for it."""
        call = self._innermost_call(opened)
        if call < 0 or not opened[call].has_forward:
            return shared
        if any(function.role == Role.FORWARD for function in opened[call + 1 :]):
            return shared
        roles = (self._frames.all[number].role for number in stack[shared:])
        if next((role for role in roles if role in (Role.FORWARD, Role.CALL)), None) != Role.FORWARD:
            return shared
        del opened[call:]
        return call

    def _call(self, opened: list[_Open], outer: int, stack: tuple[int, ...], depth: int) -> Call:
        every = self._frames.all
        parent = opened[outer].call if outer >= 0 else None
        site = stack[outer + 1 : depth] if parent else stack[:depth]
        end = depth + 1
        while end < len(stack) and every[stack[end]].role not in (Role.FORWARD, Role.CALL):
            end += 1
        inside = stack[depth + 1 : end + 1]
        last = every[inside[-1]] if inside else every[stack[depth]]
        call = self._add(parent, site, inside, last.function)
        call.recomputed = any(every[number].role == Role.RECOMPUTE for number in site)
        call.recomputed |= parent is not None and parent.recomputed
        call.is_apart = parent is not None and parent.last != site
        return call

    def _add(
        self, parent: Call | None, site: tuple[int, ...], inside: tuple[int, ...], function: int
    ) -> Call:
        call = Call(parent, site, inside, function, len(self.all))
        self.all.append(call)
        if parent is not None:
            parent.children.setdefault(site, []).append(call)
        return call


def follow_all(
    frames: Frames, stacks: Sequence[tuple[int, ...]], is_alloc: Bool, stack: Int32, size: Int64
) -> tuple[list[Call], Int32]:
    """Return the calls in which stacks allocated, and the row of each allocation's: int32, -1 for none.

    What comes between two allocations without Python frames, as autograd's threads make them when a forward
    is over, depends on nothing before. So it is followed once, however often it comes.

    Args:
        stacks: the numbers of the frames of each stack, outermost first.
        is_alloc, stack, size: shape (n,), of each allocation and free in time order: whether it allocates,
            its row in `stacks`, -1 for none, and its bytes.
    """
    has_frames = np.array([*map(bool, stacks), False])[stack]
    follows = has_frames & (is_alloc | (np.diff(stack, prepend=-1) != 0))
    kept = np.flatnonzero(follows)
    before = np.cumsum(is_alloc & ~has_frames)[kept]
    bounds = np.flatnonzero(np.diff(before, prepend=-1, append=-1)).tolist()
    is_alloc, stack, size = is_alloc[kept], stack[kept], np.where(is_alloc, size, 0)[kept]
    runs = [slice(first, end) for first, end in pairwise(bounds)]
    keys = [same_requests(stack[run], size[run], is_alloc[run]) for run in runs]
    requests = {
        key: list(zip(stack[run].tolist(), size[run].tolist(), is_alloc[run].tolist(), strict=True))
        for key, run in dict(zip(keys, runs, strict=True)).items()
    }
    earlier = Calls(frames, stacks)
    for key, times in Counter(keys).items():
        earlier.follow(requests[key], times)
    calls = Calls(frames, stacks, earlier)
    followed: dict[bytes, tuple[slice, Int32]] = {}
    owner = np.full(len(follows), -1, np.int32)
    for key, run in zip(keys, runs, strict=True):
        first = len(calls.all)
        if key not in followed:
            rows = np.array(calls.follow(requests[key]), np.int32)
            followed[key] = slice(first, len(calls.all)), rows
        else:
            repeated, rows = followed[key]
            calls.repeat(calls.all[repeated])
            rows = np.where(rows >= 0, rows + (first - repeated.start), -1)
        owner[kept[run]] = rows
    return calls.all, owner


def same_requests(stack: Int32, size: Int64, is_alloc: Bool) -> bytes:
    """Return what is the same for equal stacks in equal order, if also equal sizes of a stack are so again.

    Args:
        stack, size, is_alloc: shape (n,), the row of a stack, bytes, and whether these were allocated.
    """
    order = np.lexsort((size, stack))
    begins = (np.diff(stack[order], prepend=-2) != 0) | (np.diff(size[order], prepend=-1) != 0)
    like = np.empty(len(order), np.int32)
    like[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return b"".join(column.tobytes() for column in (stack, like, is_alloc))
