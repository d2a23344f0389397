"""Carry Python objects between ranks that are estimated one after the other.

A rank that receives an object before its sender has run is stopped with `Waiting`, and run again from the
start once the object was sent. This works for programs that send the same objects each time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

Letter = tuple[int, int, int]
"""(sender, receiver, number): the number counts the letters from this sender to this receiver, from 0."""


class Waiting(BaseException):
    """Raised where a rank needs a letter that was not sent yet.

    A BaseException, so that the program's `except Exception` does not catch it.
    """

    def __init__(self, letter: Letter) -> None:
        super().__init__(letter)
        self.letter = letter


class Post:
    """The objects that the ranks of a job have sent so far."""

    def __init__(self) -> None:
        self._sent: dict[Letter, list[Any]] = {}
        self._rank = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def begin(self, rank: int) -> None:
        """Begin the program of a rank, or begin it again."""
        self._rank = rank
        self._counts.clear()

    def send(self, receiver: int, objects: list[Any]) -> None:
        """Send objects from the running rank."""
        self._sent[self._next(self._rank, receiver)] = list(objects)

    def receive(self, sender: int) -> list[Any]:
        """Return the next objects that a sender sent to the running rank.

        Raises:
            Waiting: the letter was not sent yet.
        """
        letter = self._next(sender, self._rank)
        if letter not in self._sent:
            raise Waiting(letter)
        return self._sent[letter]

    def has(self, letter: Letter) -> bool:
        """Return whether a letter was sent."""
        return letter in self._sent

    def _next(self, sender: int, receiver: int) -> Letter:
        number = self._counts[sender, receiver]
        self._counts[sender, receiver] += 1
        return (sender, receiver, number)
