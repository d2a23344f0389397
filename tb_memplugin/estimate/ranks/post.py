"""Python objects that ranks send each other, where the ranks are estimated one after the other.

A rank that waits for an object of a rank that was not run yet is given up with `Waiting`, and run anew from
its beginning when the object is there: a program that sends the same thing each time cannot tell.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

Letter = tuple[int, int, int]
"""(sender, receiver, number): the how-manieth of the sender to the receiver, from 0 on."""


class Waiting(BaseException):
    """A rank cannot go on before it has a letter. No error: nobody else should catch it."""

    def __init__(self, letter: Letter) -> None:
        super().__init__(letter)
        self.letter = letter


class Post:
    """What was sent so far in a world."""

    def __init__(self) -> None:
        self._sent: dict[Letter, list[Any]] = {}
        self._rank = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def begin(self, rank: int) -> None:
        """A rank's program begins, or begins anew."""
        self._rank = rank
        self._counts.clear()

    def send(self, receiver: int, objects: list[Any]) -> None:
        """The running rank sends."""
        self._sent[self._next(self._rank, receiver)] = list(objects)

    def receive(self, sender: int) -> list[Any]:
        """The running rank receives.

        Raises:
            Waiting: the letter was not sent yet.
        """
        letter = self._next(sender, self._rank)
        if letter not in self._sent:
            raise Waiting(letter)
        return self._sent[letter]

    def has(self, letter: Letter) -> bool:
        """Whether a letter was sent."""
        return letter in self._sent

    def _next(self, sender: int, receiver: int) -> Letter:
        number = self._counts[sender, receiver]
        self._counts[sender, receiver] += 1
        return (sender, receiver, number)
