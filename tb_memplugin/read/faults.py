"""Count contradictions in a file: how many records have one, and how many bytes these are about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace import Note
from tb_memplugin.trace.tables import Bool, Int64


@dataclass(frozen=True, slots=True)
class Tally:
    """How many records have a contradiction, and their bytes."""

    count: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, rows: Bool, size: Int64) -> Tally:
        """Count the rows of a mask, and sum their sizes without sign."""
        return cls(int(np.count_nonzero(rows)), int(np.abs(size[rows]).sum(dtype=np.float64)))


Faults = dict[str, Tally]
"""What is wrong with the records, in words that follow their number, and the tally of these."""


def notes_on(faults: Mapping[str, Tally]) -> Iterator[Note]:
    """Yield a note on each contradiction that occurs."""
    for fault, tally in faults.items():
        if tally.count:
            yield Note(f"{tally.count:,} {fault} ({tally.bytes:,} bytes).", "contradiction", tally.bytes)
