"""Find modules by the marks that tb_memplugin's recorder puts on allocations (`user_metadata`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_memplugin.read.tables import ModuleTree
from tb_memplugin.trace import Module
from tb_memplugin.trace.tables import MODULE_MARK, Int32


def marked_modules(labels: Sequence[str]) -> tuple[tuple[Module, ...], Int32]:
    """Return the modules that labels name, and the module of each label.

    Returns:
        The table of modules: `(not named)` first, then every named module after the modules that enclose
        it. And the row in that table of each label, 0 if the label is not a mark; it has one entry more
        than there are labels: the last is 0, for the label row -1.
    """
    tree = ModuleTree()
    of_label = np.zeros(len(labels) + 1, np.int32)
    for label, text in enumerate(labels):
        if text.startswith(MODULE_MARK):
            of_label[label] = tree.add(text.removeprefix(MODULE_MARK))
    return tree.as_tuple(), of_label
