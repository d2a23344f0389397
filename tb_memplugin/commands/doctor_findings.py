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
    text: str
    fix: str = ""


def fine(text: str) -> Finding:
    """Return a finding that something is as it should be."""
    return Finding(Level.FINE, text)


def hint(text: str, fix: str) -> Finding:
    """Return a finding that is worth knowing but does not keep the tab from working."""
    return Finding(Level.HINT, text, fix)


def problem(text: str, fix: str) -> Finding:
    """Return a finding because of which the tab is missing, empty or incomplete."""
    return Finding(Level.PROBLEM, text, fix)
