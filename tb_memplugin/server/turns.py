"""Turns: few requests compute at a time, the one that is due first goes first.

More of them at once would not be faster, because Python runs one thread at a time, but each needs memory.

A request is due when others have computed a multiple of what its route computes, and later the more its
client asks at once. So quick requests go before slow ones, clients with few before those with many, and none
waits for ever. The order is the same where other programs take most of the machine's time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import thread_time

MOST = max(2, min(4, os.cpu_count() or 1))
"""How many requests compute at the same time; one less of them are slow."""

SLOW_SECONDS = 0.1
"""From how many CPU seconds on a route is slow."""

PATIENCE, LONGEST_SECONDS = 200, 10.0
"""How many times what its route computes others compute before a request is due, and how many CPU seconds at
the most."""

LEAST_SECONDS = 0.001
"""What a request counts at least, so that requests that compute nothing do not pass others for ever."""

BEHIND_OWN_SECONDS = 0.05
"""How much later it is due for each request that its client waits for already."""

LOOK_SECONDS = 0.25
"""How often a request that waits looks whether its client is still there."""

_OF_LAST = 0.3
"""The weight of the last request in the mean of a route's CPU seconds."""


class ClientGoneError(Exception):
    """The client has closed its connection before its request had a turn."""


@dataclass(eq=False)
class _Ticket:
    client: str
    seconds: float
    """What its route computes."""
    due: float = 0.0
    """After how many seconds of all requests so far."""
    granted: threading.Event = field(default_factory=threading.Event)


_own = threading.local()
"""The turns and the ticket of the request that this thread handles."""


class Turns:
    """Grants turns to the requests that wait, in the order in which they are due."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: list[_Ticket] = []
        self._running: set[_Ticket] = set()
        self._seconds: dict[str, float] = {}
        self._computed = 0.0
        """CPU seconds of all requests so far."""

    @contextmanager
    def turn(self, client: str, route: str, is_gone: Callable[[], bool]) -> Iterator[None]:
        """Wait for a turn, and keep it until the end of the block.

        Args:
            client: who asks: those with many requests wait for those with few.
            route: what kind of request it is; its earlier requests say how long it computes.
            is_gone: whether nobody waits for the answer any more.

        Raises:
            ClientGoneError: `is_gone` before the turn came.
        """
        ticket = _Ticket(client, self._seconds.get(route, 0.0))
        with self._lock:
            own = sum(other.client == client for other in (*self._waiting, *self._running))
        patience = min(PATIENCE * ticket.seconds, LONGEST_SECONDS)
        ticket.due = self._computed + patience + BEHIND_OWN_SECONDS * own
        self.wait(ticket, is_gone)
        _own.turn, begin = (self, ticket), thread_time()
        try:
            yield
        finally:
            _own.turn, mean = None, self._seconds.get(route, 0.0)
            seconds = thread_time() - begin
            self._seconds[route] = mean + _OF_LAST * (seconds - mean)
            self.end(ticket, max(seconds, LEAST_SECONDS))

    def wait(self, ticket: _Ticket, is_gone: Callable[[], bool]) -> None:
        """Wait for a turn; raise ClientGoneError if the client goes before it comes."""
        with self._lock:
            self._waiting.append(ticket)
            self._grant()
        while not ticket.granted.wait(LOOK_SECONDS):
            if is_gone():
                break
        else:
            if not is_gone():
                return
        self.end(ticket)
        raise ClientGoneError

    def end(self, ticket: _Ticket, seconds: float = 0.0) -> None:
        """Give up a turn in which so many seconds were computed, or waiting for one."""
        with self._lock:
            self._computed += seconds
            self._running.discard(ticket)
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._grant()

    def _grant(self) -> None:
        while (ticket := self._next()) is not None:
            self._waiting.remove(ticket)
            self._running.add(ticket)
            ticket.granted.set()

    def _next(self) -> _Ticket | None:
        if len(self._running) >= self._most:
            return None
        slow_may_run = sum(map(_is_slow, self._running)) < self._most - 1
        allowed = (ticket for ticket in self._waiting if slow_may_run or not _is_slow(ticket))
        return min(allowed, key=lambda ticket: ticket.due, default=None)


def _is_slow(ticket: _Ticket) -> bool:
    return ticket.seconds > SLOW_SECONDS


@contextmanager
def without_turn() -> Iterator[None]:
    """Let others have this request's turn while it waits for something, if it has one."""
    turn = getattr(_own, "turn", None)
    if turn is None:
        yield
        return
    turns, ticket = turn
    turns.end(ticket)
    try:
        yield
    finally:
        ticket.granted.clear()
        turns.wait(ticket, lambda: False)


@contextmanager
def holding(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock; while it waits for the lock, this request has no turn."""
    if not lock.acquire(blocking=False):
        with without_turn():
            lock.acquire()
    try:
        yield
    finally:
        lock.release()
