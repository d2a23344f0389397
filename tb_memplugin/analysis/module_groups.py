"""Modules by the thousand as a dozen groups: repeated layers folded, cut where the tree is still readable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tb_memplugin.analysis.folded_layers import LayerPath, layer_paths
from tb_memplugin.trace.tables import Int64

OTHER_MODULES = "(other modules)"
MOST_GROUPS = 11
"""Groups that get a band of their own; the rest share one."""

COVERED = 0.9
"""A level of the tree is deep enough to show while its largest groups cover this share of the bytes."""

FEWEST_GROUPS = 4
"""Of fewer groups with bytes the largest is opened from the beginning."""

LARGEST_SHARE = 0.6
"""A group with something inside that holds more of the bytes than this is opened from the beginning."""

MOST_CHILDREN = 8
"""Into how many an opened group falls at most: ranges of layers where there are more."""


@dataclass(frozen=True, slots=True)
class ModuleGroups:
    """The group of each module key. `part`: int64, shape (keys,), indices into `keys`, largest group first.

    `modules`: how many modules each group holds. `opens`: whether it can be divided again.
    """

    part: Int64
    keys: tuple[str, ...]
    modules: tuple[int, ...]
    opens: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules that agree in their first `depth` steps. `split`: whether layers have been told apart."""

    depth: int
    rows: tuple[int, ...]
    split: bool = False


def module_groups(keys: Sequence[str], size: Int64, opened: Sequence[str] = ()) -> ModuleGroups:
    """Fold modules into the deepest level of their tree at which few groups cover most of the bytes.

    Args:
        keys: the modules' names; what starts with "outside:" stays as it is.
        size: bytes of each, int64, at the moment that decides which groups are worth showing.
        opened: keys of groups to divide again, one after the other: by what is inside them, then by layers.
    """
    paths = layer_paths(keys)
    groups = _deepest(paths, size)
    shown: list[_Group] = []
    for key in opened:
        found = next((group for group in groups if _name(group, paths) == key), None)
        if found is None or not _opens(found, paths):
            continue
        inner = _inner(found, paths, size)
        at = groups.index(found)
        groups[at : at + 1] = inner
        shown = ([group for group in shown if group is not found] + inner[:MOST_GROUPS])[-MOST_GROUPS:]
    return _numbered(groups, shown, paths, size)


def _deepest(paths: Sequence[LayerPath], size: Int64) -> list[_Group]:
    every = _Group(0, tuple(range(len(paths))))
    deepest = max((len(path.steps) for path in paths), default=1)
    for depth in range(deepest, 0, -1):
        groups = _by_steps(every, depth, paths)
        total = sorted((_bytes(group, size) for group in groups), reverse=True)
        if depth == 1 or sum(total[:MOST_GROUPS]) >= COVERED * sum(total):
            return _not_too_few(sorted(groups, key=lambda group: -_bytes(group, size)), paths, size)
    return []


def _not_too_few(groups: list[_Group], paths: Sequence[LayerPath], size: Int64) -> list[_Group]:
    """One band says nothing: where few groups hold bytes, or one nearly all, the largest is opened."""
    alive = [_bytes(group, size) for group in groups if _bytes(group, size) > 0]
    total = sum(alive)
    few = 0 < len(alive) < FEWEST_GROUPS and _opens(groups[0], paths)
    most = total > 0 and alive[0] > LARGEST_SHARE * total and _is_deep(groups[0], paths)
    if few or most:
        return [*_inner(groups[0], paths, size), *groups[1:]]
    return groups


def _by_steps(group: _Group, depth: int, paths: Sequence[LayerPath]) -> list[_Group]:
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in group.rows:
        found[paths[row].steps[:depth]].append(row)
    return [replace(group, depth=depth, rows=tuple(rows)) for rows in found.values()]


def _inner(group: _Group, paths: Sequence[LayerPath], size: Int64) -> list[_Group]:
    """What an opened group falls into: the modules inside it, else its layers, many of them in ranges."""
    if _is_deep(group, paths):
        parts = _by_steps(group, group.depth + 1, paths)
        return sorted(parts, key=lambda part: -_bytes(part, size))
    layers = _layers(group, paths)
    count = min(len(layers), MOST_CHILDREN)
    edges = [len(layers) * at // count for at in range(count + 1)]
    ranges = [set(layers[first:last]) for first, last in pairwise(edges)]
    return [
        _Group(group.depth, tuple(row for row in group.rows if paths[row].layer in wanted), split=True)
        for wanted in ranges
    ]


def _layers(group: _Group, paths: Sequence[LayerPath]) -> list[int]:
    return sorted({layer for row in group.rows if (layer := paths[row].layer) is not None})


def _opens(group: _Group, paths: Sequence[LayerPath]) -> bool:
    return _is_deep(group, paths) or len(_layers(group, paths)) > 1


def _is_deep(group: _Group, paths: Sequence[LayerPath]) -> bool:
    """Whether there is something inside what the group is named by."""
    return any(len(paths[row].steps) > group.depth for row in group.rows)


def _name(group: _Group, paths: Sequence[LayerPath]) -> str:
    """`layers.*.mlp`; of some layers `layers.0-49.mlp`, of one `layers.7.mlp`."""
    name = ".".join(paths[group.rows[0]].steps[: group.depth])
    layers = _layers(group, paths)
    if not layers or (len(layers) > 1 and not group.split):
        return name
    number = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
    head, _, tail = name.partition("*")
    return f"{head}{number}{tail}"


def _bytes(group: _Group, size: Int64) -> int:
    return int(size[list(group.rows)].sum())


def _numbered(
    groups: Sequence[_Group], opened: Sequence[_Group], paths: Sequence[LayerPath], size: Int64
) -> ModuleGroups:
    """The opened ones and the largest in the order they stand; all others share the last number."""
    room = max(0, MOST_GROUPS - len(opened))
    asked = {id(group) for group in opened}
    rest = [group for group in groups if id(group) not in asked and _bytes(group, size) > 0]
    by_size = sorted(rest, key=lambda group: -_bytes(group, size))
    largest = {id(group) for group in by_size[:room]}
    shown = [group for group in groups if id(group) in asked or id(group) in largest]
    part = np.full(len(paths), len(shown), np.int64)
    for number, group in enumerate(shown):
        part[list(group.rows)] = number
    others = int((part == len(shown)).sum())
    return ModuleGroups(
        part,
        (*(_name(group, paths) for group in shown), OTHER_MODULES),
        (*(len(group.rows) for group in shown), others),
        (*(_opens(group, paths) for group in shown), False),
    )
