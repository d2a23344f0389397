"""Layers that repeat: which modules are one thing in many layers.

`frontend/src/state/folding.ts` keeps the same rule for the page's tables, and
`tests/analysis/folded_layers.json` holds the two together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tb_memplugin.trace.tables import OUTSIDE

FEWEST_DEEP, FEWEST_BARE = 2, 4
"""Fewest layers with something inside that fold, and fewest bare ones: net.0 and net.2 are often unlike."""

_LONGEST_NUMBER = 9


@dataclass(frozen=True, slots=True)
class LayerPath:
    """A module's name in steps, its layer's number starred: ("layers.*", "mlp", "up") and 7."""

    steps: tuple[str, ...]
    layer: int | None

    @property
    def folded(self) -> str:
        """The row that it shares with the same module of the other layers: `layers.*.mlp.up`."""
        return ".".join(self.steps)


def layer_paths(keys: Sequence[str]) -> list[LayerPath]:
    """The path of each module key. What starts with "outside:" is one step.

    A key's first number tells its layer, where the list that it stands in has `FEWEST_DEEP` layers or more
    (`FEWEST_BARE` where nothing is inside any of them).
    """
    split = [_split_at_number(key) for key in keys]
    layers: dict[str, set[int]] = defaultdict(set)
    deep: set[str] = set()
    for head, number, tail in split:
        if number is not None:
            layers[head].add(number)
            if tail:
                deep.add(head)
    alike = {
        head for head, found in layers.items() if len(found) >= (FEWEST_DEEP if head in deep else FEWEST_BARE)
    }
    return [
        LayerPath((f"{head}.*" if head else "*", *tail), number)
        if number is not None and head in alike
        else LayerPath((key,) if key.startswith(OUTSIDE) else tuple(key.split(".")), None)
        for key, (head, number, tail) in zip(keys, split, strict=True)
    ]


def folds(keys: Sequence[str]) -> dict[str, str]:
    """The row of each module key: what it shares with other layers, else the key itself.

    A list within layers folds by the same rule: `stages.*.*`, where tables have `stages.*.0`, `stages.*.1`.
    """
    before, rows = list(keys), shared_rows(keys)
    while rows != before:
        before, rows = rows, shared_rows(rows)
    return dict(zip(keys, rows, strict=True))


def shared_rows(keys: Sequence[str]) -> list[str]:
    """The row of each key in a table: its folded name where two keys or more share it, else the key."""
    rows = [path.folded for path in layer_paths(keys)]
    times = Counter(rows)
    return [row if times[row] > 1 else key for key, row in zip(keys, rows, strict=True)]


def _split_at_number(key: str) -> tuple[str, int | None, tuple[str, ...]]:
    """("model.layers", 7, ("mlp",)) of model.layers.7.mlp; no number where there is none."""
    segments = () if key.startswith(OUTSIDE) else tuple(key.split("."))
    for at, segment in enumerate(segments):
        if segment.isascii() and segment.isdigit() and len(segment) <= _LONGEST_NUMBER:
            return ".".join(segments[:at]), int(segment), segments[at + 1 :]
    return key, None, ()
