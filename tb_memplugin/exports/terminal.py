"""Text that is safe to print: names from models and files must not control the terminal."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    """Escape characters that are not printable, and cut text longer than `most` characters."""
    clean = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return clean if most is None or len(clean) <= most else f"{clean[: most - 1]}…"
