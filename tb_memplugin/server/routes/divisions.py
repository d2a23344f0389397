"""`divisions`: the divisions that are useful for a window's allocations."""

from __future__ import annotations

from tb_memplugin.analysis.divisions import informative
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file; without it, the division of the coarse curve."""
    try:
        opened = session.opened(session.chosen(request))
    except UnreadableFileError:
        return {"divisions": ("category",)}
    trace, device = opened.trace, opened.device
    return {"divisions": RESULTS.of_window(trace, ("divisions", device), lambda: informative(trace, device))}
