"""Notes: what in a recording is not exact, and by how much, as data and as text."""

from __future__ import annotations

from typing import Literal

Level = Literal["info", "warning"]

OTHER = "other"
"""The code of notes that have none: those of recordings of older versions."""
NO_TIMES = "no_times"
MODULES_INFERRED = "modules_inferred"
OUT_OF_MEMORY = "out_of_memory"
HISTORY_FULL = "history_full"
SUMMARY_SHORTENED = "summary_shortened"
STEPS_JOINED = "steps_joined"
STEP_NOT_ENDED = "step_not_ended"
"""Codes by which something is decided."""


MOST_BYTES = (1 << 63) - 1
"""What a file of ours can hold. Sizes in damaged files may sum to more."""


class Note(str):
    """A note. It is its own text, a sentence or two for people, so that it can be printed as it is.

    Attributes:
        code: what it is about, a word such as "no_times".
        level: "warning" if what is shown may mislead, else "info".
        bytes: the amount of memory that it speaks of, None if it speaks of none.
        device: the name of the device that it is about, "" if it is about no single one.
    """

    code: str
    level: Level
    bytes: int | None
    device: str

    def __new__(
        cls, text: str, code: str = OTHER, size: int | None = None, *, level: Level = "info", device: str = ""
    ) -> Note:
        """Take a text, and the data that it says in words; `size` is the amount in bytes."""
        note = super().__new__(cls, text)
        note.code, note.level, note.device = code, level, device
        note.bytes = None if size is None else min(size, MOST_BYTES)
        return note

    def of(self, device: str) -> Note:
        """Return the note with a device's name in front."""
        return Note(f"{device}: {self}", self.code, self.bytes, level=self.level, device=device)
