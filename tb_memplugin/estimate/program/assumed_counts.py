"""Whole numbers that a program reads from tensors without values, and only counts, prints or puts in others.

`correct += (guess == labels).sum().item()` must not end an estimate, and no guess may decide anything. So
`item()` returns a number that calculates and prints, and that refuses, with the line that read it, where its
value would decide: in a comparison, as a size or an index. Of a mask it is then the maximum, all
elements, as where the mask selects; a condition is assumed so that the program goes on (checks.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tb_memplugin.estimate.answer.hints import Question, UnansweredError, counted, unanswered, went_on
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
                if error.is_index:
                    return ChosenIndex(error.asked)
                self.target.note(
                    f"The whole number that {error.asked.place} reads from a tensor is not known; what is "
                    "calculated from it is assumed to be 1.0. A hint can set it."
                )
                return AssumedCount(error.asked, error.most, self.target.note)

        patches.set(FakeTensor, "item", item)
        patches.set(FakeTensor, "__getitem__", _getitem)
        for name in ("tensor", "as_tensor"):
            patches.set(torch, name, _with_values(getattr(torch, name)))
        for owner, names in _SIZED.items():
            for name in names:
                patches.set(owner, name, _with_sizes(getattr(owner, name)))


_SIZED: dict[Any, tuple[str, ...]] = {
    torch: ("empty", "zeros", "ones", "rand", "randn", "arange"),
    FakeTensor: ("expand", "repeat", "resize_", "new_empty", "new_zeros", "new_ones"),
}
"""Functions that take sizes one by one, and whose own check of these knows no `__torch_function__`."""


def _with_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in which a number that is not known decides, and that takes no index."""

    def size(number: Any) -> Any:
        if isinstance(number, ChosenIndex):
            raise unanswered(number.asked)
        if type(number) is tuple:
            return tuple(map(size, number))
        return int(number) if isinstance(number, AssumedCount) else number

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*map(size, args), **kwargs)

    return function


def _getitem(tensor: Any, index: Any) -> Any:
    """Return a part of a tensor. A chosen index may be one of its bounds only if both are chosen together."""
    for part in index if type(index) is tuple else (index,):
        if type(part) is slice:
            bounds = (part.start, part.stop)
            asked = [bound.asked for bound in bounds if isinstance(bound, ChosenIndex)]
            if asked and asked != [asked[0]] * 2:
                raise unanswered(asked[0])
    return _ORIGINAL_GETITEM(tensor, index)


_ORIGINAL_GETITEM: Any = torch.Tensor.__getitem__


class ChosenIndex(int):
    """An index that was chosen, assumed to be 0, or what is calculated from it. It is no length."""

    asked: Question

    def __new__(cls, asked: Question, value: int = 0) -> ChosenIndex:
        """Return an index.

        Args:
            asked: the question that has no answer; it is raised where the index would be a length.
        """
        index = super().__new__(cls, value)
        index.asked = asked
        return index


def _calculating(name: str) -> Any:
    original = getattr(int, name)

    def calculate(index: ChosenIndex, other: Any) -> Any:
        result = original(index, other)
        return ChosenIndex(index.asked, result) if type(result) is int else result

    return calculate


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(ChosenIndex, f"__{_side}{_name}__", _calculating(f"__{_side}{_name}__"))


_OF_VALUES = frozenset(
    (
        *("add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow"),
        *("truediv", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge"),
        *("clamp", "clamp_min", "clamp_max"),
        *("fill", "full", "full_like", "new_full", "masked_fill", "where", "lerp", "addcdiv", "addcmul"),
    )
)
"""Functions in which a number is a value of the result, which has none in an estimate; and not its size."""


def _is_of_values(name: str) -> bool:
    """Whether a function is one of these, in place (`add_`), or an operator of Python (`__radd__`)."""
    name = name.strip("_")
    return name in _OF_VALUES or (name[:1] in ("r", "i") and name[1:] in _OF_VALUES)


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes 1 in place of a number that is not known, also in lists."""

    def with_values(data: Any) -> Any:
        if type(data) in (list, tuple):
            return type(data)(map(with_values, data))
        return 1 if isinstance(data, AssumedCount) else data

    @functools.wraps(original)
    def function(data: Any, *args: Any, **kwargs: Any) -> Any:
        return original(with_values(data), *args, **kwargs)

    return function


class AssumedCount:
    """A whole number whose value is not known.

    Args:
        asked: the question that has no answer; it is raised where the value would decide. (The error itself
            would keep the tensors of its traceback alive.)
        most: the greatest value that it can have; None if that is not known.
    """

    def __init__(self, asked: Question, most: int | None, note: Callable[[str], object]) -> None:
        self.asked, self._most, self._note = asked, most, note

    def _decides(self) -> int:
        if self._most is None:
            raise unanswered(self.asked)
        self._note(counted(self.asked, self._most))
        return self._most

    def _compared(self, _: Any = None) -> AssumedTruth:
        return AssumedTruth(self.asked, self._note)

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

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch with 1 in place of a number that is a value; else it decides."""
        is_value = _is_of_values(func.__name__)

        def value(number: Any) -> Any:
            if type(number) in (list, tuple):  # sizes or indices
                return type(number)(
                    each._decides() if isinstance(each, AssumedCount) else each for each in number
                )
            if not isinstance(number, AssumedCount):
                return number
            return 1 if is_value else number._decides()

        return func(*map(value, args), **{name: value(each) for name, each in (kwargs or {}).items()})

    def __hash__(self) -> NoReturn:
        raise unanswered(self.asked)

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


def not_taken(error: BaseException) -> UnansweredError | None:
    """Return the error for a function that takes no number that is not known, None for any other error."""
    if not isinstance(error, TypeError) or AssumedCount.__name__ not in str(error):
        return None
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        for number in tree_leaves(frame.f_locals):
            if isinstance(number, AssumedCount):
                return unanswered(number.asked, by=frame.f_code.co_name)
    return None


class AssumedTruth:
    """The result of a comparison with a whole number that is not known."""

    def __init__(self, asked: Question, note: Callable[[str], object]) -> None:
        self.asked, self._note = asked, note

    def __bool__(self) -> bool:
        truth = going_on(None)
        if truth is None:
            raise unanswered(self.asked)
        self._note(went_on(self.asked, truth))
        return truth
