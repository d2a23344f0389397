"""Give what autograd's nodes allocate the modules whose forward made them, where C++ frames are recorded.

Autograd runs the nodes of a graph in reverse: the last operator first. So the operators of a forward, in
reverse, and the nodes of its backward have a long common subsequence, which matches them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from tb_memplugin.read.layers.calls import Call
from tb_memplugin.read.layers.matching import longest_common

_NODE = re.compile(r"::(\w+?)Backward\d*::apply|torch::autograd::(PyNode|AccumulateGrad)::apply")
_ENGINE = re.compile(r"torch::autograd::(python::Python)?Engine::")
_OPERATOR = re.compile(r"at::_ops::(\w+)::|VariableType::\(anonymous namespace\)::(\w+)\(")
_OVERLOAD = re.compile(
    r"(_(Tensor|Scalar|int|dim|dtype|out|self|default|values|IntList|layout|memory_format|other|Scalar_Tensor))+$"
)
_PYTHON_FUNCTION = re.compile(r"apply \S*torch/autograd/function\.py:")

CUSTOM, ACCUMULATE = "pynode", "accumulategrad"

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
_MOST = dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), 2)
"""How much a node of a kind allocates at most: the gradients of two matrices."""


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


class Request(NamedTuple):
    """An allocation or free: its event, its stack's row and meaning, its bytes, and the call it was in."""

    event: int
    row: int
    meaning: Meaning
    size: int
    call: Call | None
    is_free: bool = False


def meaning_of(stack: Sequence[str]) -> Meaning:
    """Return what the C++ frames of a stack say.

    Args:
        stack: the texts of its frames, innermost first.
    """
    frames = [_meaning_of_frame(text) for text in stack]
    return Meaning(
        next((frame.node for frame in frames if frame.node), ""),
        any(frame.is_backward for frame in frames),
        frozenset().union(*(frame.operators for frame in frames)),
    )


@lru_cache(maxsize=1 << 16)
def _meaning_of_frame(text: str) -> Meaning:
    node, operators = "", frozenset[str]()
    if match := _NODE.search(text):
        node = _plain(match[1] or match[2])
    if match := _OPERATOR.search(text):
        operators = frozenset((_plain(match[1] or match[2]),))
    elif _PYTHON_FUNCTION.match(text):
        operators = frozenset((CUSTOM,))
    return Meaning(node, bool(node) or bool(_ENGINE.match(text)), operators)


def _plain(name: str) -> str:
    return _OVERLOAD.sub("", name).lower().replace("_", "")


class Matched(NamedTuple):
    """Whose a backward's allocations are, by event, and which of them the match of a node says directly."""

    owner: dict[int, Call]
    direct: set[int]


def match_backward(requests: Sequence[Request]) -> Matched:
    """Return the call whose forward made the node that allocated, for each allocation of a backward.

    Args:
        requests: the allocations of one device, and what was freed by autograd, in time order.
    """
    matched = Matched({}, set())
    forward: list[Request] = []
    backward: list[Request] = []
    for request in requests:
        if request.is_free:
            if backward:
                backward.append(request)
        elif request.meaning.is_backward:
            if request.call is None:  # else checkpointing runs a forward again
                backward.append(request)
        else:
            if backward:
                _match(forward, backward, matched)
                forward, backward = [], []
            forward.append(request)
    _match(forward, backward, matched)
    return matched


def _match(forward: list[Request], backward: list[Request], matched: Matched) -> None:
    nodes = _runs([(request.meaning.node, request) for request in backward])
    kinds = {kind for kind, _ in nodes if kind}
    wanted = kinds | {name for kind in kinds for name in _ALSO.get(kind, ())}
    operators = _runs([(request.meaning.operators & wanted, request) for request in forward])[::-1]
    operators = [(names, of_names) for names, of_names in operators if names]
    match = longest_common(
        [names for names, _ in operators], [frozenset((kind, *_ALSO.get(kind, ()))) for kind, _ in nodes]
    )
    rows = _with_neighbours([kind for kind, _ in nodes], match, [len(of_names) for _, of_names in operators])
    owners = [operators[row][1][0].call if row >= 0 else None for row in rows]
    following = _following(owners, rows)
    last: Call | None = None
    for at, (kind, of_node) in enumerate(nodes):
        if rows[at] >= 0:
            last = owner = owners[at]
        elif kind in ("", ACCUMULATE):  # what the engine adds up for the node before
            owner = last
        else:
            owner = _around(last, following[at])
        if owner is not None:
            matched.owner.update((request.event, owner) for request in of_node)
            if rows[at] >= 0:
                matched.direct.update(request.event for request in of_node)


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


def _following(owners: list[Call | None], rows: list[int]) -> list[Call | None]:
    """Return, for each node, the owner of the next matched node."""
    following: list[Call | None] = []
    after: Call | None = None
    for owner, row in zip(owners[::-1], rows[::-1], strict=True):
        following.append(after)
        if row >= 0:
            after = owner
    return following[::-1]


def _around(first: Call | None, second: Call | None) -> Call | None:
    """Return the innermost call that has both calls in it, or is one of them."""
    if first is None or second is None:
        return None
    outer = set()
    while first is not None:
        outer.add(first)
        first = first.parent
    while second is not None and second not in outer:
        second = second.parent
    return second


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
            again = (request.row, request.size) == (first.row, first.size)
            is_full = request.meaning.is_backward and len(runs[-1][1]) >= _MOST.get(
                request.meaning.node, MANY
            )
            if request.call is first.call and not again and not is_full:
                runs[-1][1].append(request)
                continue
        runs.append((key, [request]))
    return runs
