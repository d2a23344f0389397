"""Find modules by the marks that tb_memplugin's recorder puts on allocations (`user_metadata`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tb_memplugin.trace import Module
from tb_memplugin.trace.tables import MODULE_MARK, NOT_NAMED, Int32

DEEPEST = 100
"""The largest depth of a module tree. A mark with more dots is not split into enclosing modules."""


MOST_MODULES = 1 << 17
"""Once there are this many modules (real models have some thousands), further marks are not split."""


def marked_modules(labels: Sequence[str]) -> tuple[tuple[Module, ...], Int32]:
    """Return the modules that labels name, and the module of each label.

    Returns:
        The table of modules: `(not named)` first, then every named module after the modules that enclose
        it. And the row in that table of each label, 0 if the label is not a mark; it has one entry more
        than there are labels: the last is 0, for the label row -1.
    """
    rows: dict[str, int] = {}
    modules = [Module(NOT_NAMED)]

    def row_of(fqn: str) -> int:
        row = -1
        for key in _enclosing(fqn) if len(modules) < MOST_MODULES else (fqn,):
            if key not in rows:
                rows[key] = len(modules)
                modules.append(Module(key, row))
            row = rows[key]
        return row

    of_label = np.zeros(len(labels) + 1, np.int32)
    for label, text in enumerate(labels):
        if text.startswith(MODULE_MARK):
            of_label[label] = row_of(text.removeprefix(MODULE_MARK))
    return tuple(modules), of_label


def _enclosing(fqn: str) -> Iterator[str]:
    """Yield the keys from the root down to a module: `""`, `layers`, `layers.0`."""
    if fqn and fqn.count(".") < DEEPEST:
        yield ""
        yield from (fqn[:end] for end, letter in enumerate(fqn) if letter == ".")
    yield fqn
