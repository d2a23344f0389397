"""`divisions`: the divisions that are useful for a window's allocations."""

from __future__ import annotations

from typing import TypedDict

from tb_memplugin.analysis.divisions import By, informative
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session


class DivisionsAnswer(TypedDict):
    """By what it is worth dividing the memory of a window."""

    divisions: list[By]
    """In the order in which to offer them. Only `category` without the side file."""


def answer(session: Session, request: Request) -> DivisionsAnswer:
    """Answer from the side file; without it, the division of the coarse curve."""
    try:
        opened = session.opened(session.chosen(request))
    except UnreadableFileError:
        return {"divisions": ["category"]}
    trace, device = opened.trace, opened.device
    divisions = RESULTS.of_window(trace, ("divisions", device), lambda: informative(trace, device))
    return {"divisions": list(divisions)}
