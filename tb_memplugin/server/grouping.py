"""The division that a request asks for, its groups of folded modules, and the keys that color blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.comparison import folded_parts
from tb_memplugin.analysis.curves import OTHERS
from tb_memplugin.analysis.divisions import By, Divided, Part, codes
from tb_memplugin.analysis.module_groups import ModuleGroups, module_groups
from tb_memplugin.analysis.subcategories import subcategories
from tb_memplugin.analysis.sums import sums
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened
from tb_memplugin.server.shapes import LabeledPart
from tb_memplugin.trace.tables import Int64, Rows

MOST_OPENED = 20


class Group(TypedDict):
    """What a key of a curve of folded modules stands for."""

    modules: int
    """How many modules."""
    opens: bool
    """Whether it can be divided further."""


def divided(request: Request, opened: Opened, by: By) -> Divided:
    """Return the division `by`; for subcategories theirs, and module groups for `module` with `fold=1`.

    The groups named in `open`, one per line, are divided further. The groups are those of the device's peak
    in the window, so that they do not change when the user zooms.
    """
    if by == "subcategory":
        return RESULTS.of_window(opened.trace, (by,), lambda: subcategories(opened.trace))
    return _cached_groups(request, opened) if wants_groups(request, by) else by


def wants_groups(request: Request, by: str) -> bool:
    """Return whether a request asks for modules in groups."""
    return by == "module" and request.text("fold", "") == "1"


def folded(request: Request, opened: Opened, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return parts by module, of any recording, merged into this window's groups."""
    groups = _cached_groups(request, opened)
    modules = codes(opened.trace, "module", _NO_ROWS)[1]
    names = {key: groups.keys[row] for key, row in zip(modules, groups.part.tolist(), strict=True)}
    return folded_parts(parts, names, groups.keys)


_NO_ROWS = slice(0, 0)


def _cached_groups(request: Request, opened: Opened) -> ModuleGroups:
    names = tuple(request.text("open", "").split("\n")[:MOST_OPENED])
    return RESULTS.of_window(opened.trace, ("groups", opened.device, names), lambda: _groups(opened, names))


def _groups(opened: Opened, names: tuple[str, ...]) -> ModuleGroups:
    trace, device = opened.trace, opened.device
    rows = trace.allocations.alive_at(int(np.argmax(trace.live(device))) - 1, device)
    part, keys = codes(trace, "module", rows)
    return module_groups(keys, sums(part, trace.allocations.bytes[rows], len(keys)), names)


def groups_shape(by: ModuleGroups) -> list[Group]:
    """Return how many modules each key of a curve has, and whether it can be divided."""
    counts = zip(by.modules, by.opens, strict=True)
    return [{"modules": count, "opens": opens} for count, opens in counts]


def keys_of(
    opened: Opened, rows: Rows, size: Int64, by: By, division: Divided, most: int
) -> tuple[Int64, list[LabeledPart]]:
    """Return the key of each allocation, and the keys.

    Categories and groups come in stacking order, other keys by size.

    Args:
        rows, size: the allocations, rows of `trace.allocations`, and their bytes.
        division: what it stands for: `by` itself, or groups of modules.
        most: how many keys there are at most, besides one for all others. Each category and each group has
            its own, because it has the same color in every view.
    """
    part, names = codes(opened.trace, division, rows)
    total = sums(part, size, len(names))
    count = np.bincount(part, minlength=len(names))
    used = np.arange(len(names)) if isinstance(division, ModuleGroups) else np.flatnonzero(count)
    shown = used
    if not isinstance(division, ModuleGroups) and by != "category":
        used = used[np.argsort(-total[used], kind="stable")]
        shown = used[:most]
    key_of = np.full(len(names), len(shown), np.int64)
    key_of[shown] = np.arange(len(shown))
    parts = [Part(names[row], int(total[row]), int(count[row])) for row in shown.tolist()]
    rest = used[len(shown) :]
    if len(rest):
        parts.append(Part(OTHERS, int(total[rest].sum()), int(count[rest].sum())))
    return key_of[part], labeled(parts, by)


def labeled(parts: Sequence[Part], by: By) -> list[LabeledPart]:
    """Return parts with what to show for them."""
    labels = labels_of([part.key for part in parts], by)
    return [
        {"key": part.key, "label": label, "bytes": part.bytes, "count": part.count}
        for part, label in zip(parts, labels, strict=True)
    ]
