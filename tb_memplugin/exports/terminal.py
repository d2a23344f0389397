"""Text that a terminal may have: names from models and files must not steer it."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    """What is not printable is written out, and what is longer than `most` characters is cut."""
    clean = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return clean if most is None or len(clean) <= most else f"{clean[: most - 1]}…"
