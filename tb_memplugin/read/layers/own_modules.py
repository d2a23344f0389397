"""Match the module calls that stacks show with the modules of the program, where these are at hand.

A stack says which `forward` ran and not of which module: in a Sequential of Sequentials all calls have the
same frames. The model says which modules there are, and in which order a Sequential calls them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from tb_memplugin.read.layers.calls import Call
from tb_memplugin.read.layers.frames import Frames
from tb_memplugin.read.layers.names import is_sequential
from tb_memplugin.read.layers.source_text import NOT_KNOWN

MOST_PAIRS = 1 << 22
"""How many pairs of a call and a module of one Sequential are compared; more are not matched."""


@dataclass(slots=True, eq=False)
class ModelModule:
    """A module of a model.

    Attributes:
        name: its FQN, "" for a model without a name.
        forward: the file of its class's `forward`, and its first and last line; None if it is no Python.
        is_sequential: whether that is the `forward` of `nn.Sequential`.
        allocates: whether each call of it surely allocates.
        children: its own modules by name. One that has several names is the same object under each.
    """

    name: str
    forward: tuple[str, int, int] | None = None
    is_sequential: bool = False
    allocates: bool = False
    children: dict[str, ModelModule] = field(default_factory=dict)


class OwnModules:
    """Finds the modules of calls in models.

    Args:
        models: the outermost modules.
        at_end: the innermost call that had not ended when the recording ended; None if all had.
    """

    def __init__(self, frames: Frames, models: Sequence[ModelModule], at_end: Call | None) -> None:
        self._frames = frames
        self._models = models
        self._unfinished: set[Call] = set()
        while at_end is not None:
            self._unfinished.add(at_end)
            at_end = at_end.parent
        self._modules: dict[Call, ModelModule] = {}
        self._unique: dict[tuple[ModelModule, int], ModelModule | None] = {}
        self._allocated: dict[ModelModule, set[int]] = {}
        """The positions in each Sequential at which calls that ended have allocated."""

    def match(self, calls: Sequence[Call]) -> None:
        """Match calls, in the order in which they began; those that had not ended come last."""
        late = set(self._unfinished)
        for call in calls:
            if call.parent in late:
                late.add(call)
        for call in sorted(calls, key=lambda call: call in late):
            self._match(call)

    def fqn(self, call: Call) -> str:
        """Return the name of a call's module: the program's own as far down as it is matched."""
        parts: list[str] = []
        inner: Call | None = call
        while inner is not None and inner not in self._modules:
            parts.append((inner.repeats or inner).name)
            inner = inner.parent
        if inner is None:
            return call.fqn()
        return ".".join(filter(None, (self._modules[inner].name, *reversed(parts))))

    def _match(self, call: Call) -> None:
        module = self._modules.get(call) or self._module_of(call)
        if module is None:
            return
        self._modules[call] = module
        if module.is_sequential:
            self._match_sequential(call, module)

    def _module_of(self, call: Call) -> ModelModule | None:
        if call.repeats is not None:
            return self._modules.get(call.repeats)
        if call.parent is None:
            return self._outermost(call)
        parent = self._modules.get(call.parent)
        if parent is None or parent.is_sequential:
            return None
        if not call.name or NOT_KNOWN in call.name or ":" in call.name:
            return self._only_below(parent, call) if call.name else None
        named: ModelModule | None = parent
        for key in call.name.split("."):
            named = named and named.children.get(key)
        return named if named and self._runs(call, named) else None

    def _outermost(self, call: Call) -> ModelModule | None:
        fits = [model for model in self._models if self._runs(call, model)]
        if not fits or not call.children:  # a part of a model may be called by itself
            fits = [
                each for model in self._models for each in (model, *_below(model)) if self._runs(call, each)
            ]
        return fits[0] if len(set(fits)) == 1 else None

    def _only_below(self, parent: ModelModule, call: Call) -> ModelModule | None:
        """Return the only module in another that can have run, if there is just one."""
        key = (parent, call.function)
        if key not in self._unique:
            fits = {module for module in _below(parent) if self._runs(call, module)}
            self._unique[key] = fits.pop() if len(fits) == 1 else None
        return self._unique[key]

    def _runs(self, call: Call, module: ModelModule) -> bool:
        if module.forward is None or not call.inside:
            return False
        frame = self._frames.all[call.inside[-1]]
        file, first, last = module.forward
        return frame.file == file and first <= frame.line <= last

    def _match_sequential(self, call: Call, sequential: ModelModule) -> None:
        """Match the calls in a Sequential and in those in it: the stacks of these are the same."""
        calls, modules = [*self._calls_in(call)], [*_modules_in(sequential)]
        if len(calls) * len(modules) > MOST_PAIRS:
            return
        allocated = self._allocated.setdefault(sequential, set())
        is_unfinished = call in self._unfinished
        fits = [
            [at for at, (depth, module) in enumerate(modules) if depth == own and self._runs(inner, module)]
            for own, inner in calls
        ]
        surely = {at for at, (_, module) in enumerate(modules) if module.allocates}
        positions = _only_positions(
            fits, len(modules), surely | (allocated if is_unfinished else set()), to_the_end=not is_unfinished
        )
        for (_, inner), position in zip(calls, positions, strict=True):
            if position is not None:
                self._modules[inner] = modules[position][1]
        if not is_unfinished and None not in positions:
            allocated.update(position for position in positions if position is not None)

    def _calls_in(self, call: Call, depth: int = 0) -> Iterator[tuple[int, Call]]:
        """Yield the calls in a Sequential's, with those of the Sequentials in it instead of these."""
        children = [child for of_site in call.children.values() for child in of_site]
        for child in sorted(children, key=lambda child: child.row):
            if is_sequential(child.inside, self._frames):
                yield from self._calls_in(child, depth + 1)
            else:
                yield depth, child


def _modules_in(sequential: ModelModule, depth: int = 0) -> Iterator[tuple[int, ModelModule]]:
    """Yield what a Sequential calls, in order, with what the Sequentials in it call instead of these."""
    for child in sequential.children.values():
        if child.is_sequential:
            yield from _modules_in(child, depth + 1)
        else:
            yield depth, child


def _below(module: ModelModule) -> Iterator[ModelModule]:
    """Yield all modules in a module, each once."""
    pending, visited = [*module.children.values()], {module}
    while pending:
        child = pending.pop()
        if child not in visited:
            visited.add(child)
            yield child
            pending += child.children.values()


def _only_positions(
    fits: Sequence[Sequence[int]], count: int, needed: Container[int], *, to_the_end: bool
) -> list[int | None]:
    """Return the position of each call among modules that are called in order, None if it may have several.

    Args:
        fits: for each call, the positions of the modules that can have made it, ascending.
        count: the number of modules.
        needed: the positions that no call may skip.
        to_the_end: whether the calls are all there were; else those to come are not known.
    """
    next_needed = [count] * (count + 1)
    for position in range(count - 1, -1, -1):
        next_needed[position] = position if position in needed else next_needed[position + 1]
    reached: list[list[int]] = []
    before = [-1]
    for possible in fits:
        before = [at for at in possible if any(last < at <= next_needed[last + 1] for last in before)]
        reached.append(before)
    after = [at for at in before if not to_the_end or next_needed[at + 1] == count]
    for row in range(len(reached) - 1, -1, -1):
        if row < len(reached) - 1:
            after = [at for at in reached[row] if any(at < then <= next_needed[at + 1] for then in after)]
        reached[row] = after
    return [positions[0] if len(positions) == 1 else None for positions in reached]
