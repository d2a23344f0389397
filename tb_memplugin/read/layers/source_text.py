"""What the text of a Python file says of its lines: functions, loops, and the modules that a line calls.

Files are read, never run, and only if every frame of a recording fits them: each line must be in a function
of the frame's name. So a file of another version, or another file at the same path, says nothing.
"""

from __future__ import annotations

import ast
import builtins
import re
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

MOST_BYTES = 1 << 21
"""Longer files are not read; PyTorch's and transformers' longest with a `forward` have 0.4 MB."""

LOOP, BACKWARDS, NOT_KNOWN = "*", "~", "?"
"""Parts of a path: the index of a loop, of one over `reversed(...)`, and one that a text does not tell."""

_OUTERMOST = re.compile(r"^(?:@|class |def |async def )", re.MULTILINE)
"""Where an outermost class or function begins, or a decorator of it, which is then parsed alone, in vain."""

_METHODS = {("peft/peft_model.py", "get_base_model"): "base_model.model"}
"""Methods of libraries that return a module, by file and name."""

MANY = 1 << 30

Line = tuple[str, int]
"""A file and a line of it."""

_CONTAINERS = ("Sequential", "ModuleList")

_WHOLE = "()"
"""Stands for the tuple of names that a loop sets."""

_APPENDED = "[]"
"""Follows the name of a list for what is appended to it."""

_SAME_MODULES = ("forward", "__call__", "values", "items", "keys", "children", "to", "cuda")

_WEIGHTS = ("weight", "bias")
_NO_VALUES = ("dtype", "device", "shape")
_EXPRESSIONS = (ast.Call, ast.BinOp, ast.AugAssign)

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
_LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)


class Target(NamedTuple):
    """A module that a line calls.

    Attributes:
        path: its path below `self`.
        class_name: the class with which it was made, "" if not known.
        is_forward: whether the line calls `forward` itself, so that no module call begins.
        position: which of the attributes that its class makes it is, from 1; 0 if not known.
        may_skip: whether a condition in a loop decides if the line runs.
        elements: the classes of what it contains, if it is a Sequential whose modules are numbered; `*Block`
            are any number of them, and empty is what is not known.
        of_list: the same for the list of which a loop calls each module.
    """

    path: str
    class_name: str
    is_forward: bool = False
    position: int = 0
    may_skip: bool = False
    elements: tuple[str, ...] | None = None
    of_list: tuple[str, ...] | None = None

    def without_index(self) -> Target:
        """Return the module with an index of a loop that is not known, as if another loop is around that."""
        return self._replace(path=self.path.replace(LOOP, NOT_KNOWN).replace(BACKWARDS, NOT_KNOWN))


def likeness(ran: str, class_name: str) -> int:
    """How well the class whose forward ran fits the one with which a module was made.

    `BatchNorm2d` runs the forward of `_BatchNorm`.
    """
    if not class_name:
        return 1
    if ran == class_name:
        return 3
    return 2 if ran.strip("_") in class_name else 0


class SourceText:
    """The texts of the files of a recording's frames.

    Args:
        lines: (file, line, function) of each distinct Python frame.
        read: whether files may be read.
    """

    def __init__(self, lines: Iterable[tuple[str, int, str]] = (), *, read: bool = True) -> None:
        self._files: dict[str, _File | None] = {}
        self._lines: dict[str, list[tuple[int, str]]] = {}
        for file, line, function in lines if read else ():
            self._lines.setdefault(file, []).append((line, function))
        for file, wanted in self._lines.items():
            if any(function == "forward" for _, function in wanted):
                self._files[file] = _file(file, wanted)

    def check(self, calls: Iterable[tuple[Line, Line]]) -> None:
        """Forget the files that do not fit the module calls of a recording.

        A line that calls must have a call, and most classes must be those with which the modules are made.

        Args:
            calls: the line that called and the line of the `forward` that ran, of each distinct module call.
        """
        votes: dict[str, int] = {}
        for (file, line), ran in calls:
            function = self._function(file, line)
            if function is None:
                continue
            if not function.has_call(line):
                votes[file] = -MANY
            class_names = [target.class_name for target in function.called(line)]
            if (name := self.class_name(*ran)) and class_names and all(class_names):
                fits = any(likeness(name, each) > 1 for each in class_names)
                votes[file] = votes.get(file, 0) + (1 if fits else -1)
        for file, balance in votes.items():
            if balance < 0:
                self._files[file] = None

    @property
    def is_known(self) -> bool:
        """Whether any file's text is known and fits."""
        return any(text is not None for text in self._files.values())

    def has(self, file: str) -> bool:
        """Whether a file's text is known and fits."""
        return self._files.get(file) is not None

    def function_line(self, file: str, line: int) -> int:
        """Return the line in which the function begins that has a line; 0 without a text."""
        function = self._function(file, line)
        return function.node.lineno if function else 0

    def class_name(self, file: str, line: int) -> str:
        """Return the class of the method that has a line; "" without a text, or outside classes."""
        function = self._function(file, line)
        return function.owner.name if function and function.owner else ""

    def one_statement(self, file: str, line: int, other: int) -> bool:
        """Whether one simple statement has two different lines."""
        function = self._function(file, line)
        return function is not None and function.one_statement(line, other)

    def in_one_loop(self, file: str, line: int, other: int) -> bool | None:
        """Whether one loop of a function has both lines; None without a text."""
        function = self._function(file, line)
        return function.in_one_loop(line, other) if function else None

    def in_another_loop(self, outer: Line, inner: Line) -> bool:
        """Whether a loop of a function has a line of it, which calls another function that has a line."""
        function = self._function(*outer)
        return function is not self._function(*inner) and bool(self.in_one_loop(*outer, outer[1]))

    def called(self, file: str, line: int) -> tuple[Target, ...]:
        """Return the modules that a line calls, in order of evaluation; none without a text."""
        function = self._function(file, line)
        return function.called(line) if function else ()

    def sequentials(self, file: str) -> list[tuple[str, ...]]:
        """Return the elements of each `Sequential` that a file makes anywhere, as in `Target`."""
        text = self._read(file)
        return text.sequentials if text else []

    def variable(self, file: str, line: int) -> str:
        """Return the one variable, or attribute of `self`, that a line calls; "" for several, or no text."""
        text = self._read(file)
        names = text.variables(line) if text else set()
        return names.pop() if len(names) == 1 else ""

    def weights(self, file: str, line: int) -> tuple[Target, ...]:
        """Return the modules whose weights or biases an expression of a line uses itself, without a call."""
        function = self._function(file, line)
        return function.weights(line) if function else ()

    def uses_weights(self, file: str, line: int) -> bool:
        """Whether the class of a line uses weights or biases of modules below it anywhere in its methods."""
        function = self._function(file, line)
        return function is not None and function.class_uses_weights

    def makes(self, file: str, line: int) -> bool:
        """Whether a line calls a module that is no attribute: its function makes it, or it is global."""
        function = self._function(file, line)
        return function is not None and function.makes(line)

    def receiver(self, file: str, line: int, method: str) -> str:
        """Return the path of the module whose method a line calls; "" for `self`, or if the text has none.

        It is `NOT_KNOWN` if the line calls the methods of several.
        """
        function = self._function(file, line)
        return function.receiver(line, method) if function else ""

    def most_calls(self, file: str, line: int) -> int | None:
        """Return how many modules a line calls at most in a run of its function; None: not known."""
        function = self._function(file, line)
        return function.most_calls(line) if function else None

    def _read(self, file: str) -> _File | None:
        if file not in self._files:
            self._files[file] = _file(file, self._lines.get(file, []))
        return self._files[file]

    def _function(self, file: str, line: int) -> _Function | None:
        text = self._files.get(file)
        return text.at(line) if text else None


def _file(name: str, wanted: list[tuple[int, str]]) -> _File | None:
    path = Path(name)
    if path.suffix != ".py" or not path.is_absolute():
        return None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return None
        file = _File(name, path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    fits = all(_fits(file.at(line), function) for line, function in wanted)
    return file if fits else None


def _fits(function: _Function | None, name: str) -> bool:
    if name.startswith("<"):  # a module's own code, a lambda or a comprehension
        return True
    return function is not None and name in (function.node.name, *function.inner_names)


class _File:
    """A file's text. What stands outside the classes and functions that are asked for is not parsed."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text = f"{text}\n"  # the last line may have no end
        self._starts = [0, *(match.start() for match in _OUTERMOST.finditer(text)), len(text)]
        self._line_of_start = [1 + text.count("\n", 0, start) for start in self._starts]
        self._blocks: dict[int, list[_Function]] = {}
        self._classes: dict[str, ast.ClassDef] = {}
        self._at: dict[int, _Function | None] = {}
        self._values: dict[str, dict[str, ast.expr]] = {}

    def at(self, line: int) -> _Function | None:
        """Return the outermost function (a method, or one outside classes) that has a line."""
        if line not in self._at:
            functions = self._block(bisect_right(self._line_of_start, line) - 1)
            has_line = (f for f in functions if _has(f.node, line, line))
            self._at[line] = next(has_line, None)
        return self._at[line]

    def _block(self, number: int) -> list[_Function]:
        """Return the functions of an outermost class or function."""
        if number not in self._blocks:
            self._blocks[number] = []
            if 0 <= number < len(self._starts) - 1:
                lines_before = "\n" * (self._line_of_start[number] - 1)
                with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                    tree = ast.parse(lines_before + self._text[slice(*self._starts[number : number + 2])])
                    _name_self(tree)
                    self._blocks[number] = list(_functions(tree, None, self))
                    self._classes.update((n.name, n) for n in tree.body if isinstance(n, ast.ClassDef))
        return self._blocks[number]

    def _class(self, name: str) -> ast.ClassDef | None:
        match = re.search(rf"^class {re.escape(name)}\b", self._text, re.MULTILINE)
        if match and name not in self._classes:
            self._block(bisect_right(self._starts, match.start()) - 1)
        return self._classes.get(name)

    @cached_property
    def sequentials(self) -> list[tuple[str, ...]]:
        """The elements of each Sequential that is made."""
        return [elements for node in self._nodes if (elements := _elements_of(node))]

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return list(ast.walk(ast.parse(self._text)))
        return []

    @cached_property
    def _not_variables(self) -> set[str]:
        """The names of functions and classes, and of what is imported."""
        names = {node.name for node in self._nodes if isinstance(node, Function | ast.ClassDef)}
        return names | {node.asname or node.name for node in self._nodes if isinstance(node, ast.alias)}

    def variables(self, line: int) -> set[str]:
        """Return the variables, and the attributes of `self`, that a line calls."""
        names = set()
        for node in self._nodes:
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    if _has(node, line, line) and not hasattr(builtins, name):
                        names.add(name)
        return names - self._not_variables

    def values_of(self, owner: ast.ClassDef) -> dict[str, ast.expr]:
        """Return what methods of a class, and of its bases in the file, assign to attributes of `self`."""
        if owner.name not in self._values:
            values: dict[str, ast.expr] = {}
            self._values[owner.name] = values
            for base in owner.bases:
                base_class = self._class(base.id) if isinstance(base, ast.Name) else None
                if base_class is not None and base_class is not owner:
                    values.update(self.values_of(base_class))
            nodes = list(ast.walk(owner))
            assignments = (node for node in nodes if isinstance(node, ast.Assign))
            own: dict[str, ast.expr] = {}
            for node in sorted(assignments, key=lambda node: node.lineno):
                for name, value in _assigned(node.targets[0], node.value):
                    if name not in own or _is_empty(own[name]):
                        own[name] = value
                    elif not _is_empty(value):  # which of them it is may depend on a condition
                        own[name] = ast.IfExp(test=ast.Constant(None), body=value, orelse=own[name])
            values.update(
                (name, value) for name, value in own.items() if name not in values or not _is_empty(value)
            )
            appended: dict[str, list[ast.expr]] = {}
            for call in nodes:
                match call:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr="append"),
                        args=[value],
                    ):
                        appended.setdefault(f"{name}{_APPENDED}", []).append(value)
            values.update((name, each) for name, of in appended.items() if (each := _of_one_class(of)))
        return self._values[owner.name]


def _name_self(tree: ast.Module) -> None:
    """Rename the first parameter of methods to `self`, where it has another name."""
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    methods = (node for owner in owners for node in owner.body if isinstance(node, Function))
    for method in methods:
        first = next((each.arg for each in method.args.args), "self")
        if first != "self" and not method.decorator_list:
            for node in ast.walk(method):
                if isinstance(node, ast.Name) and node.id == first:
                    node.id = "self"


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes of `self` that an assignment sets, with their values."""
    match target, value:
        case ast.Attribute(value=ast.Name(id="self"), attr=name), _:
            yield name, value
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            for element, its_value in zip(targets, values, strict=True):
                yield from _assigned(element, its_value)
        case ast.Tuple(elts=targets), _:
            each = value.elt if isinstance(value, ast.GeneratorExp | ast.ListComp) else value
            for element in targets:
                yield from _assigned(element, each)


def _is_empty(value: ast.expr) -> bool:
    """Whether an expression is `None`, or makes a container of nothing."""
    return isinstance(value, ast.Constant) or (_name_of_class(value) in _CONTAINERS and not value.args)  # type: ignore[attr-defined]


def _functions(tree: ast.AST, owner: ast.ClassDef | None, file: _File) -> Iterator[_Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield _Function(node, owner, file)
        else:
            yield from _functions(node, node if isinstance(node, ast.ClassDef) else owner, file)


class _Function:
    """A method or function, with those inside it."""

    def __init__(self, node: Function, owner: ast.ClassDef | None, file: _File) -> None:
        self.node, self.owner, self.file = node, owner, file
        self._called: dict[int, tuple[Target, ...]] = {}
        self._locals: dict[str, str] = {}

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.node))

    @cached_property
    def inner_names(self) -> set[str]:
        return {node.name for node in self._nodes if isinstance(node, Function)}

    def one_statement(self, line: int, other: int) -> bool:
        return any(_has(node, line, other) for node in self._long_statements)

    @cached_property
    def _long_statements(self) -> list[ast.stmt]:
        """The simple statements of several lines."""
        simple = (node for node in self._nodes if isinstance(node, _SIMPLE))
        return [node for node in simple if node.end_lineno != node.lineno]

    def in_one_loop(self, line: int, other: int) -> bool:
        return any(_has(loop, line, other) for loop in self._loops)

    @cached_property
    def _loops(self) -> list[ast.AST]:
        return [node for node in self._nodes if isinstance(node, _LOOPS)]

    @cached_property
    def _calls(self) -> list[ast.Call]:
        return [node for node in _in_order(self.node) if isinstance(node, ast.Call)]

    def called(self, line: int) -> tuple[Target, ...]:
        if line not in self._called:
            self._enter(line)
            calls = [call for call in self._calls if _has(call, line, line)]
            exact = [call for call in calls if line in (call.lineno, call.func.end_lineno)]
            others = self._of_other_branch(line)
            called = (call for call in exact or calls if id(call) not in others)
            targets = [target for call in called for target in self._targets(call)]
            loops = [loop for loop in self._loops if _has(loop, line, line)]
            if any(self._may_skip(loop, line) for loop in loops):
                targets = [target._replace(may_skip=True) for target in targets]
            elsewhere = {path for loop in loops for path in self._in_other_branch(loop, line)}
            for at, target in enumerate(targets):  # how often an inner loop or a branch runs is not known
                if len(loops) > 1 or target.path in elsewhere:
                    targets[at] = target.without_index()
            self._called[line] = tuple(targets)
        return self._called[line]

    def _of_other_branch(self, line: int) -> set[int]:
        """The ids of the calls behind the `else` of an expression that calls the same before its `if`."""
        ids: set[int] = set()
        for node in (node for node in self._nodes if isinstance(node, ast.IfExp) and _has(node, line, line)):
            before, behind = (
                [(call, self._paths(call)) for call in ast.walk(branch) if isinstance(call, ast.Call)]
                for branch in (node.body, node.orelse)
            )
            same = {ast.dump(call.func) for call, _ in before}
            called = {path for _, paths in before for path in paths}  # also by a function that takes it
            ids |= {
                id(call)
                for call, paths in behind
                if ast.dump(call.func) in same or (paths and paths <= called)
            }
        return ids

    def _paths(self, call: ast.Call) -> set[str]:
        return {target.path for target in self._targets(call)}

    @staticmethod
    def _may_skip(loop: ast.AST, line: int) -> bool:
        """Whether a condition in a loop, which may change from round to round, decides if a line runs."""
        for node in (node for node in ast.walk(loop) if isinstance(node, ast.If)):
            if _has(node, line, line) and (not node.orelse or _changes(node.test, loop)):
                return True
            if line > (node.end_lineno or line) and any(isinstance(n, ast.Continue) for n in ast.walk(node)):
                return True
        return False

    def _in_other_branch(self, loop: ast.AST, line: int) -> Iterator[str | None]:
        """Yield the paths that a loop calls in those rounds in which a condition excludes a line."""
        for node in ast.walk(loop):
            if isinstance(node, ast.If) and _has(node, line, line) and _changes(node.test, loop):
                is_body = any(_has(statement, line, line) for statement in node.body)
                for statement in node.orelse if is_body else node.body:
                    yield from (self._path(c.func) for c in ast.walk(statement) if isinstance(c, ast.Call))

    def most_calls(self, line: int) -> int | None:
        targets = self.called(line)
        if not targets or any(_has(loop, line, line) for loop in self._loops):
            return None
        others = (call.func for call in self._calls if _has(call, line, line) and not self._path(call.func))
        return None if any(isinstance(function, ast.Name) for function in others) else len(targets)

    def weights(self, line: int) -> tuple[Target, ...]:
        self._enter(line)
        wholes = (node for node in self._nodes if isinstance(node, _EXPRESSIONS) and _has(node, line, line))
        used = [sorted(set(self._weights(whole))) for whole in wholes]
        paths = max(used, key=len, default=[])
        return tuple(self._target(path, False) for path in paths)

    def _weights(self, whole: ast.AST) -> Iterator[str]:
        """Yield the paths of modules below `self` of which an expression names the weight or bias."""
        attributes = [node for node in ast.walk(whole) if isinstance(node, ast.Attribute)]
        asked = {id(node.value) for node in attributes if node.attr in _NO_VALUES}
        for node in attributes:
            if node.attr in _WEIGHTS and id(node) not in asked and (path := self._path(node.value)):
                yield path

    @cached_property
    def class_uses_weights(self) -> bool:
        methods = [node for node in (self.owner.body if self.owner else ()) if isinstance(node, Function)]
        running = (method for method in methods if not method.name.startswith(("__init__", "_init", "reset")))
        return any(any(self._weights(method)) for method in running)

    def has_call(self, line: int) -> bool:
        return any(_has(call, line, line) for call in self._calls)

    def makes(self, line: int) -> bool:
        functions = [call.func for call in self._calls if _has(call, line, line)]
        is_local = any(
            isinstance(f, ast.Name) and f.id in self._bound and not self._is_made(f) for f in functions
        )
        return not is_local and any(map(self._is_made, functions))

    def receiver(self, line: int, method: str) -> str:
        self._enter(line)
        functions = (call.func for call in self._calls if _has(call, line, line))
        methods = (f for f in functions if isinstance(f, ast.Attribute) and f.attr == method)
        paths = {self._path(function.value) for function in methods}
        return NOT_KNOWN if len(paths) > 1 else paths.pop() or "" if paths else ""

    def _is_made(self, function: ast.expr) -> bool:
        match function:
            case ast.Name(id=name):
                value = self._assigned.get(name)
                is_global = name not in self._bound and not name[:1].isupper() and not hasattr(builtins, name)
                return is_global or (value is not None and _name_of_class(value)[:1].isupper())
            case ast.Call(func=made_by):
                return _name(made_by)[:1].isupper()
            case ast.Subscript(value=ast.Name(id=name)):
                return name not in self._bound
        return False

    @cached_property
    def _assigned(self) -> dict[str, ast.expr]:
        assignments = (node for node in self._nodes if isinstance(node, ast.Assign))
        return {n.targets[0].id: n.value for n in assignments if isinstance(n.targets[0], ast.Name)}

    @cached_property
    def _bound(self) -> set[str]:
        """The names that the function itself binds."""
        names = {n.id for n in self._nodes if isinstance(n, ast.Name) and _is_stored(n)}
        return names | {node.arg for node in self._nodes if isinstance(node, ast.arg)}

    def _targets(self, call: ast.Call) -> Iterator[Target]:
        path = self._path(call.func)
        if path:
            if path.split(".")[0] not in self._methods and path.rpartition(".")[2] not in _SAME_MODULES:
                is_forward = isinstance(call.func, ast.Attribute) and call.func.attr == "forward"
                yield self._target(path, is_forward)
        elif path is None:
            for argument in call.args:
                path = self._path(argument)
                if path and self._may_be_module(path):
                    yield self._target(path, False)

    def _target(self, path: str, is_forward: bool) -> Target:
        first = path.split(".")[0]
        position = list(self._values).index(first) + 1 if first in self._values else 0
        elements = self._elements(path)
        of_list = self._elements(path[:-2]) if path.endswith(f".{LOOP}") else None
        return Target(path, _class_in(self._value(path)), is_forward, position, False, elements, of_list)

    def _may_be_module(self, path: str) -> bool:
        """Whether an argument of another function is a module: its class makes it or a list with it."""
        first, *indices = path.split(".")
        if any(not re.fullmatch(r"-?\d+|[*~?]", index) for index in indices):
            return False
        value = self._values.get(first)
        return first not in self._methods and (value is None or bool(_classes(value)))

    @cached_property
    def _values(self) -> dict[str, ast.expr]:
        return self.file.values_of(self.owner) if self.owner else {}

    @cached_property
    def _methods(self) -> set[str]:
        nodes = self.owner.body if self.owner else []
        return {node.name for node in nodes if isinstance(node, Function)}

    def _elements(self, path: str) -> tuple[str, ...] | None:
        value = self._value(path)
        if isinstance(value, ast.BoolOp):  # `inner or nn.Sequential(...)`
            value = value.values[-1]
        if isinstance(value, ast.IfExp):
            value = value.body
        if _name_of_class(value) in self._returned:
            value = self._returned[_name_of_class(value)]  # `self._make_layer(...)`
        if _name_of_class(value) not in _CONTAINERS:
            return ()
        each = self._values.get(f"{path}{_APPENDED}")
        return (f"*{_name_of_class(each)}",) if each else _elements_of(value)

    @cached_property
    def _returned(self) -> dict[str, ast.expr]:
        """What methods of the class return."""
        methods = [node for node in (self.owner.body if self.owner else ()) if isinstance(node, Function)]
        ends = ((method.name, method.body[-1]) for method in methods)
        return {name: end.value for name, end in ends if isinstance(end, ast.Return) and end.value}

    def _value(self, path: str) -> ast.expr | None:
        """Return the expression that makes a module below `self`; None if it is not known."""
        first, *parts = path.split(".")
        value = self._values.get(first)
        for part in parts:
            value = self._part(value, part, first)
            first = ""
        return value

    def _part(self, value: ast.expr | None, part: str, attribute: str) -> ast.expr | None:
        """Return the expression that makes a module of a list or dictionary, which an attribute may be."""
        match value:
            case ast.Call(args=[ast.Dict(keys=keys, values=values)]) if _name(value.func) == "ModuleDict":
                names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
                return values[names.index(part)] if part in names else _of_one_class(values)
            case ast.Call(args=[]):
                return self._values.get(f"{attribute}{_APPENDED}")
            case ast.Call(args=[ast.Starred(value=inner)] | [inner]):
                pass
            case ast.Call(args=elements):
                inner = ast.List(elements)
            case _:
                return None
        match inner:
            case ast.ListComp(elt=each) | ast.GeneratorExp(elt=each):
                return each
            case ast.List(elts=elements):
                return elements[int(part)] if _is_index(part, elements) else _of_one_class(elements)
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._values.get(f"{name}{_APPENDED}")
        return None

    def _enter(self, line: int) -> None:
        """Find the paths of the local names that stand for modules; `LOOP` alone for the index of a loop."""
        names: dict[str, str] = {}
        self._locals = names
        for loop in self._loops:
            if _has(loop, line, line):
                heads = getattr(loop, "generators", [loop])
                for head in heads if not isinstance(loop, ast.While) else ():
                    self._bind(names, head.target, head.iter, LOOP)
        for node in self._nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                    if path := self._path(value):
                        names.setdefault(name, path)
                case ast.Assign(targets=[ast.Tuple(elts=elements)], value=value):
                    if path := self._path(value):
                        for at, element in enumerate(elements):
                            if isinstance(element, ast.Starred):
                                break
                            if isinstance(element, ast.Name):
                                names.setdefault(element.id, f"{path}.{at}")

    def _bind(self, names: dict[str, str], target: ast.expr, values: ast.expr, index: str) -> None:
        name = _name(values.func) if isinstance(values, ast.Call) else ""
        inner = values.args if isinstance(values, ast.Call) else []
        if name == "reversed" and inner:
            self._bind(names, target, inner[0], BACKWARDS)
        elif name in ("list", "iter", "tuple") and inner:
            self._bind(names, target, inner[0], index)
        elif name == "range" and isinstance(target, ast.Name):
            names[target.id] = index
        elif isinstance(target, ast.Tuple) and name == "zip":
            for element, value in zip(target.elts, inner, strict=False):
                self._bind(names, element, value, index)
        elif isinstance(target, ast.Tuple) and name == "enumerate" and inner and len(target.elts) == 2:
            if isinstance(target.elts[0], ast.Name):
                names[target.elts[0].id] = index
            self._bind(names, target.elts[1], inner[0], index)
        elif isinstance(target, ast.Tuple) and name == "items" and len(target.elts) == 2:
            self._bind(names, target.elts[1], values, index)
        elif isinstance(target, ast.Tuple) and not name:  # lists in a list
            whole = ast.Name(_WHOLE)
            self._bind(names, whole, values, index)
            for at, element in enumerate(target.elts):
                if _WHOLE in names and isinstance(element, ast.Name):
                    names[element.id] = f"{names[_WHOLE]}.{at}"
        elif isinstance(target, ast.Name) and (path := self._path(values)):
            by_key = name in ("values", "items") or _name_of_class(self._values.get(path)) == "ModuleDict"
            if isinstance(values, ast.Subscript) and isinstance(values.slice, ast.Slice):
                of_list = path.removesuffix(f".{NOT_KNOWN}")
                by_key, path = by_key or of_list != path, of_list
            names[target.id] = f"{path}.{NOT_KNOWN if by_key else index}"

    def _path(self, node: ast.expr) -> str | None:
        """Return the path of a module below `self`, "" for `self`, None if an expression is none."""
        match node:
            case ast.Name(id="self"):
                return ""
            case ast.Name(id=name):
                path = self._locals.get(name)
                return None if path in (LOOP, BACKWARDS) else path
            case ast.Attribute(value=value, attr=attribute):
                path = self._path(value)
                if path is None or attribute in _SAME_MODULES[:2]:
                    return path
                return f"{path}.{attribute}" if path else attribute
            case ast.Subscript(value=value, slice=index):
                path = self._path(value)
                return None if path is None else f"{path}{self._index(index)}".lstrip(".")
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _SAME_MODULES:
                return self._path(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return next(
                    (path for constant, path in _METHODS.items() if self._is_method(name, constant)), None
                )
            case ast.Call(func=function, args=[first, *_]) if _name(function) == "partial":
                return self._path(first)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, name, *_]):
                path = self._path(value)
                constant = name.value if isinstance(name, ast.Constant) else None
                last = constant if isinstance(constant, str) else NOT_KNOWN
                return None if path is None else f"{path}.{last}".lstrip(".")
            case ast.IfExp(body=body):
                return self._path(body)
        return None

    def _is_method(self, name: str, constant: tuple[str, str]) -> bool:
        return name == constant[1] and self.file.name.replace("\\", "/").endswith(constant[0])

    def _index(self, index: ast.expr) -> str:
        match index:
            case ast.Slice(lower=None | ast.Constant(value=0), step=None):
                return ""
            case ast.Constant(value=int() | str() as value):
                return f".{value}"
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
                return f".-{value}"
            case ast.Name(id=name) if self._locals.get(name) in (LOOP, BACKWARDS):
                return f".{self._locals[name]}"
        return f".{NOT_KNOWN}"


def _elements_of(value: ast.AST | None) -> tuple[str, ...] | None:
    """Return the classes of what a `Sequential(...)` or `ModuleList(...)` has, as in `Target`."""
    if not isinstance(value, ast.Call) or _name(value.func) not in _CONTAINERS or not value.args:
        return None
    parts = value.args
    if _name(value.func) == "ModuleList":
        inner = parts[0]
        parts = inner.elts if isinstance(inner, ast.List | ast.Tuple) else [ast.Starred(inner)]
    elements = []
    for element in parts:
        match element:
            case ast.Call() | ast.IfExp(body=ast.Call()) if "OrderedDict" not in _classes(element):
                elements.append(_class_in(element))
            case ast.Starred(value=ast.ListComp(elt=each) | ast.GeneratorExp(elt=each)):
                elements.append(f"*{_name_of_class(each)}")
            case _:
                return () if isinstance(element, ast.Starred) or len(parts) > 1 else None
    return tuple(elements)


def _is_index(part: str, elements: Sequence[ast.expr]) -> bool:
    """Whether a part of a path is the index of a list's element, with none before it that stands for many."""
    if not part.isdecimal() or int(part) >= len(elements):
        return False
    return not any(isinstance(each, ast.Starred) for each in elements[: int(part) + 1])


def _of_one_class(values: Sequence[ast.expr]) -> ast.expr | None:
    """Return the first of some expressions if all make modules of one class."""
    return values[0] if len(set(map(_name_of_class, values))) == 1 else None


def _name(function: ast.expr) -> str:
    """Return the last part of a function's name."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _name_of_class(value: ast.expr | None) -> str:
    return _name(value.func) if isinstance(value, ast.Call) else ""


def _classes(value: ast.expr | None) -> set[str]:
    """Return the classes of which an expression makes one, whatever its conditions say."""
    if isinstance(value, ast.IfExp):
        return _classes(value.body) | _classes(value.orelse)
    name = _name_of_class(value)
    return {name} if name[:1].isupper() else set()


def _class_in(value: ast.expr | None) -> str:
    """Return the class of which an expression makes one, or none at all; "" if it is not known."""
    names = _classes(value)
    names = names - {"Identity"} or names
    return names.pop() if len(names) == 1 else ""


def _has(node: ast.AST, line: int, other: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return bool(first <= min(line, other) and max(line, other) <= last)


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _changes(test: ast.expr, loop: ast.AST) -> bool:
    """Whether a condition has names that a loop sets."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return any(
        isinstance(node, ast.Name) and _is_stored(node) and node.id in names for node in ast.walk(loop)
    )


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield an expression's or function's nodes, inner ones first: in order of evaluation."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node
