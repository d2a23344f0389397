"""Fold repeated layers: find the modules that are the same in many layers, or in many experts of a layer.

`frontend/src/state/folding.ts` has the same rule for the page's tables, and
`tests/analysis/folded_layers.json` tests both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tb_memplugin.trace.tables import OUTSIDE

FEWEST = 2
"""Fewest layers that fold. Layers without submodules never do: net.0 and net.1 of a Sequential differ."""

_LONGEST_NUMBER = 9
_STAR = "\0"
"""Stands for a folded number when patterns are compared; no name contains it."""


@dataclass(frozen=True, slots=True)
class LayerPath:
    """A module's name in steps; a list and its number form one: ("layers.*", "mlp", "up") of layers.7.mlp.up.

    `layers`: the number of each step that ends in a folded number, None for the others: (7, None, None).
    """

    steps: tuple[str, ...]
    layers: tuple[int | None, ...]


def layer_paths(keys: Sequence[str]) -> list[LayerPath]:
    """Return the path of each module key. A key that starts with "outside:" is one step."""
    return [_path(segments, folded) for segments, folded in _folded_numbers(keys)]


def folds(keys: Sequence[str]) -> dict[str, str]:
    """Return the row of each module key in a table: the name that it shares with other layers, or the key.

    Keys that differ only in folded numbers share a row, whose name has a star where they differ.
    """
    split = _folded_numbers(keys)
    rows: dict[str, list[list[str]]] = defaultdict(list)
    patterns = [_starred(segments, folded) for segments, folded in split]
    for pattern, (segments, _) in zip(patterns, split, strict=True):
        rows[pattern].append(segments)
    names = {pattern: _row_name(alike) for pattern, alike in rows.items()}
    return {key: names[pattern] for key, pattern in zip(keys, patterns, strict=True)}


def _row_name(rows: Sequence[Sequence[str]]) -> str:
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*rows, strict=True))


def _folded_numbers(keys: Sequence[str]) -> list[tuple[list[str], list[int]]]:
    """Return the segments of each key, and the indices of the numbers in them that fold.

    The segments before a number name a list. It folds if it has at least `FEWEST` numbers, and one of them
    has submodules. Lists within folded layers count as one list, such as
    layers.0.experts and layers.1.experts. So the first number of every key is decided first, then the
    second, and so on.
    """
    split = [[key] if key.startswith(OUTSIDE) else key.split(".") for key in keys]
    numbers = [[at for at, segment in enumerate(segments) if _is_number(segment)] for segments in split]
    folded: list[list[int]] = [[] for _ in keys]
    for turn in range(max(map(len, numbers), default=0)):
        rows = [row for row, indices in enumerate(numbers) if len(indices) > turn]
        lists = {row: _starred(split[row][: numbers[row][turn]], folded[row]) for row in rows}
        folding = _alike((lists[row], split[row], numbers[row][turn]) for row in rows)
        for row in rows:
            if lists[row] in folding:
                folded[row].append(numbers[row][turn])
    return list(zip(split, folded, strict=True))


def _alike(lists: Iterable[tuple[str, list[str], int]]) -> set[str]:
    """Return the names of lists that fold, given (list, segments, index of the number) of each key."""
    layers: dict[str, set[int]] = defaultdict(set)
    deep: set[str] = set()
    for name, segments, at in lists:
        layers[name].add(int(segments[at]))
        if at + 1 < len(segments):
            deep.add(name)
    return {name for name in deep if len(layers[name]) >= FEWEST}


def _is_number(segment: str) -> bool:
    return segment.isascii() and segment.isdigit() and len(segment) <= _LONGEST_NUMBER


def _starred(segments: Sequence[str], folded: Sequence[int]) -> str:
    starred = list(segments)
    for at in folded:
        starred[at] = _STAR
    return ".".join(starred)


def _path(segments: Sequence[str], folded: Sequence[int]) -> LayerPath:
    """Return a path. Its first step includes everything before the first list: wrappers are no steps."""
    if not folded:
        return LayerPath(tuple(segments), (None,) * len(segments))
    first = folded[0]
    steps = [".".join((*segments[:first], "*"))]
    layers: list[int | None] = [int(segments[first])]
    for at in range(first + 1, len(segments)):
        if at not in folded:
            steps.append(segments[at])
            layers.append(None)
        elif at - 1 in folded:
            steps.append("*")
            layers.append(int(segments[at]))
        else:
            steps[-1], layers[-1] = f"{steps[-1]}.*", int(segments[at])
    return LayerPath(tuple(steps), tuple(layers))
