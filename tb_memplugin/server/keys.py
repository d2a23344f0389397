"""The keys by which blocks are colored: the division of some allocations, with the smallest parts as one."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.curves import OTHERS
from tb_memplugin.analysis.divisions import By, Divided, codes
from tb_memplugin.analysis.module_groups import ModuleGroups
from tb_memplugin.analysis.sums import sums
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.session import Opened
from tb_memplugin.server.shapes import LabeledPart
from tb_memplugin.trace.tables import Int64, Rows


def keys_of(
    opened: Opened, rows: Rows, by: By, division: Divided, most: int
) -> tuple[Int64, list[LabeledPart]]:
    """Return the key of each allocation, and the keys.

    Categories and groups come in stacking order, other keys by size.

    Args:
        opened: the window.
        rows: the allocations, rows of `trace.allocations`.
        by: the name of the division.
        division: what it stands for: `by` itself, or groups of modules.
        most: how many keys there are at most, besides one for all others. Each category and each group has
            its own, because it has the same color in every view.
    """
    part, names = codes(opened.trace, division, rows)
    total = sums(part, opened.trace.allocations.bytes[rows], len(names))
    count = np.bincount(part, minlength=len(names))
    used = np.arange(len(names)) if isinstance(division, ModuleGroups) else np.flatnonzero(count)
    shown = used
    if not isinstance(division, ModuleGroups) and by != "category":
        used = used[np.argsort(-total[used], kind="stable")]
        shown = used[:most]
    key_of = np.full(len(names), len(shown), np.int64)
    key_of[shown] = np.arange(len(shown))
    labels = labels_of([names[row] for row in shown.tolist()], by)
    keys: list[LabeledPart] = [
        {"key": names[row], "label": label, "bytes": int(total[row]), "count": int(count[row])}
        for row, label in zip(shown.tolist(), labels, strict=True)
    ]
    rest = used[len(shown) :]
    if len(rest):
        size, blocks = int(total[rest].sum()), int(count[rest].sum())
        keys.append({"key": OTHERS, "label": OTHERS, "bytes": size, "count": blocks})
    return key_of[part], keys
