"""Modules by the marks that our recorder leaves on allocations (`user_metadata`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tb_memplugin.trace import Module
from tb_memplugin.trace.tables import MODULE_MARK, NOT_NAMED, Int32

DEEPEST = 100
"""Levels of a module tree. A mark with more dots is nobody's FQN; it is kept whole."""


MOST_MODULES = 1 << 17
"""From so many on, further marks are kept whole: real models have some thousands."""


def marked_modules(labels: Sequence[str]) -> tuple[tuple[Module, ...], Int32]:
    """The modules that labels name, and each label's module.

    Returns:
        The table of modules: `(not named)` first, then every named module behind the modules that
        enclose it; and a row of that table for each label, 0 where the label is no mark. One entry
        more than there are labels: the last is 0, for the label row -1.
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

    found = np.zeros(len(labels) + 1, np.int32)
    for label, text in enumerate(labels):
        if text.startswith(MODULE_MARK):
            found[label] = row_of(text.removeprefix(MODULE_MARK))
    return tuple(modules), found


def _enclosing(fqn: str) -> Iterator[str]:
    """The keys from the root down to a module: `""`, `layers`, `layers.0`."""
    if fqn and fqn.count(".") < DEEPEST:
        yield ""
        yield from (fqn[:place] for place, letter in enumerate(fqn) if letter == ".")
    yield fqn
