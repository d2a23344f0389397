"""Whole numbers that a program reads from tensors without values, and only adds up or prints.

`correct += (guess == labels).sum().item()` must not end an estimate, and no guess may decide anything. So
`item()` returns a number that calculates and prints, and that refuses, with the line that read it, where its
value would decide: in a comparison, as a size or an index. Of a mask it is then the maximum, all
elements, as where the mask selects; a condition is assumed so that the program goes on (checks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.estimate.answer.hints import (
    Question,
    UnansweredError,
    counted,
    unanswered,
    went_on,
)
from tb_memplugin.estimate.program.checks import going_on
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

ASSUMED = 1.0
"""What a quotient or a product with a float becomes, like a float that is read."""

PRINTED = "?"


class AssumedCounts(Correction):
    """Makes `Tensor.item()` of a whole number without a hint return an `AssumedCount`."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Give fake tensors an `item` of their own."""
        original: Any = torch.Tensor.item

        def item(tensor: torch.Tensor) -> Any:
            try:
                return original(tensor)
            except UnansweredError as error:
                if error.asked.kind != "count":
                    raise
                self.target.note(
                    f"The whole number that {error.asked.place} reads from a tensor is not known; what is "
                    "calculated from it is assumed to be 1.0. A hint can set it."
                )
                return AssumedCount(error.asked, error.most, self.target.note)

        patches.set(FakeTensor, "item", item)


class AssumedCount:
    """A whole number whose value is not known.

    Args:
        asked: the question that has no answer; it is raised where the value would decide. (The error itself
            would keep the tensors of its traceback alive.)
        most: the greatest value that it can have; None if that is not known.
        note: called with sentences for the reader of the estimate.
    """

    def __init__(self, asked: Question, most: int | None, note: Callable[[str], object]) -> None:
        self._asked, self._most, self._note = asked, most, note

    def _decides(self) -> int:
        if self._most is None:
            raise unanswered(self._asked)
        self._note(counted(self._asked, self._most))
        return self._most

    def _compared(self, _: Any = None) -> AssumedTruth:
        return AssumedTruth(self._asked, self._note)

    def _calculated(self, other: Any = 0) -> Any:
        """Return the result of a calculation: unknown, too, or a float where one is part of it."""
        if isinstance(other, float):
            return ASSUMED
        return self if isinstance(other, int | AssumedCount) else NotImplemented

    def _quotient(self, other: Any) -> Any:
        return ASSUMED if isinstance(other, int | float | AssumedCount) else NotImplemented

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _calculated
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _calculated
    __neg__ = __pos__ = __abs__ = _calculated
    __truediv__ = __rtruediv__ = _quotient
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared  # type: ignore[assignment]
    __index__ = __int__ = _decides

    def __hash__(self) -> NoReturn:
        raise unanswered(self._asked)

    def __bool__(self) -> bool:
        return bool(self._compared())

    def __round__(self, _digits: int | None = None) -> AssumedCount:
        return self

    def __float__(self) -> float:
        return ASSUMED

    def __repr__(self) -> str:
        return PRINTED

    def __format__(self, spec: str) -> str:
        return PRINTED


class AssumedTruth:
    """The result of a comparison with a whole number that is not known."""

    def __init__(self, asked: Question, note: Callable[[str], object]) -> None:
        self._asked, self._note = asked, note

    def __bool__(self) -> bool:
        truth = going_on(None)
        if truth is None:
            raise unanswered(self._asked)
        self._note(went_on(self._asked, truth))
        return truth
