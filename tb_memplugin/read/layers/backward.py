"""Give what autograd's nodes allocate the modules whose forward made them, where C++ frames are recorded.

Autograd runs the nodes of a graph in reverse: the last operator first. So the operators of a forward, in
reverse, and the nodes of its backward have a long common subsequence, which matches them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from tb_memplugin.read.layers.calls import Call, same_requests
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8

_NODE = re.compile(r"::(\w+?)Backward\d*::apply|torch::autograd::(PyNode|AccumulateGrad)::apply")
_ENGINE = re.compile(r"torch::autograd::(python::Python)?Engine::")
_OPERATOR = re.compile(r"at::_ops::(\w+)::|VariableType::\(anonymous namespace\)::(\w+)\(")
_OVERLOAD = re.compile(
    r"(_(Tensor|Scalar|int|dim|dtype|out|self|default|values|IntList|layout|memory_format|other|Scalar_Tensor))+$"
)
_PYTHON_FUNCTION = re.compile(r"apply \S*torch/autograd/function\.py:")

CUSTOM, ACCUMULATE, CAST = "pynode", "accumulategrad", "tocopy"

_ALSO = {
    "unsafeview": ("clone",),
    "reshapealias": ("clone",),
    "nativelayernorm": ("layernorm",),
    "nllloss": ("nlllossforward",),
    "nllloss2d": ("nllloss2dforward",),
    "cudnnbatchnorm": ("batchnorm",),
    "nativebatchnorm": ("batchnorm",),
    "cudnnconvolution": ("convolution",),
    "index": ("indextensor",),
}
"""Operators that a node may be of, besides the one of its name."""


MANY = 1 << 30
MATMUL, RESHAPED, _PRODUCTS = "matmul", "unsafeview", {"mm", "bmm"}
COPIES = {"clone"}
_OF_GRADIENTS = {"sum", CAST}
"""What the engine does with the gradients that a node returned: their shape, their dtype."""

_ALWAYS = ("mm", "addmm", "bmm", "convolution", "nativelayernorm")
"""Operators that allocate whenever they run: a node that matches none is not where its operator was."""

_SURE = frozenset(_ALWAYS)

_NEVER_BETWEEN = (
    *_ALWAYS,
    "relu",
    "leakyrelu",
    "hardtanh",
    "silu",
    "elu",
    "mish",
    "hardswish",
    "hardsigmoid",
)
"""Also what a module of its own may have done in place, which allocates nothing in a forward."""

SUM, VIEW, _LINEAR = "add", "view", ("mm", "addmm")
_NOT_OF_NEXT = (VIEW, "mm")
"""A node and the next, which only a linear with a bias has both: one without reshapes by another node."""

_MOST = dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), 2)
"""How much a node of a kind allocates at most: the gradients of two matrices."""


_ONCE_EACH = ("convolution", "cudnnconvolution")
"""Nodes in which a stack allocates once: the gradients of input, weight and bias have code of their own."""

OF_NODE, OF_ENGINE, BETWEEN = 99, 95, 98
"""How sure an owner is, in percent: of a node that matches an operator, of what the engine does after it, and
of a node that matches none, between two of one module. Measured in docs/design/layers_from_stacks.md."""

Key = TypeVar("Key", str, frozenset[str])


class Meaning(NamedTuple):
    """What the C++ frames of a stack say.

    Attributes:
        node: the kind of the autograd node that ran, "" for none.
        is_backward: whether autograd's engine ran.
        operators: the operators that ran, outer and inner ones.
    """

    node: str
    is_backward: bool
    operators: frozenset[str]


_NOTHING = Meaning("", is_backward=False, operators=frozenset())


class Request(NamedTuple):
    """An allocation or free: its index, its stack's row and meaning, its bytes, and the row of its call.

    The row is -1 for none.
    """

    at: int
    stack: int
    meaning: Meaning
    size: int
    call: int
    is_free: bool


def meaning_of(stack: Sequence[str]) -> Meaning:
    """Return what the C++ frames of a stack say.

    Args:
        stack: the texts of its frames, innermost first.
    """
    frames = [meaning for text in stack if (meaning := _meaning_of_frame(text)) is not _NOTHING]
    if not frames:
        return _NOTHING
    node = next((frame.node for frame in frames if frame.node), "")
    is_backward = any(frame.is_backward for frame in frames)
    operators = frozenset().union(*(frame.operators for frame in frames))
    if is_backward and not node and CUSTOM in operators and _runs_python(stack):
        node = CUSTOM  # its C++ frame has no name
    return Meaning(node, is_backward, operators)


def _runs_python(stack: Sequence[str]) -> bool:
    """Whether a stack has a Python frame inside autograd's innermost engine."""
    inner = next(text for text in stack if _ENGINE.match(text) or ".py:" in text)
    return not _ENGINE.match(inner)


@lru_cache(maxsize=1 << 16)
def _meaning_of_frame(text: str) -> Meaning:
    node, operators = "", frozenset[str]()
    if match := _NODE.search(text):
        node = _plain(match[1] or match[2])
    if match := _OPERATOR.search(text):
        operators = frozenset((_plain(match[1] or match[2]),))
    elif _PYTHON_FUNCTION.match(text):
        operators = frozenset((CUSTOM,))
    meaning = Meaning(node, bool(node) or bool(_ENGINE.match(text)), operators)
    return _NOTHING if meaning == _NOTHING else meaning


def _plain(name: str) -> str:
    return _OVERLOAD.sub("", name).lower().replace("_", "")


class Matched(NamedTuple):
    """Whose a backward's allocations are. All columns are as long as what is matched.

    Attributes:
        owner: int32, the row of the call whose forward made the node; -1 for none, or if that is not sure.
        evidence: uint8, `OF_NODE`, `OF_ENGINE` or `BETWEEN`; 0 without an owner.
        operator: int32, the row of the stack of the operator that the node reverses; -1 if not known.
    """

    owner: Int32
    evidence: UInt8
    operator: Int32

    @classmethod
    def nothing(cls, count: int) -> Matched:
        """Return what knows nothing of some allocations."""
        unknown = np.full(count, -1, np.int32)
        return cls(unknown, np.zeros(count, np.uint8), unknown.copy())


class Backward:
    """Finds the calls whose forward made the nodes that allocated.

    What comes again, as in the next step, is matched once.

    Args:
        containers: the rows of the calls that only call others, as a Sequential does.
    """

    def __init__(
        self, calls: Sequence[Call], meanings: Sequence[Meaning], containers: Container[int] = ()
    ) -> None:
        self._meanings, self._containers = meanings, containers
        self._parents = np.array([-1 if call.parent is None else call.parent.row for call in calls], np.int32)
        self._is_leaf = [not call.children for call in calls]
        self._outermost = np.maximum.accumulate(np.where(self._parents < 0, np.arange(len(calls)), 0))
        self._is_backward = np.array([*(meaning.is_backward for meaning in meanings), False])
        self._known: dict[bytes, tuple[int, Matched]] = {}

    def match(self, stack: Int32, size: Int64, owner: Int32, is_free: Bool) -> Matched:
        """Return whose the allocations of the backwards are.

        Args:
            stack, size, owner, is_free: shape (n,), of each allocation of one device, and of each free that
                autograd's engine made, in time order: the row of its stack, its bytes, the row of the call
                that it is in, -1 for none, and whether it is a free.
        """
        runs = self._is_backward[stack] & ~is_free
        before = np.maximum.accumulate(np.where(is_free, -1, np.arange(len(stack))))  # the last allocation
        in_backward = np.append(runs, False)[before]
        begins = ~is_free & ~runs & np.append(False, in_backward[:-1])
        kept = np.flatnonzero(~is_free | in_backward)
        bounds = np.flatnonzero(np.diff(np.cumsum(begins)[kept], prepend=-1, append=-1)).tolist()
        result = Matched.nothing(len(stack))
        for first, end in pairwise(bounds):
            rows = kept[first:end]
            if runs[rows[-1]] or is_free[rows[-1]]:
                matched = self._match_once(stack[rows], size[rows], owner[rows], is_free[rows])
                result.owner[rows], result.evidence[rows], result.operator[rows] = matched
        return result

    def _match_once(self, stack: Int32, size: Int64, owner: Int32, is_free: Bool) -> Matched:
        """Match the nodes of a backward with the forward before it."""
        in_call = owner[owner >= 0]
        first = int(self._outermost[in_call.min()]) if len(in_call) else 0
        parents = self._parents[first : int(in_call.max()) + 1] if len(in_call) else self._parents[:0]
        parts = (owner, parents)
        key = b"".join(np.where(rows >= 0, rows - first, -1).tobytes() for rows in parts)
        key += same_requests(stack, size, ~is_free)
        if key not in self._known:
            columns = (column.tolist() for column in (stack, size, owner, is_free))
            requests = [
                Request(at, row, self._meanings[row], each, call, free)
                for at, (row, each, call, free) in enumerate(zip(*columns, strict=True))
            ]
            self._known[key] = first, self._match(requests)
        before, matched = self._known[key]
        shifted = np.where(matched.owner >= 0, matched.owner + np.int32(first - before), -1)
        return matched._replace(owner=shifted)

    def _match(self, requests: Sequence[Request]) -> Matched:
        result = Matched.nothing(len(requests))
        forward = [request for request in requests if not (request.is_free or request.meaning.is_backward)]
        nodes = _runs([(r.meaning.node, r) for r in requests[len(forward) :]])
        kinds = {kind for kind, _ in nodes if kind}
        wanted = kinds | {name for kind in kinds for name in _ALSO.get(kind, ())}
        operators = _operators(forward, frozenset(wanted))
        possible = [frozenset((kind, *_ALSO.get(kind, ()))) for kind, _ in nodes]
        match = longest_common([names for names, _ in operators], possible)
        doubtful = _doubtful(operators, possible, match)
        rows = _with_neighbours(
            [kind for kind, _ in nodes], match, [len(of_names) for _, of_names in operators]
        )
        owners = [operators[row][1][0].call if row >= 0 else -1 for row in rows]
        following, next_kinds = _following(owners, rows, [kind for kind, _ in nodes])
        last = end = stack = -1
        for at, (kind, of_node) in enumerate(nodes):
            is_engine = kind in ("", ACCUMULATE)
            evidence, operator = OF_NODE, -1
            if rows[at] >= 0:
                last = owner = owners[at]
                operator = stack = operators[rows[at]][1][0].stack
            elif is_engine and not _is_of_another(of_node[0], requests[end + 1 : of_node[0].at]):
                owner, evidence, operator = last, OF_ENGINE, stack
                if kind == "" and SUM in of_node[0].meaning.operators and following[at] >= 0:
                    # what is around the call may begin with a view, whose node allocates nothing
                    around = self._around(last, following[at])
                    owner = last if around in (last, self._parents[last]) else -1
            else:  # sure only if it is in the call before or after it, which has the other in it
                around = self._around(last, following[at])
                is_sure = last == following[at]
                is_sure |= not is_engine and self._is_directly_in(around, last, following[at])
                if kind == VIEW and around == last != following[at]:
                    is_sure = next_kinds[at] in _LINEAR
                is_sure |= (kind, next_kinds[at]) == _NOT_OF_NEXT
                if kind != VIEW and not is_engine:  # the two modules end and begin with what was matched
                    is_sure |= self._are_leaves_of(around, last, following[at])
                is_sure &= kind not in _NEVER_BETWEEN and around not in self._containers
                owner, evidence = around if is_sure else -1, BETWEEN
            if at in doubtful:
                owner = operator = stack = last = -1
            allocated = [request.at for request in of_node]
            result.owner[allocated] = owner
            result.evidence[allocated] = evidence * (owner >= 0)
            result.operator[allocated] = operator
            end = of_node[-1].at
        return result

    def _is_directly_in(self, outer: int, *calls: int) -> bool:
        """Whether one of two calls is the other's parent: no third begins or ends between them."""
        return outer in calls and all(call == outer or self._parents[call] == outer for call in calls)

    def _are_leaves_of(self, outer: int, *calls: int) -> bool:
        """Whether calls are directly in a call, and have no calls in them."""
        return outer >= 0 and all(self._parents[call] == outer and self._is_leaf[call] for call in calls)

    def _around(self, first: int, second: int) -> int:
        """Return the innermost call that has both calls in it, or is one of them; -1 for none."""
        if min(first, second) < 0:
            return -1
        outer = set()
        while first >= 0:
            outer.add(first)
            first = int(self._parents[first])
        while second >= 0 and second not in outer:
            second = int(self._parents[second])
        return second


def _doubtful(
    operators: Sequence[tuple[frozenset[str], list[Request]]],
    possible: Sequence[frozenset[str]],
    match: dict[int, int],
) -> set[int]:
    """Return the nodes around those that may be of another call's operator, where a part has no backward.

    What always allocates is in a forward and its backward alike. Where it is not, as it does if a result is
    not used or a part runs without gradients, several matches are equally good. A call of which no node is
    sure may have no backward, either.
    """
    end = max(match.values(), default=-1) + 1  # what begins the forward may have no backward, or not yet
    owner = [of_names[0].call for _, of_names in operators[:end]]
    agreed = surely_common([names for names, _ in operators[:end]], possible, owner)
    with_backward = {owner[row] for row in agreed.values()}
    doubtful = {column for column, row in match.items() if owner[row] not in with_backward}
    rows = [row for row, (names, _) in enumerate(operators[:end]) if names & _SURE]
    if set(rows) <= set(match.values()):
        return doubtful
    columns = [column for column, names in enumerate(possible) if names & _SURE]
    calls = [owner[row] for row in rows]
    sure = surely_common(
        [operators[row][0] & _SURE for row in rows], [possible[column] & _SURE for column in columns], calls
    )
    bounds = [-1, *columns, len(possible)]
    for at, column in enumerate(columns):
        row = match.get(column, -1)
        if at not in sure or row < 0 or owner[row] != calls[sure[at]]:
            doubtful.update(range(bounds[at] + 1, bounds[at + 2]))
    return doubtful


def _is_of_another(request: Request, between: Sequence[Request]) -> bool:
    """Whether the engine allocates for a node that allocated nothing, not for the last that did.

    It gives the gradients of a node their shape and dtype before it frees what the node had saved.
    """
    return bool(request.meaning.operators & _OF_GRADIENTS) and any(each.is_free for each in between)


def _operators(
    forward: Sequence[Request], wanted: frozenset[str]
) -> list[tuple[frozenset[str], list[Request]]]:
    """Return the operators of a forward that nodes may be of, with their allocations, the last one first.

    `matmul` gives what `mm` and `bmm` make another shape, whose node runs before theirs.
    """
    whole: list[tuple[frozenset[str], list[Request]]] = []
    for names, of_names in _runs([(r.meaning.operators & wanted, r) for r in forward]):
        before, of_before = whole[-1] if whole else (names, of_names)
        shared = (names & before) - COPIES
        if names != before and shared and of_names[0].call == of_before[0].call:
            whole[-1] = shared, of_before + of_names  # an operator that copies its input first
        else:
            whole.append((names, of_names))
    result: list[tuple[frozenset[str], list[Request]]] = []
    for names, of_names in reversed(whole):
        if RESHAPED in wanted and MATMUL in of_names[0].meaning.operators and names & _PRODUCTS:
            result.append((frozenset((RESHAPED,)), of_names[:1]))
        if names:
            result.append((names, of_names))
    return result


def _with_neighbours(kinds: Sequence[str], match: dict[int, int], allocated: Sequence[int]) -> list[int]:
    """Return the operator's row of each node, -1 for none.

    Several operators of a call, one after another, are one row. So a node without one may have that of the
    node of its kind before or after it, as long as a row has no more nodes than allocations.
    """
    rows = [match.get(at, -1) for at in range(len(kinds))]
    used = Counter(match.values())
    for order in (range(len(kinds)), range(len(kinds) - 1, -1, -1)):
        nearest = -1
        for at in order:
            if rows[at] >= 0:
                nearest = at
            elif (
                nearest >= 0
                and kinds[at] == kinds[nearest]
                and used[rows[nearest]] < allocated[rows[nearest]]
            ):
                rows[at] = rows[nearest]
                used[rows[at]] += 1
    return rows


def _following(owners: list[int], rows: list[int], kinds: list[str]) -> tuple[list[int], list[str]]:
    """Return, for each node, the owner and the kind of the next matched node."""
    following: list[int] = []
    next_kinds: list[str] = []
    after, kind_after = -1, ""
    for owner, row, kind in zip(owners[::-1], rows[::-1], kinds[::-1], strict=True):
        following.append(after)
        next_kinds.append(kind_after)
        if row >= 0:
            after, kind_after = owner, kind
    return following[::-1], next_kinds[::-1]


def _runs(keyed: Sequence[tuple[Key, Request]]) -> list[tuple[Key, list[Request]]]:
    """Group allocations of one operator or node: they follow one another, and the first does not come again.

    After a node the engine frees what the node had saved.
    """
    runs: list[tuple[Key, list[Request]]] = []
    is_over = True
    for key, request in keyed:
        was_over, is_over = is_over, request.is_free
        if request.is_free:
            continue
        if not was_over and runs[-1][0] == key:
            first = runs[-1][1][0]
            again = request.stack == first.stack and (
                request.size == first.size or request.meaning.node in _ONCE_EACH
            )
            is_full = request.meaning.is_backward and len(runs[-1][1]) >= _MOST.get(
                request.meaning.node, MANY
            )
            if request.call == first.call and not again and not is_full:
                runs[-1][1].append(request)
                continue
        runs.append((key, [request]))
    return runs


Name = TypeVar("Name", bound=Hashable)


def surely_common(
    rows: Sequence[frozenset[Name]], columns: Sequence[frozenset[Name]], owner: Sequence[object]
) -> dict[int, int]:
    """Return the matches of longest common subsequences on which the first and the last of these agree.

    Several may be equally long. A match that only one of the two has is agreed on if the other has none of
    its row.

    Args:
        rows, columns: as in `longest_common`.
        owner: what the match with each row says of a column: different rows may say the same.
    """
    first = longest_common(rows, columns)
    end_row, end_column = len(rows) - 1, len(columns) - 1
    reverse = longest_common(rows[::-1], columns[::-1]).items()
    last = {end_column - column: end_row - row for column, row in reverse}
    times, both = Counter([*first.values(), *last.values()]), first.keys() & last.keys()
    return {
        column: row
        for column, row in {**last, **first}.items()
        if (owner[row] == owner[last[column]] if column in both else times[row] == 1)
    }


def longest_common(rows: Sequence[frozenset[Name]], columns: Sequence[frozenset[Name]]) -> dict[int, int]:
    """Return a longest common subsequence: for each matched column, its row. They match if they share a name.

    The bits of an integer stand for the columns (M. Crochemore and others, Information Processing Letters 80,
    2001): a bit is 0 where the longest common subsequence of the rows so far and the columns up to there is
    one longer than up to the column before.
    """
    of_name: dict[Name, int] = {}
    for column, names in enumerate(columns):
        for name in names:
            of_name[name] = of_name.get(name, 0) | 1 << column
    every = (1 << len(columns)) - 1
    bits, history = every, []
    for names in rows:
        fits = 0
        for name in names:
            fits |= of_name.get(name, 0)
        shared = bits & fits
        bits = ((bits + shared) | (bits - shared)) & every
        history.append(bits)
    match: dict[int, int] = {}
    row, column = len(rows), len(columns)
    while row and column:
        if history[row - 1] >> (column - 1) & 1:
            column -= 1
            continue
        row -= 1
        if not row or history[row - 1] >> (column - 1) & 1:
            column -= 1
            match[column] = row
    return match
