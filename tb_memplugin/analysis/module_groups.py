"""Group thousands of modules into about a dozen: layers are folded, and the tree is cut at one depth."""

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
"""How many groups are shown at most; all others share one key, `OTHER_MODULES`."""

COVERED = 0.9
"""A level of the tree can be shown if its `MOST_GROUPS` largest groups cover this share of the bytes."""

FEWEST_GROUPS = 4
"""If fewer groups hold bytes, the largest of them is opened from the start."""

LARGEST_SHARE = 0.6
"""A group with submodules that holds more than this share of the bytes is opened from the start."""

MOST_CHILDREN = 8
"""How many groups the layers of an opened group become at most; more layers are joined into ranges."""


@dataclass(frozen=True, slots=True)
class ModuleGroups:
    """The group of each module. `part`: int64, one index into `keys` (the groups' names) per module key.

    `modules`: how many modules each group has. `opens`: whether a group can be divided again. The last
    group is `OTHER_MODULES`.
    """

    part: Int64
    keys: tuple[str, ...]
    modules: tuple[int, ...]
    opens: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules that share the first `depth` steps of their path; `named_depth` of these name layers."""

    depth: int
    rows: tuple[int, ...]
    named_depth: int = 0


def module_groups(keys: Sequence[str], size: Int64, opened: Sequence[str] = ()) -> ModuleGroups:
    """Fold modules into the deepest level of their tree at which few groups cover most of the bytes.

    Args:
        keys: the modules' names; keys that start with "outside:" are not folded.
        size: bytes of each module, int64, at the moment that decides which groups are shown.
        opened: keys of groups to divide again, in this order: by their submodules, then by their layers.
    """
    paths = layer_paths(keys)
    groups = _deepest(paths, size)
    shown: list[_Group] = []
    for key in opened:
        opening = next((group for group in groups if _name(group, paths) == key), None)
        if opening is None or not _opens(opening, paths):
            continue
        inner = _inner(opening, paths, size)
        at = groups.index(opening)
        groups[at : at + 1] = inner
        shown = ([group for group in shown if group is not opening] + inner[:MOST_GROUPS])[-MOST_GROUPS:]
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
    """Open the largest group if few groups hold bytes, or if it holds most of them."""
    alive = [_bytes(group, size) for group in groups if _bytes(group, size) > 0]
    total = sum(alive)
    few = 0 < len(alive) < FEWEST_GROUPS and _opens(groups[0], paths)
    most = total > 0 and alive[0] > LARGEST_SHARE * total and _is_deep(groups[0], paths)
    if few or most:
        return [*_inner(groups[0], paths, size), *groups[1:]]
    return groups


def _by_steps(group: _Group, depth: int, paths: Sequence[LayerPath]) -> list[_Group]:
    rows_by_steps: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in group.rows:
        rows_by_steps[paths[row].steps[:depth]].append(row)
    return [replace(group, depth=depth, rows=tuple(rows)) for rows in rows_by_steps.values()]


def _inner(group: _Group, paths: Sequence[LayerPath], size: Int64) -> list[_Group]:
    """Divide an opened group by its submodules; if it has none, by its layers, joined into ranges if many."""
    if _is_deep(group, paths):
        parts = _by_steps(group, group.depth + 1, paths)
        return sorted(parts, key=lambda part: -_bytes(part, size))
    step = _varied(group, paths)[0]
    layers = _layers(group, paths, step)
    count = min(len(layers), MOST_CHILDREN)
    edges = [len(layers) * at // count for at in range(count + 1)]
    ranges = [set(layers[first:last]) for first, last in pairwise(edges)]
    return [
        _Group(group.depth, tuple(row for row in group.rows if paths[row].layers[step] in numbers), step + 1)
        for numbers in ranges
    ]


def _layers(group: _Group, paths: Sequence[LayerPath], step: int) -> list[int]:
    """Return the layer numbers that occur in one step of the path."""
    return sorted({layer for row in group.rows if (layer := paths[row].layers[step]) is not None})


def _opens(group: _Group, paths: Sequence[LayerPath]) -> bool:
    return _is_deep(group, paths) or bool(_varied(group, paths))


def _varied(group: _Group, paths: Sequence[LayerPath]) -> list[int]:
    """Return the steps of the path in which the group has several layers."""
    steps = paths[group.rows[0]].steps[: group.depth]
    return [at for at in range(len(steps)) if len(_layers(group, paths, at)) > 1]


def _is_deep(group: _Group, paths: Sequence[LayerPath]) -> bool:
    """Return whether the group contains submodules below its `depth`."""
    return any(len(paths[row].steps) > group.depth for row in group.rows)


def _name(group: _Group, paths: Sequence[LayerPath]) -> str:
    """Return a group's name: `layers.*.mlp`, `layers.0-49.mlp` of some layers, `layers.7.mlp` of one."""
    steps = paths[group.rows[0]].steps[: group.depth]
    return ".".join(_step_name(group, paths, at, step) for at, step in enumerate(steps))


def _step_name(group: _Group, paths: Sequence[LayerPath], at: int, step: str) -> str:
    layers = _layers(group, paths, at)
    if not layers or (len(layers) > 1 and at >= group.named_depth):
        return step
    number = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
    return step.removesuffix("*") + number


def _bytes(group: _Group, size: Int64) -> int:
    return int(size[list(group.rows)].sum())


def _numbered(
    groups: Sequence[_Group], opened: Sequence[_Group], paths: Sequence[LayerPath], size: Int64
) -> ModuleGroups:
    """Number the opened and the largest groups in their order; all others share the last number."""
    room = max(0, MOST_GROUPS - len(opened))
    always_shown = {id(group) for group in opened}
    rest = [group for group in groups if id(group) not in always_shown and _bytes(group, size) > 0]
    by_size = sorted(rest, key=lambda group: -_bytes(group, size))
    largest = {id(group) for group in by_size[:room]}
    shown = [group for group in groups if id(group) in always_shown or id(group) in largest]
    part = np.full(len(paths), len(shown), np.int64)
    for number, group in enumerate(shown):
        part[list(group.rows)] = number
    other_modules = int((part == len(shown)).sum())
    return ModuleGroups(
        part,
        (*(_name(group, paths) for group in shown), OTHER_MODULES),
        (*(len(group.rows) for group in shown), other_modules),
        (*(_opens(group, paths) for group in shown), False),
    )
