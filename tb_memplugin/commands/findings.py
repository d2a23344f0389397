"""What the doctor finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is."""

    FINE = "fine"
    HINT = "hint"
    """Worth knowing; the tab can show something all the same."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, and what to do about it."""

    level: Level
    what: str
    fix: str = ""


def fine(what: str) -> Finding:
    """It is as it should be."""
    return Finding(Level.FINE, what)


def hint(what: str, fix: str) -> Finding:
    """It could be better."""
    return Finding(Level.HINT, what, fix)


def problem(what: str, fix: str) -> Finding:
    """The tab is absent, empty or incomplete because of it."""
    return Finding(Level.PROBLEM, what, fix)
