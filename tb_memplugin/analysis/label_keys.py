"""The division by a key of the labels that users wrote as JSON: `label:role`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.labels import fields_of
from tb_memplugin.trace.tables import Int64

WITHOUT = "(none)"
"""Key of allocations whose label does not have the key, or that have no label."""


@dataclass(frozen=True, slots=True)
class LabelKey:
    """A key of labels that are JSON objects. Its values are the parts."""

    name: str

    def rows(self, trace: MemoryTrace) -> tuple[Int64, tuple[str, ...]]:
        """Return the part of each of the trace's labels, and last of "no label": int64; and the parts.

        Raises:
            MemPluginError: no label has the key.
        """
        fields = [fields_of(label) for label in trace.labels]
        parts = {WITHOUT: 0}
        for values in fields:
            if self.name in values:
                parts.setdefault(values[self.name], len(parts))
        if len(parts) == 1:
            raise MemPluginError(
                f"No label has the key {self.name[:80]!r}.", where="label:KEY", fix=_choices(fields)
            )
        rows = [parts[values.get(self.name, WITHOUT)] for values in fields]
        return np.array([*rows, 0], np.int64), tuple(parts)


def _choices(fields: Sequence[dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for values in fields for name in values))
    return f"Choose one of: {', '.join(names[:20])}." if names else "Its labels are not JSON objects."
