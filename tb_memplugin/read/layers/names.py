"""Names of module calls: the attributes and indices by which parents call them, as far as these are known."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from tb_memplugin.read.layers.calls import Call
from tb_memplugin.read.layers.frames import Frames, PythonFrame
from tb_memplugin.read.layers.source_text import BACKWARDS, LOOP, NOT_KNOWN, Target, likeness

CHECKPOINT_FILE = "torch/utils/checkpoint.py"
CONTAINER_FILE = "torch/nn/modules/container.py"

_CLASSES = {
    "linear": "Linear",
    "conv": "Conv",
    "normalization": "Norm",
    "batchnorm": "BatchNorm",
    "sparse": "Embedding",
    "dropout": "Dropout",
    "container": "Sequential",
    "rnn": "RNN",
    "pooling": "Pool",
    "loss": "Loss",
}
"""What the files of `torch.nn.modules` have, for recordings without the text of PyTorch."""


class Names:
    """Gives every call its name below the call that made it."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._text = frames.text
        self._classes: dict[int, str] = {}

    def name(self, calls: Sequence[Call], at_end: Call | None) -> None:
        """Name all calls, in the order in which they began; `at_end` is the one that ran at the end."""
        self._name_outermost(calls)
        for call in calls:
            for site, children in call.children.items():
                self._name_site(call, site, children)
            _last_indices([child for children in call.children.values() for child in children])
        _unname_skipped(calls, at_end)
        for call in calls:
            for site, children in call.children.items():
                rounds = [inner for inner in children if inner.in_loop]
                if len(rounds) > 1 and (around := _loop_around(call, site)):
                    _unname((*rounds, *around))
        unsure = {call.function for call in calls if call.is_unsure}
        for call in (call for call in calls if call.function in unsure):
            for children in call.children.values():
                _unname(inner for inner in children if inner.in_loop)
            while call.parent is not None and not call.in_loop:
                call = call.parent
            if call.parent is not None:
                _unname(call.parent.children[call.site])

    def _name_outermost(self, calls: Sequence[Call]) -> None:
        """Tell the model, which has no name, from others that the program calls: their place is not known.

        A loss calls no modules, and a part of the model is called by it, too. Two variables that a function
        calls are two models, also of one class.
        """
        outermost = [call for call in calls if call.parent is None]
        inner = {call.function for call in calls if call.parent is not None}
        first = [call for call in outermost if not call.recomputed]
        models = {call.function for call in first if call.children} or {call.function for call in first}
        if len(models) > 1:
            models -= inner
        variables = self._variables([call for call in first if call.function in models])
        for call in outermost:
            if len(models) != 1 or call.function not in models or call.recomputed or variables:
                call.name = f"{NOT_KNOWN}{variables.get(call) or self.class_of(call)}"

    def _variables(self, calls: Iterable[Call]) -> dict[Call, str]:
        """Return the variables that outermost calls call; none unless a function calls several of a class."""
        callers = {call.site[-1] for call in calls if call.site}
        frames = [self._frames.all[number] for number in callers]
        if len({(frame.file, frame.name) for frame in frames}) == len(frames):
            return {}
        names = {
            number: self._text.variable(self._frames.all[number].file, self._frames.all[number].line)
            for number in callers
        }
        called: defaultdict[tuple[str, str, int], set[str]] = defaultdict(set)
        for call in calls:
            if call.site:
                caller = self._frames.all[call.site[-1]]
                called[caller.file, caller.name, call.function].add(names[call.site[-1]])
        is_known = any(len(variables - {""}) > 1 for variables in called.values())
        return {call: names[call.site[-1]] for call in calls if call.site} if is_known else {}

    def class_of(self, call: Call) -> str:
        """Return the class whose `forward` ran, as far as it is known; else the name of its file."""
        if not call.inside:
            return ""
        number = call.inside[-1]
        if number not in self._classes:
            self._classes[number] = self._class_at(self._frames.all[number])
        return self._classes[number]

    def _class_at(self, frame: PythonFrame) -> str:
        class_name = self._text.class_name(frame.file, frame.line)
        if class_name:
            return class_name
        path = PurePosixPath(frame.file.replace("\\", "/"))
        is_torch = "torch/nn/modules/" in str(path)
        return _CLASSES.get(path.stem, path.stem) if is_torch else path.stem

    def _name_site(self, parent: Call, site: tuple[int, ...], calls: list[Call]) -> None:
        every = self._frames.all
        if is_sequential(site, self._frames):
            self._in_sequential(parent, calls)
            return
        targets = self._targets(site)
        if targets:
            self._by_targets(calls, targets)
            return
        caller = every[site[-1]] if site else None
        if caller and self._text.makes(caller.file, caller.line):
            return  # a loss that the parent makes on the way, or a global activation: the parent's own
        line = caller.line if caller else 0
        unknown = NOT_KNOWN if caller and self._text.has(caller.file) else ""
        same: Counter[int] = Counter(call.function for call in calls)
        turns: Counter[int] = Counter()
        for call in calls:
            call.name = f"{unknown}{self.class_of(call)}:{line}"
            if same[call.function] > 1:
                call.name += f".{turns[call.function]}"
                turns[call.function] += 1

    def _in_sequential(self, parent: Call, calls: list[Call]) -> None:
        """Name the calls of a Sequential: by its modules, if the text has them; some may allocate nothing."""
        is_list = len({self.class_of(call) for call in calls}) == 1 and not self._is_of_torch(calls[0])
        is_numbered = is_list and (parent.elements is not None or not parent.is_by_text)
        may_skip = not is_numbered and (parent.is_by_text or parent.parent is None)
        indices: Sequence[int] = ()
        if parent.elements:
            indices = self._indices(calls, parent.elements)
        elif parent.parent is None and parent.site:  # the whole model: the file that calls it may make it
            sequentials = self._text.sequentials(self._frames.all[parent.site[-1]].file)
            possible = {tuple(self._indices(calls, elements)) for elements in sequentials}
            fits = [each for each in possible if len(each) == len(calls)]
            indices = fits[0] if len(fits) == 1 else ()
        for order, call in enumerate(calls):
            call.name = f"{NOT_KNOWN if may_skip else ''}{order}"
            call.in_loop, call.without_index = True, f"{NOT_KNOWN}{order}"
            if order < len(indices):
                call.name = str(indices[order])

    def _indices(self, calls: Sequence[Call], elements: Sequence[str]) -> list[int]:
        """Return the index of the module of a Sequential that each call is, as far as the classes fit.

        Args:
            elements: as in `Target`. Of any number of modules none may be skipped, as PyTorch's own may.
        """
        indices: list[int] = []
        runs = [int(not element.startswith("*")) for element in elements]
        after = 0
        for call in calls:
            name = self.class_of(call)
            fits = (at for at in range(after, len(elements)) if likeness(name, elements[at].strip("*")) > 1)
            at = next(fits, None)
            if at is None and elements.count("") == 1 and elements.index("") >= after:
                at = elements.index("")
            is_one = at is not None and not elements[at].startswith("*")
            if at is None or not (is_one or self._is_sure(call)):
                break
            indices.append(sum(runs[:at]) + (0 if is_one else runs[at]))
            runs[at] += not is_one
            after = at + is_one
        return indices

    def _is_sure(self, call: Call) -> bool:
        """Whether a call is surely one: where it ends as it begins, or a line calls twice, it may be two.

        A line that calls several modules, each once, ends with another than it begins with.
        """
        if self._is_of_torch(call):
            return False
        if call.first == call.last:
            frame = self._frames.all[call.last[-1]] if call.last else None
            most = self._text.most_calls(frame.file, frame.line) if frame else None
            if most is None or most < 2 or len(call.children[call.last or ()]) != most:
                return False
        for site, children in call.children.items():
            if len(children) > len({child.function for child in children}) and site:
                frame = self._frames.all[site[-1]]
                if self._text.most_calls(frame.file, frame.line) is not None:
                    return False
        return True

    def _is_of_torch(self, call: Call) -> bool:
        return all("torch/nn/" in self._frames.all[number].file for number in call.inside)

    def _targets(self, site: tuple[int, ...]) -> tuple[Target, ...]:
        """Return the modules that a site calls: those of its innermost frame whose text names any.

        A frame may be a method of a module below the parent, which the line of the frame around it says.
        """
        frames = [self._frames.all[number] for number in site]
        for at in range(len(frames) - 1, -1, -1):
            inner = frames[at + 1].name if at + 1 < len(frames) else ""
            if inner == "__call__" and self._text.has(frames[at + 1].file):
                return ()  # an object that is no module, with a method that calls modules
            targets = self._text.called(frames[at].file, frames[at].line)
            targets = tuple(target for target in targets if target.path.rpartition(".")[2] != inner)
            if targets:
                around = [
                    self._text.receiver(outer.file, outer.line, method.name)
                    for outer, method in pairwise(frames[: at + 1])
                ]
                below = "".join(f"{path}." for path in around if path)
                lines = [(frame.file, frame.line) for frame in frames[: at + 1]]
                if any(self._text.in_another_loop(outer, lines[-1]) for outer in lines[:-1]):
                    targets = tuple(target.without_index() for target in targets)
                return tuple(
                    target._replace(path=f"{below}{target.path}", position=0) if below else target
                    for target in targets
                )
        return ()

    def _by_targets(self, calls: list[Call], targets: tuple[Target, ...]) -> None:
        """Match calls with the modules that their line calls: by class, and in order."""
        after, rounds = 0, Counter[int]()
        called: defaultdict[int, list[Call]] = defaultdict(list)
        likely = [_most_likely(self.class_of(call), targets) for call in calls]
        wanted = Counter(likely)
        for call, candidates in zip(calls, likely, strict=True):
            if (
                wanted[candidates] % len(candidates) and not call.recomputed
            ):  # which of them allocated nothing is not known
                order = rounds[-1]
                rounds[-1] += 1
                call.name = f"{NOT_KNOWN}{self.class_of(call)}.{order}"
                continue
            at = next((at for at in candidates if at >= after), candidates[0])
            call.name = _filled(targets[at].path, rounds[at], wanted[candidates] // len(candidates))
            call.without_index = _filled(targets[at].without_index().path, rounds[at], 0)
            call.elements, call.is_by_text = targets[at].elements, True
            call.position, call.may_skip = targets[at].position, targets[at].may_skip
            call.in_loop = LOOP in targets[at].path or BACKWARDS in targets[at].path
            rounds[at] += 1
            after = at + 1
            called[at].append(call)
        for at, target in enumerate(targets):
            if target.path.endswith(f".{LOOP}"):
                self._by_elements(called[at], target)

    def _by_elements(self, calls: Sequence[Call], target: Target) -> None:
        """Correct the indices in a list of modules of several classes, of which some may allocate nothing."""
        is_of_torch = any(self._is_of_torch(call) and not call.children for call in calls)
        is_of_one = [element[:1] for element in target.of_list or ()] == ["*"]
        if is_of_one or not (target.of_list or is_of_torch):
            return
        indices = self._indices(calls, target.of_list or ())
        for order, call in enumerate(calls):
            head = call.name.rpartition(".")[0]
            call.name = f"{head}.{indices[order]}" if order < len(indices) else call.without_index


def is_sequential(frames: tuple[int, ...], every: Frames) -> bool:
    """Whether the innermost of some frames is the forward of a `Sequential`."""
    return bool(frames) and every.all[frames[-1]].file.replace("\\", "/").endswith(CONTAINER_FILE)


def _most_likely(name: str, targets: Sequence[Target]) -> tuple[int, ...]:
    """Return the indices of the targets that fit a class best."""
    fits = [likeness(name, target.class_name) for target in targets]
    return tuple(at for at, value in enumerate(fits) if value == max(fits))


def _filled(path: str, turn: int, turns: int) -> str:
    """Return a path with the index of a round of its loop."""
    values = {LOOP: str(turn), BACKWARDS: str(turns - 1 - turn), NOT_KNOWN: f"{NOT_KNOWN}{turn}"}
    return ".".join(values.get(part, part) for part in path.split("."))


def _unname_skipped(calls: Sequence[Call], at_end: Call | None) -> None:
    """Take the indices from the calls of loops that skip some: they make more in one run than in another."""
    unfinished = set()
    while at_end is not None:
        unfinished.add(at_end)
        at_end = at_end.parent
    runs: defaultdict[tuple[str, tuple[int, ...]], list[list[Call]]] = defaultdict(list)
    for call in calls:
        for site, children in call.children.items():
            rounds = [inner for inner in children if inner.in_loop and not inner.recomputed]
            if rounds and (call not in unfinished or call.last != site):
                runs[call.fqn(), site].append(rounds)
    for of_site in runs.values():
        if len({len(rounds) for rounds in of_site}) > 1:
            _unname(inner for rounds in of_site for inner in rounds)


def unname_conditional(calls: Sequence[Call], complete: Container[tuple[str, tuple[int, ...]]]) -> None:
    """Take the indices from the calls of loops that may skip some, unless it is known that they skipped none.

    Args:
        complete: the names of the calls that looped, and the sites of their loops, that skipped none.
    """
    for call in calls:
        for site, children in call.children.items():
            unsure = [inner for inner in children if inner.may_skip and inner.in_loop]
            if unsure and (call.fqn(), site) not in complete:
                _unname(unsure)


def _loop_around(call: Call, site: tuple[int, ...]) -> list[Call]:
    """Return the calls of an outer loop, if nothing tells its rounds from those of a call's loop at a site.

    Where a call of the outer loop neither begins nor ends with anything but the inner loop, the inner loop's
    next round may be the outer loop's.
    """
    inner = call.repeats or call
    while (outer := inner.parent) is not None:
        siblings = [other for other in outer.children[inner.site] if other.function == inner.function]
        if len(siblings) > 1 and all(other.is_apart for other in siblings[1:]):
            return []
        if any(other.first != site or other.last != site for other in siblings[:-1] or siblings):
            return []
        if inner.in_loop:
            return [other for other in outer.children[inner.site] if other.in_loop]
        inner, site = outer.repeats or outer, inner.site
    return []


def _unname(calls: Iterable[Call]) -> None:
    """Take the indices of their loop from the names of calls."""
    for call in calls:
        call.name = call.without_index or call.name


def _last_indices(calls: list[Call]) -> None:
    """Replace `layers.-1` by the last index that other calls of the parent have."""
    highest: defaultdict[str, int] = defaultdict(lambda: -1)
    for call in calls:
        head, _, index = call.name.rpartition(".")
        if index.isdecimal():
            highest[head] = max(highest[head], int(index))
    for call in calls:
        head, _, index = call.name.rpartition(".")
        if index.startswith("-"):
            last = highest[head] + 2 + int(index)
            call.name = f"{head}.{last}"


def link_recomputed(calls: Sequence[Call], frames: Frames) -> None:
    """Find the calls that checkpointing repeats, and give them their parents.

    The last call that was checkpointed and not yet repeated is repeated first.
    """
    waiting: defaultdict[tuple[int, tuple[int, ...]], list[Call]] = defaultdict(list)
    text = frames.text
    for call in calls:
        behind = [frames.all[number] for number in _behind_checkpoint(call.site, frames)]
        if any(
            (text.most_calls(f.file, f.line) or 0) > 1 or text.in_one_loop(f.file, f.line, f.line)
            for f in behind
        ):
            continue  # which of the calls that one line makes it repeats is not known
        key = (call.function, _behind_checkpoint(call.site, frames))
        if call.recomputed and call.parent is None and waiting[key]:
            call.repeats = waiting[key].pop()
            call.parent = call.repeats.parent
        elif not call.recomputed and _is_checkpointed(call, frames):
            waiting[key].append(call)


def _is_checkpointed(call: Call, frames: Frames) -> bool:
    return any(_is_checkpoint(number, frames) for number in (*call.site, *call.inside))


def _behind_checkpoint(site: tuple[int, ...], frames: Frames) -> tuple[int, ...]:
    """Return the frames of a site after the last one of checkpointing; none if it has none."""
    for depth in range(len(site) - 1, -1, -1):
        if _is_checkpoint(site[depth], frames):
            return site[depth + 1 :]
    return ()


def _is_checkpoint(number: int, frames: Frames) -> bool:
    return frames.all[number].file.replace("\\", "/").endswith(CHECKPOINT_FILE)
