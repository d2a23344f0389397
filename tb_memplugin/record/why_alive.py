"""Why blocks outlive a window: the chain of objects that holds each, searched from its tensor upwards.

The search is made once, at the end of a window, and only where much outlives it that no model or optimizer
holds. It asks the garbage collector what refers to what, keeps nothing, and runs no code of the program.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.record.alive_before import nodes_below, saved_by
from tb_memplugin.record.storages import memory_of
from tb_memplugin.record.storages_alive import node_of, other_threads_may_run, storages_behind, tensors_alive
from tb_memplugin.record.tensors_inside import held_by
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.torch_private.tensors import storage_address
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.labels import HELD_BY, HELD_BY_A_LOCAL, HOLDERS_SEARCHED, IN_CYCLE
from tb_memplugin.trace.tables import Int64, code_mask

LEAST_SHARE = 0.01
"""The share of the live bytes that must outlive the window without a name, for a search."""

SMALLEST_SHARE = 0.001
"""The share of the live bytes of the smallest block that is looked for."""

MOST_BLOCKS = 50
MOST_OBJECTS = 2_000
MOST_ITEMS = 1_000
LONGEST_NS = 1_000_000_000
"""What a search may take at most: blocks, objects upwards of them, items of one container, nanoseconds."""

_EXPLAINED = code_mask(
    (
        *(Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE),
        *(Category.WORKSPACE, Category.COMMUNICATION),
    )
)

Key = tuple[str, int]
"""(device, address)"""


def with_holders(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace in which blocks that outlive it have a label with what holds them.

    Blocks that have a label keep it. Nothing is searched while other threads may run: they could be building
    objects that must not be seen.
    """
    rows = _survivors(trace)
    if not len(rows):
        return _searched(trace)
    if other_threads_may_run():
        return trace
    blocks = trace.allocations
    names = [trace.devices[number].name for number in blocks.device[rows].tolist()]
    row_of = dict(zip(zip(names, blocks.address[rows].tolist(), strict=True), rows.tolist(), strict=True))
    with without_torch_functions(), collector_at_rest():
        chains, is_complete = _chains(row_of)
    labels = list(trace.labels)
    number = {label: row for row, label in enumerate(labels)}
    label = trace.events.label.copy()
    for row, chain in chains.items():
        if chain not in number:
            number[chain] = len(labels)
            labels.append(chain)
        label[blocks.born[row]] = number[chain]
    named = replace(trace, events=replace(trace.events, label=label), labels=tuple(labels))
    return _searched(named) if is_complete else named


def _searched(trace: MemoryTrace) -> MemoryTrace:
    return replace(trace, properties={**trace.properties, HOLDERS_SEARCHED: "yes"})


def _survivors(trace: MemoryTrace) -> Int64:
    """Return the blocks of the window that outlive it and that nothing explains, the largest first."""
    blocks = trace.allocations
    alive = blocks.freed >= len(trace.events)
    live = int(blocks.bytes[alive].sum())
    loose = alive & (blocks.born >= 0) & (blocks.label < 0) & ~_EXPLAINED[blocks.category]
    rows = np.flatnonzero(loose & (blocks.bytes >= max(SMALLEST_SHARE * live, 1)))
    if blocks.bytes[rows].sum() < LEAST_SHARE * live:
        return rows[:0]
    return rows[np.argsort(-blocks.bytes[rows], kind="stable")[:MOST_BLOCKS]]


def _chains(row_of: Mapping[Key, int]) -> tuple[dict[int, str], bool]:
    """Return what holds each block, by its tensor, or by the graph that has saved it.

    The second value is False where a limit ended the search.
    """
    search = Search()
    holds = _tensors_of(row_of, search)
    search.look_up()
    chains = {
        row: [chain + saved for identity, saved in held if (chain := search.chain(identity))]
        for row, held in holds.items()
    }
    labels = {row: min(texts, key=_is_local) for row, texts in chains.items() if texts}
    if search.is_complete:
        labels = dict.fromkeys(row_of.values() - holds.keys(), HELD_BY_A_LOCAL) | labels
    return labels, search.is_complete


def _tensors_of(row_of: Mapping[Key, int], search: Search) -> Mapping[int, list[tuple[int, str]]]:
    """Add the tensors of the blocks to a search. Return those of each block, and what node saved it.

    A function of its own, so that no variable refers to a tensor while referrers are searched.
    """
    holds: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    roots: list[torch.Tensor] = []
    for tensor in tensors_alive()[0]:
        for storage in storages_behind(tensor):
            row = row_of.get((memory_of(storage), storage_address(storage)))
            if row is not None:
                holds[row].append((search.add(tensor), ""))
        if node_of(tensor) is not None:
            roots.append(tensor)
    for tensor in roots:
        for row, node in _saved(tensor, row_of):
            holds[row].append((search.add(tensor), f" → {node}"))
    return holds


def _is_local(chain: str) -> bool:
    return chain.startswith(HELD_BY_A_LOCAL)


def _saved(root: torch.Tensor, row_of: Mapping[Key, int]) -> Iterable[tuple[int, str]]:
    """Yield the blocks that the graph of a tensor has saved, and the name of the node that did."""
    for node in nodes_below([node_of(root)]):
        leaf = getattr(node, "variable", None)
        for tensor in (leaf, *(getattr(saved, "data", None) for saved in saved_by(node))):
            if isinstance(tensor, torch.Tensor):
                for storage in storages_behind(tensor):
                    row = row_of.get((memory_of(storage), storage_address(storage)))
                    if row is not None:
                        yield row, node.name()


@dataclass(slots=True)
class Search:
    """Objects upwards of some: what refers to each, up to the variables of modules.

    `is_complete` is False where a limit ended the search.
    """

    is_complete: bool = True
    _objects: dict[int, Any] = field(default_factory=dict)
    _holders: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _roots: dict[int, str] = field(default_factory=dict)
    _outside: set[int] = field(default_factory=set)

    def add(self, thing: object) -> int:
        """Add an object to start from. Returns its identity."""
        self._objects[id(thing)] = thing
        return id(thing)

    def look_up(self) -> None:
        """Find all that refers to the objects, directly or not."""
        until = perf_counter_ns() + LONGEST_NS
        modules = reversed(list(sys.modules.items()))
        spaces = {id(vars(module)): name for name, module in modules if issubclass(type(module), ModuleType)}
        frontier = list(self._objects.values())
        while frontier and self.is_complete:
            below = set(map(id, frontier))
            asked = tuple(frontier)  # which Python 3.13 lists, too
            referrers = gc.get_referrers(*asked)
            own = {id(frontier), id(asked), id(referrers), id(self._objects)}
            asked = ()
            frontier.clear()
            for holder in referrers:
                if id(holder) in own or _is_our_frame(holder):
                    continue
                for referent in gc.get_referents(holder):
                    if id(referent) in below:
                        self._holders[id(referent)].append(id(holder))
                referent = None
                if id(holder) in self._objects:
                    continue
                self._objects[id(holder)] = holder
                if (name := _root_name(holder, spaces)) is not None:
                    self._roots[id(holder)] = name
                else:
                    frontier.append(holder)
            holder = None
            referrers.clear()
            self.is_complete = len(self._objects) < MOST_OBJECTS and perf_counter_ns() < until
        frontier.clear()
        self._find_outside()

    def _find_outside(self) -> None:
        """Find the objects with references that no known object has: of local variables, or of C++."""
        inside = Counter(
            id(referent)
            for identity, thing in self._objects.items()
            if identity not in self._roots
            for referent in gc.get_referents(thing)
        )
        ((_, ours),) = _references({0: object()})
        for identity, count in _references(self._objects):
            if identity not in self._roots and count - ours > inside[identity]:
                self._outside.add(identity)

    def chain(self, identity: int) -> str:
        """Return the label that says what holds an object; "" where the search did not come to an end."""
        path, visited, pending = {identity: 0}, [identity], [identity]
        while pending:
            below = pending.pop(0)
            if below in self._roots:
                return HELD_BY + self._named(below, path)
            for holder in self._holders[below]:
                if holder not in path:
                    path[holder] = below
                    visited.append(holder)
                    pending.append(holder)
        if not self.is_complete:
            return ""
        if any(above in self._outside for above in visited):
            return HELD_BY_A_LOCAL
        if len(visited) > 1 or identity in self._holders:
            return IN_CYCLE + " → ".join(_kind(self._objects[above]) for above in reversed(visited[:6]))
        return ""

    def _named(self, root: int, path: Mapping[int, int]) -> str:
        """Return the names on a path from a root down to an object: `train.losses[3]`."""
        text, above, is_namespace = self._roots[root], root, True
        while below := path[above]:
            part = _link(self._objects[above], self._objects[below], is_namespace)
            is_namespace = part is None and type(self._objects[below]) is dict
            text += "" if is_namespace else f" → {_kind(self._objects[below])}" if part is None else part
            above = below
        return text


def _references(objects: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Yield each key, and the number of references to its object, the table's and this loop's included."""
    for identity, thing in objects.items():
        yield identity, sys.getrefcount(thing)


def _is_our_frame(thing: object) -> bool:
    return type(thing) is FrameType and thing.f_code.co_filename == __file__


def _root_name(thing: Any, spaces: Mapping[int, str]) -> str | None:
    """Return the name of what holds without being held: a module's variables, a class, a running function."""
    if id(thing) in spaces:
        return spaces[id(thing)]
    if issubclass(type(thing), type):
        return str(type.__dict__["__qualname__"].__get__(thing))
    return f"{thing.f_code.co_name}()" if type(thing) is FrameType else None


def _link(holder: Any, target: Any, is_namespace: bool) -> str | None:
    """Return how an object holds another: `.name` or `[3]`; None where it has no name for it."""
    if type(holder) is FunctionType and type(target) is tuple:
        return ".__defaults__" if target is holder.__defaults__ else " → closure"
    if CellType in (type(holder), type(target)):
        return ""
    for key, inner, is_attribute in held_by(holder, MOST_ITEMS):
        if inner is target:
            if type(key) is str and (is_attribute or is_namespace):
                return f".{key}"
            return f"[{key!r}]" if type(key) in (str, int) else "[…]"
    return None


def _kind(thing: object) -> str:
    return str(type.__dict__["__qualname__"].__get__(type(thing)))
