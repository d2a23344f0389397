"""Answers: computed once for all clients who ask the same, and kept until their sources change."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tb_memplugin.server.cache import MIB, Cache
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.turns import Turns
from tb_memplugin.server.windows import Read, is_unchanged, noted_reads

MOST_BYTES = 16 * MIB
COMPRESSION = 1
"""The fastest level. TensorBoard's own, 3, takes longer than the network of one building saves."""

CHANGING = frozenset({"/runs", "/steps", "/step_figures", "/ranks", "/fleet", "/export_about"})
"""Routes whose answers are never kept: they say what is new, or write a file."""

Answer = Callable[[Session, Request], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer in gzip format, and what it was computed from."""

    body: bytes
    listing: int
    """The number of the listing. The listing itself may be large, and is not kept by what came from it."""
    reads: tuple[Read, ...]


class Answers:
    """Answers requests, and keeps the answers."""

    def __init__(self, session: Session, turns: Turns) -> None:
        self._session, self._turns = session, turns
        self._kept = Cache(MOST_BYTES)

    def body(
        self, route: str, answer: Answer, request: Request, client: str, is_gone: Callable[[], bool]
    ) -> bytes:
        """Return the JSON answer to a request, in gzip format.

        Args:
            route: the route's path.
            answer: computes the answer.
            request: its parameters.
            client: who asks.
            is_gone: whether the client has closed the connection.

        Raises:
            ClientGoneError: the client has gone before its request had a turn.
        """
        key = (route, request.experiment, *sorted(request.parameters.items()))
        before = self._kept.kept(key)
        if isinstance(before, _Kept):
            if self._is_current(before, request):
                return before.body
            self._kept.forget(key, before)

        def compute() -> _Kept:
            with self._turns.turn(client, route, is_gone):
                return self._computed(answer, request)

        result = self._kept.get(key, compute)
        if route in CHANGING:
            self._kept.forget(key, result)
        return result.body

    def _computed(self, answer: Answer, request: Request) -> _Kept:
        listing = self._session.catalog.listing(request.ctx, request.experiment)
        with noted_reads() as reads:
            shape = answer(self._session, request)
        text = json.dumps(shape, separators=(",", ":"))
        return _Kept(gzip.compress(text.encode(), COMPRESSION, mtime=0), listing.number, tuple(reads))

    def _is_current(self, kept: _Kept, request: Request) -> bool:
        listing = self._session.catalog.listing(request.ctx, request.experiment)
        return kept.listing == listing.number and all(map(is_unchanged, kept.reads))
