"""The findings of `tb-memplugin doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How serious a finding is."""

    FINE = "fine"
    HINT = "hint"
    """Worth knowing; the tab works nevertheless."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: the result, and what to do about it."""

    level: Level
    what: str
    fix: str = ""


def fine(what: str) -> Finding:
    """Return a finding that something is as it should be."""
    return Finding(Level.FINE, what)


def hint(what: str, fix: str) -> Finding:
    """Return a finding that is worth knowing but does not keep the tab from working."""
    return Finding(Level.HINT, what, fix)


def problem(what: str, fix: str) -> Finding:
    """Return a finding because of which the tab is missing, empty or incomplete."""
    return Finding(Level.PROBLEM, what, fix)
