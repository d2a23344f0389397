"""Tables that grow while a trace is built: names, owners of bytes, module calls and named phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tb_memplugin.trace import Annotations, Events, Module, Spans
from tb_memplugin.trace.tables import NO_OPERATOR, NOT_NAMED, OUTSIDE, Bool, Int32, Int64, UInt64

Mark = tuple[int, str, bool]
"""The start or end of a named phase: (epoch ns, name, whether it is the end)."""

Call = tuple[int, int, int, int]
"""A completed module call: (start, end, module's row, phase); times in epoch ns."""


class Names:
    """A table of distinct strings; `add` returns a string's row."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def add(self, name: str) -> int:
        """Return the row of a name, adding it if it is new."""
        return self._rows.setdefault(name, len(self._rows))

    def add_all(self, names: Iterable[str]) -> Int64:
        """Return the rows of names, adding new ones: int64, shape (names,)."""
        names = list(names)
        for name in dict.fromkeys(names):
            self.add(name)
        return np.fromiter(map(self._rows.__getitem__, names), np.int64, len(names))

    def as_tuple(self) -> tuple[str, ...]:
        """Return all names in row order."""
        return tuple(self._rows)


DEEPEST = 100
"""The largest depth of a module tree. A name with more dots is not split into enclosing modules."""

MOST_MODULES = 1 << 17
"""Once there are this many modules (real models have some thousands), further names are not split."""


class ModuleTree:
    """The modules that names such as `layers.0.mlp` imply, parents before children.

    Args:
        modules: with which it begins; without them it has the row `(not named)`.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self._modules = [*modules] or [Module(NOT_NAMED)]
        self._rows = {module.key: row for row, module in enumerate(self._modules) if module.key != NOT_NAMED}

    def add(self, fqn: str, class_name: str = "") -> int:
        """Return the row of a module, adding it and the modules that enclose it if they are new."""
        if fqn in self._rows:
            return self._rows[fqn]
        row = -1
        for key in _enclosing(fqn) if len(self._modules) < MOST_MODULES else (fqn,):
            if key not in self._rows:
                self._rows[key] = len(self._modules)
                self._modules.append(Module(key, row, class_name if key == fqn else ""))
            row = self._rows[key]
        return row

    def as_tuple(self) -> tuple[Module, ...]:
        """Return all modules in row order."""
        return tuple(self._modules)


def _enclosing(fqn: str) -> Iterator[str]:
    """Yield the keys from the root down to a module: `""`, `layers`, `layers.0`."""
    if fqn and fqn.count(".") < DEEPEST:
        yield ""
        yield from (fqn[:end] for end, letter in enumerate(fqn) if letter == ".")
    yield fqn


class Owners:
    """The owners of bytes: the modules of the models, followed by keys for bytes without a module."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = list(modules)
        self._extra: dict[str, int] = {}
        self._named = len(modules)

    @cached_property
    def not_named(self) -> int:
        """The row for bytes that were alive before the window and have no known owner."""
        return self._row(NOT_NAMED)

    def with_outside(self, module: Int64, operator: Int64, operators: Names) -> Int32:
        """Return the owners, with -1 (no module) replaced by the row of the key `outside:<operator>`."""
        owner = module.astype(np.int32)
        loose = np.flatnonzero(module < 0)
        names = operators.as_tuple()
        distinct, of_loose = np.unique(operator[loose], return_inverse=True)
        rows = [self._row(OUTSIDE + _short(names[name])) for name in distinct.tolist()]
        owner[loose] = np.array(rows, np.int32)[of_loose]
        return owner

    def is_module(self, rows: Int32) -> Bool:
        """Return a mask of the rows that are modules of the models."""
        return (rows >= 0) & (rows < self._named)

    def depth(self) -> Int64:
        """Return how many modules enclose each row: int64, shape (rows + 1,); the last entry is 0."""
        depth = np.zeros(len(self._modules) + 1, np.int64)
        for row, module in enumerate(self._modules):
            depth[row] = depth[module.parent] + 1 if module.parent >= 0 else 0
        return depth

    def calls(self, ended: Iterable[Call]) -> Spans:
        """Return module calls as spans, sorted by start."""
        start, end, row, phase = np.array(sorted(ended), np.int64).reshape(-1, 4).T
        depth = self.depth()[row]
        return Spans(start, end, row.astype(np.int32), depth.astype(np.int32), phase.astype(np.uint8))

    def as_tuple(self) -> tuple[Module, ...]:
        """Return all owners in row order."""
        return tuple(self._modules)

    def _row(self, key: str) -> int:
        if key not in self._extra:
            self._extra[key] = len(self._modules)
            self._modules.append(Module(key))
        return self._extra[key]


def _short(operator: str) -> str:
    return operator.removeprefix("aten::").removeprefix("torch::autograd::")


def operator_name(made_by: Any) -> str:
    """Return the name of an operator from a dispatch mode; a string is returned unchanged."""
    if isinstance(made_by, str):
        return made_by
    return str(getattr(getattr(made_by, "_schema", None), "name", NO_OPERATOR))


def named_phases(marks: Sequence[Mark], full: Events, names: Names, device: int = 0) -> Annotations:
    """Return named phases as annotations on a device (a row)."""
    time = np.array([mark[0] for mark in marks], np.int64)
    on_device = np.flatnonzero(full.device == device)
    last = np.searchsorted(full.time_ns[on_device], time, side="right") - 1
    return Annotations(
        time_ns=time,
        name=names.add_all([mark[1] for mark in marks]).astype(np.int32),
        ends=np.array([mark[2] for mark in marks], np.uint8),
        device=np.full(len(time), device, np.uint8),
        event=np.append(on_device, -1)[last],
    )


def addresses_by_size(group: Int64, signed: Int64) -> UInt64:
    """Return a made-up address for each alloc and free, so that a free ends the newest block of its size.

    It is not known which of several blocks of the same size a free ends, and no sum depends on it. At each
    address, allocs and frees alternate. A free that is the first row at its address ends a block that was
    alive before the first row; the number of such frees is the smallest possible.

    Args:
        group: the group of each row, at least 0, shape (n,). Blocks of different groups (devices,
            categories) are never matched.
        signed: bytes in time order, negative for frees; shape (n,).

    Returns:
        Addresses from 1, without gaps; shape (n,).
    """
    size = np.abs(signed)
    order = np.lexsort((size, group))  # stable: in time order within a group and size
    new = np.ones(len(order), bool)
    new[1:] = (group[order][1:] != group[order][:-1]) | (size[order][1:] != size[order][:-1])
    turn = np.where(signed[order] < 0, -1, 1)
    level = np.cumsum(turn)
    first = np.flatnonzero(new)
    before = np.concatenate(([0], level))[first]
    level -= np.repeat(before, np.diff(np.append(first, len(order))))
    # A block's depth is the number of live blocks after its alloc and before its free.
    depth = np.where(turn > 0, level, level + 1)
    kind = np.cumsum(new) - 1
    _, address = np.unique(np.stack((kind, depth)), axis=1, return_inverse=True)
    addresses = np.empty(len(order), np.uint64)
    addresses[order] = address.reshape(-1) + 1
    return addresses
