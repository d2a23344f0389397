"""Operators that depend on values: `.item()`, `if tensor`, boolean masks, `nonzero` and `unique`.

Hints give the values. Without one, a float is 1.0, a mask selects everything, which is an upper bound, and an
index that was chosen or drawn is 0, and a comparison with a float that is not known is made with 1.0; all are
noted. Other integers and booleans raise an error, since a wrong guess could change what the program does
(assumed_counts.py says what `item()` does with it).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from tb_memplugin.estimate.answer.hints import (
    GENERATES,
    LBFGS,
    Hints,
    Question,
    answer,
    asking_frame,
    checked,
    counted,
    indexed,
    kind_of,
    numbered,
    question,
    unanswered,
    went_on,
)
from tb_memplugin.estimate.program.checks import (
    generating,
    going_on,
    passing,
)
from tb_memplugin.estimate.program.lengths import is_length
from tb_memplugin.estimate.run.correction import Correction, Target
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.estimate.run.known_values import MOST, shuffle, values_of

aten = torch.ops.aten
_ASSUMED = str(Path(__file__).with_name("assumed_counts.py"))
_MASKS = (torch.bool, torch.uint8)
_CHOICES = (aten.argmax, aten.argmin, aten.multinomial, aten.randint, aten.bucketize)
"""Operators that choose or draw indices by parameters or chance: any of them is as good as another."""

_WITH_CHOICES = (aten.topk, aten.sort, aten.max.dim, aten.min.dim, aten.kthvalue, aten.mode)
"""Operators whose second result are such indices."""

_COPIES = (
    *(aten._to_copy, aten.clone, aten.stack, aten.index, aten.index_select, aten.gather, aten.flip),
    aten.masked_select,
)
"""Operators whose results have the elements of their input."""

_JOINS = (aten.stack, aten.cat)
"""Operators whose results have the elements of several."""

_OF_CHOICES = (
    *(*_COPIES, aten.cat, aten.where, aten.repeat, aten.masked_fill, aten.constant_pad_nd),
    *(aten.remainder, aten.floor_divide, aten.div, aten.add, aten.sub, aten.mul, aten.clamp),
    *(aten.copy_, aten.scatter, aten.scatter_, aten.index_copy_),
    *(aten.unique_consecutive, aten._unique2, aten.unique_dim),
)
"""Operators whose whole numbers are still indices, if their input has chosen ones."""

_FACTORIZATIONS = (
    *(aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default),
    *(aten.linalg_lu_factor_ex.default, aten._linalg_solve_ex.default),
)
"""Operators whose last result says with 0 that they succeeded, which is assumed."""

_COMPARISONS = (aten.lt, aten.le, aten.gt, aten.ge)

_NOT_FINITE = (aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default)
"""Questions for values that are not finite; `isfinite` asks `x == x` and `x.abs() != inf`."""

_EQUAL, _DIFFERENT = (aten.eq.Tensor, aten.eq.Scalar), (aten.ne.Tensor, aten.ne.Scalar)

_ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros)

_CHOSEN, _COMPARED, _COUNTED, _SELECTS = "chosen", "compared", "counted", "selects"
"""Attributes of fake tensors: among how many their elements are chosen, 0 if not known; the truth of a
comparison with an assumed number, and that number; the most that their elements can be, which count those
of a mask or are some of known ones; and the most elements that a mask selects, with the tensor's version at
that time."""

_ORDERS = "orders"
"""The attribute of indices that have each index of a row once, in an order that is not known."""

_CHOICES_OF = "choices_of"
"""The attribute of a mask that is True where one of so many choices was chosen, as parts of `one_hot` are:
two chosen of eight are one of four, of seven one of 7/2; and the mask's version at that time."""

_ASKS_FOR_PADDING = ("transformers/masking_utils.py", "transformers/modeling_attn_mask_utils.py")
"""Files that check whether a mask selects everything, in order to omit it (kernels/attention.py)."""


class Asking(Correction):
    """Base class of corrections that take values from the user's hints."""

    def __init__(self, target: Target, hints: Any) -> None:
        super().__init__(target)
        self._hints: Hints = checked(hints)
        self._evaluations = 0

    def _selected(self, mode: CountingFakeMode, func: Any, mask: torch.Tensor) -> int:
        """Return how many elements a mask selects: as it is known, by a hint, or all of them, with a note."""
        values = values_of(mask)
        if values is not None:
            with no_dispatch():
                return int(torch.count_nonzero(values))
        asked = question("share", func, mask, mode.caller())
        hint = answer(self._hints, asked)
        if hint is None and (choices := _share_of(mask)):
            count = math.ceil(mask.numel() / float(choices))
            self.target.note(
                f"How many elements {asked.place} selects depends on what is chosen: each choice is assumed "
                f"to be as frequent as any other, so {count:,} of {mask.numel():,}; a hint can set it."
            )
            return count
        if hint is None:
            most, every = _most_selected(mask), mask.numel()
            maximum = "all" if most in (None, every) else f"{most:,} of {every:,}"
            self.target.note(
                f"How many elements {asked.place} selects depends on values: the maximum, {maximum}, is "
                "assumed; a hint can set it."
            )
            return every if most is None else most
        return min(hint, mask.numel()) if isinstance(hint, int) else round(mask.numel() * hint)

    def _passing(self, mode: CountingFakeMode, asked: Question) -> bool | None:
        """Return the truth with which a check of the program passes, with a note; None if it is no check."""
        truth = passing(mode.caller())
        if truth is not None:
            self._assume_that_it_passes(asked)
        return truth

    def _assume_that_it_passes(self, asked: Question) -> None:
        self.target.note(
            f"{asked.place} checks values: the check is assumed to pass, without an error and without "
            "values that are not finite; a hint can change that."
        )

    def _different(
        self, mode: CountingFakeMode, func: Any, tensor: torch.Tensor, inverse: bool, counts: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the results of `unique`: the unique elements, the index of each input element among them,
        and the number of times that each occurs.
        """
        with mode:
            count = self._selected(mode, func, tensor)
            count = min(count, 2 if tensor.dtype is torch.bool else _attribute(tensor, _CHOSEN) or count)
            longs: dict[str, Any] = {"dtype": torch.int64, "device": tensor.device}
            return (
                torch.empty(count, dtype=tensor.dtype, device=tensor.device),
                torch.empty(tensor.shape if inverse else 0, **longs),
                torch.empty(count if counts else 0, **longs),
            )


class Values(Asking):
    """Answers questions about numbers, booleans, and the selections of masks."""

    def rules(self) -> dict[Any, Rule]:
        """Return rules for operators whose results or shapes depend on values."""
        return {
            aten._local_scalar_dense.default: self._scalar,
            aten.nonzero.default: self._nonzero,
            aten.masked_select.default: self._masked_select,
            aten.index.Tensor: self._index,
            aten._unique2.default: self._unique,
            aten._nested_tensor_from_mask_left_aligned.default: self._left_aligned,
        }

    def after(self) -> dict[Any, After]:
        """Return functions for operators that convert masks to indices, as derivatives of `x[mask]` do."""
        packets = (aten.index_put, aten.index_put_, aten._index_put_impl_)
        compared = {getattr(each, name): _compared for each in _COMPARISONS for name in ("Scalar", "Tensor")}
        compared |= dict.fromkeys(_EQUAL, self._equal)
        looked_up = {packet.default: _looked_up for packet in packets}
        finite = dict.fromkeys(_NOT_FINITE, self._finite) | dict.fromkeys(_DIFFERENT, self._different_numbers)
        summed = dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), self._summed)
        summed |= {aten.max.default: _as_counted, aten.any.dim: _with_fewer_choices}
        summed |= {aten.add_.Tensor: _added_in_place, aten.cumsum.default: _cumulated}
        summed |= dict.fromkeys((aten.count_nonzero.default, aten.count_nonzero.dim_IntList), _not_zero)
        summed |= dict.fromkeys((aten.histc.default, aten.bincount.default), self._counted_by_choice)
        summed |= dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _of_both)
        every = (
            dict.fromkeys(_overloads(_CHOICES), _chosen),
            dict.fromkeys(_overloads(_WITH_CHOICES), _chosen_second),
            dict.fromkeys(_overloads(_OF_CHOICES), _copied),
        )
        summed |= dict.fromkeys(_FACTORIZATIONS, _succeeded)
        marked = dict.fromkeys((aten.scatter_.value, aten.scatter.value), _marked)
        return {**looked_up, **compared, **finite, **summed, **every[0], **every[1], **every[2], **marked}

    def _finite(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Keep the answer to a question for NaN or infinity, for which values that are not known are none."""
        is_infinite = isinstance(args[-1], float) and math.isinf(args[-1])
        if not (is_infinite or args[0] is args[-1]) or type(out) is not FakeTensor:
            return
        if values_of(out) is not None or out.numel() > MOST:
            return
        asked = question("truth", func, out, mode.caller())
        if answer(self._hints, asked) is None:
            self._assume_that_it_passes(asked)
            with no_dispatch():
                truth = func in _EQUAL if args[0] is args[-1] else func in _DIFFERENT
                mode.keep_values(out, torch.full(out.shape, truth))

    def _different_numbers(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        self._finite(mode, func, args, out, scope)
        _compared(mode, func, args, out, scope)

    def _equal(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Keep of how many choices one is asked for: `chosen == 3`, or `== arange(8)` in a dimension more."""
        self._finite(mode, func, args, out, scope)
        _compared(mode, func, args, out, scope)
        chosen, other = args
        choices = _attribute(chosen, _CHOSEN)
        is_one = not isinstance(other, torch.Tensor) or not other.dim() or out.numel() > chosen.numel()
        if choices and is_one and values_of(chosen) is None:
            _keep_share(out, choices)

    def _counted_by_choice(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Keep how often each choice is taken, as `bincount` counts it."""
        choices = choices_of(args[0])
        if 0 < choices <= out.numel() and not out.dtype.is_floating_point:
            self._keep_evenly(mode, func, args[0].numel(), choices, out)

    def _summed(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Keep the most that a sum of a mask can be: all of it, or the part of one choice.

        Of a mask with one part for each choice (`one_hot`), keep how often each is taken.
        """
        if not out.dtype.is_floating_point and out.numel():
            choices = _share_of(args[0]) or 1
            if out.dim() and choices > 1 and out.numel() % choices == 0:
                self._keep_evenly(mode, func, int(args[0].numel() / choices), out.numel(), out)
            each = 1 if args[0].dtype is torch.bool else _attribute(args[0], _COUNTED)
            if each is not None:
                setattr(out, _COUNTED, -(-each * args[0].numel() // (out.numel() * choices)))

    def _keep_evenly(
        self, mode: CountingFakeMode, func: Any, chosen: int, choices: int, out: torch.Tensor
    ) -> None:
        """Keep that each choice is taken as often as any other, but for one more of the first ones."""
        if values_of(out) is not None or out.numel() > MOST:
            return
        place = question("count", func, out, mode.caller()).place
        self.target.note(f"Of the choices that {place} counts, each is assumed as frequent as any other.")
        with no_dispatch():
            every = torch.arange(out.numel())
            counts = chosen // choices + (every < chosen % choices).long()
            mode.keep_values(out, torch.where(every < choices, counts, 0).view(out.shape).to(out.dtype))

    def _scalar(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        try:
            return mode.quietly(func, *args, **kwargs)
        except DataDependentOutputException:
            pass
        tensor = args[0]
        kind = kind_of(tensor.dtype)
        asked = question(kind, "item", tensor, mode.caller())
        hint = answer(self._hints, asked)
        if hint is not None:
            return type_of(tensor.dtype)(hint)
        if kind == "truth" and Path(asked.file).as_posix().endswith(_ASKS_FOR_PADDING):
            self.target.note(
                f"transformers checks at {asked.place} whether nothing is padded or packed. This is "
                "assumed, so it leaves the attention mask out; a hint can change that."
            )
            return True
        if kind == "truth" and (truth := generating(mode.caller())) is not None:
            self.target.note(GENERATES)
            return truth
        if kind == "truth" and (checked_for := self._passing(mode, asked)) is not None:
            return checked_for
        if asking_frame(mode.caller()).f_code.co_filename.endswith("lbfgs.py"):
            return self._of_lbfgs(mode, tensor, kind)
        if kind == "truth" and (compared := vars(tensor).get(_COMPARED)) is not None:
            truth, number = compared
            self.target.note(
                f"The number that {asked.place} compares is assumed to be {number}; a hint can set the truth."
            )
            return truth
        if kind == "truth" and (truth := going_on(mode.caller())) is not None:
            self.target.note(went_on(asked, truth))
            return truth
        if kind == "count" and is_chosen(tensor) and not is_length(mode.caller()):
            self.target.note(indexed(asked))
            if is_item(mode.caller()):
                raise unanswered(asked, is_index=True)
            return 0
        if kind == "count" and (most := _attribute(tensor, _COUNTED)) is not None:
            if is_item(mode.caller()):
                raise unanswered(asked, most)
            self.target.note(counted(asked, most))
            return most
        if kind != "number":
            raise unanswered(asked)
        self.target.note(numbered(asked))
        return 1.0

    def _of_lbfgs(self, mode: CountingFakeMode, tensor: torch.Tensor, kind: str) -> Any:
        """Answer torch.optim.LBFGS: its loss falls, and it goes on to its last iteration."""
        self.target.note(LBFGS)
        self._evaluations += 1
        if kind == "number":
            return 1.0 / self._evaluations
        if asking_frame(mode.caller()).f_code.co_name == "step":
            return bool(going_on(mode.caller()))
        return vars(tensor).get(_COMPARED, (False,))[0]

    def _nonzero(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Any) -> Any:
        """Return as many indices as are assumed to be selected: the first ones, if they are few."""
        (tensor,) = args
        with mode:
            count = self._selected(mode, func, tensor)
            rows = torch.empty((tensor.dim(), count), dtype=torch.int64, device=tensor.device).t()
        if tensor.numel() <= MOST:
            with no_dispatch():
                mode.keep_values(rows, (torch.arange(tensor.numel()) < count).view(tensor.shape).nonzero())
        return rows

    def _left_aligned(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Any) -> bool:
        self.target.note(
            "nn.TransformerEncoder is estimated with its padding; real runs leave it out without gradients."
        )
        return False

    def _masked_select(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, mask = args
        with mode:
            shape = torch.broadcast_shapes(tensor.shape, mask.shape)
            if values_of(mask) is None:
                count = self._selected(mode, func, mask.expand(shape))
            else:
                count = math.prod(shape) // max(mask.numel(), 1) * self._selected(mode, func, mask)
            out = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
        if tensor.fake_device.type == "cuda":  # IndexKernel.cpp: converts the mask to indices
            _pass(mode, func, mode.layers.scope(), tensor, [8 * count * len(shape)])
        return out

    def _index(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, indices = args
        masks = [index for index in indices if index is not None and index.dtype in _MASKS]
        if not masks:
            return mode.quietly(func, tensor, indices)
        converted: list[Any] = []
        looked_up = []
        for index in indices:
            if index is None or index.dtype not in _MASKS:
                converted.append(index)
                continue
            with mode:
                count = self._selected(mode, func, index)
                rows = torch.empty((index.dim(), count), dtype=torch.int64, device=index.device)
                converted += [rows[axis] for axis in range(index.dim())]
                looked_up.append(8 * count * index.dim())
        _pass(mode, func, mode.layers.scope(), tensor, looked_up)
        return mode.quietly(func, tensor, converted)

    def _unique(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, *flags = args
        inverse = kwargs.get("return_inverse", flags[1] if len(flags) > 1 else False)
        counts = kwargs.get("return_counts", flags[2] if len(flags) > 2 else False)
        return self._different(mode, func, tensor, inverse, counts)


class Selections(Correction):
    """Keeps the most elements that a mask can select: as many as were set where none was, as by samplers."""

    def after(self) -> dict[Any, After]:
        """Return functions for operators that make masks, set elements of them or join them."""
        empty = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.full.default)
        setting = (aten.index_put_.default, aten.scatter_.value)
        joining = (aten.cat.default, aten.bitwise_or.Tensor, aten.logical_or.default, aten._to_copy.default)
        return {
            **dict.fromkeys(empty, _selects_none),
            **dict.fromkeys(setting, _selects_more),
            **dict.fromkeys(joining, _selects_joined),
        }


def _selects_none(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    if out.dtype in _MASKS and not (func is aten.full.default and args[1]):
        _select_at_most(out, 0)


def _selects_more(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Add the elements that are set. The tensor's version rises by one after this."""
    before = _most_selected(out)
    indices = args[1] if func is aten.index_put_.default else [args[2]]
    if before is None or any(index is None or index.dtype in _MASKS for index in indices):
        return
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    beside = out.shape[len(indices) :] if func is aten.index_put_.default else ()
    _select_at_most(out, before + math.prod((*shape, *beside)), written=1)


def _selects_joined(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Add what the masks select that are joined, element by element or one behind the other."""
    masks = args[0] if func is aten.cat.default else args[: 1 if func is aten._to_copy.default else 2]
    most = [_most_selected(mask) for mask in masks if isinstance(mask, torch.Tensor)]
    same = func is aten.cat.default or all(mask.shape == out.shape for mask in masks)
    if out.dtype in _MASKS and same and None not in most:
        _select_at_most(out, sum(each or 0 for each in most))


def _select_at_most(mask: torch.Tensor, most: int, written: int = 0) -> None:
    if not mask.is_inference():  # which has no version
        setattr(mask, _SELECTS, (most, mask._version + written))


def _most_selected(mask: torch.Tensor) -> int | None:
    """Return the most elements that a mask selects, None if only its size is known."""
    most, version = _attribute(mask, _SELECTS) or (None, None)
    repeats = any(size > 1 and not stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    if most is None or repeats or mask._version != version:
        return None
    return int(min(most, mask.numel()))


def is_made_by(mode: CountingFakeMode, tensor: torch.Tensor, operators: tuple[Any, ...]) -> bool:
    """Whether one of these operators made a tensor of the estimated device."""
    block = mode.ledger.block_of(tensor.untyped_storage())
    return block is not None and getattr(block.made_by, "overloadpacket", None) in operators


def is_chosen(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds indices that were chosen or drawn, or is a copy or part of one that does."""
    return _attribute(tensor, _CHOSEN) is not None


def _attribute(tensor: torch.Tensor, name: str) -> Any:
    return vars(tensor._base if tensor._base is not None else tensor).get(name)


def _overloads(operators: Iterable[Any]) -> list[Any]:
    overloads: list[Any] = []
    for each in operators:
        is_packet = isinstance(each, torch._ops.OpOverloadPacket)
        overloads += [getattr(each, name) for name in each.overloads()] if is_packet else [each]
    return overloads


def _chosen(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep that indices are chosen, and of how many: of a whole tensor, along a dimension, or of a range."""
    packet, of = func.overloadpacket, args[0]
    if packet is aten.randint:
        choices = max(args[1] - of if len(args) > 2 else of, 0)
    elif packet is aten.bucketize:
        choices = args[1].numel() + 1
    else:
        along = -1 if packet is aten.multinomial else args[1] if len(args) > 1 else None
        choices = of.numel() if along is None or not of.dim() else of.shape[along]
    setattr(out, _CHOSEN, choices)


def _chosen_second(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep that the second result has indices along a dimension, by default the last."""
    of, dimensions = args[0], [each.name for each in func._schema.arguments]
    row = dimensions.index("dim")
    along = args[row] if row < len(args) else -1
    setattr(out[1], _CHOSEN, of.shape[along] if of.dim() else 1)
    setattr(out[1], _ORDERS, func.overloadpacket is aten.sort and of.dim() == 1)


def _with_fewer_choices(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
) -> None:
    """Keep of how many a choice is where several were chosen: two of eight are one of four."""
    if (choices := _share_of(args[0])) and out.numel():
        _keep_share(out, max(1, choices * out.numel() / args[0].numel()))


def _keep_share(mask: torch.Tensor, choices: Any, written: int = 0) -> None:
    """Keep of how many choices a mask has one, until it is written to but for `written` times."""
    setattr(mask, _CHOICES_OF, (choices, mask.is_inference() or mask._version + written))


def _share_of(mask: torch.Tensor) -> Any:
    """Return of how many choices a mask has one, None if that is not known."""
    choices, version = _attribute(mask, _CHOICES_OF) or (None, None)
    return choices if version == (mask.is_inference() or mask._version) else None


def _of_both(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep that a mask selects no more than each of two."""
    choices = [_share_of(mask) or 0 for mask in args if isinstance(mask, torch.Tensor)]
    if any(choices):
        _keep_share(out, max(choices))


def make_one_hot(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Keep that `rows` have a one where each index is, of those among which it was chosen or of all."""
    _keep_share(rows, _attribute(tensor, _CHOSEN) or rows.shape[-1])


def _marked(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep of how many choices one is marked where a number is written into zeros at each that was chosen."""
    zeros, dimension, index, number = args
    is_new = is_made_by(mode, zeros, _ZEROS) and not zeros.is_inference() and not zeros._version
    if number and is_new and index.numel() and _attribute(index, _CHOSEN) == out.shape[dimension]:
        written = int(func is aten.scatter_.value)
        _keep_share(out, Fraction(out.shape[dimension], index.shape[dimension]), written)


def _copied(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    out = out[0] if isinstance(out, tuple) else out
    if not isinstance(out, torch.Tensor) or out.dtype.is_floating_point or out.dtype.is_complex:
        return
    inputs = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    source = _source(func, args, inputs)
    if source is not None:
        if choices := _share_of(source):
            _keep_share(out, choices)
        if func.overloadpacket not in _JOINS:
            _bound(out, [source])
    if func.overloadpacket in _JOINS:
        _bound(out, args[0])
    if func is aten.index.Tensor and _attribute(inputs[-1], _ORDERS):
        shuffle(out, values_of(args[0]))
    if any(map(is_chosen, inputs)):
        choices = None if source is None else _attribute(source, _CHOSEN)
        setattr(out if out._base is None else out._base, _CHOSEN, choices or 0)
    elif func is aten.add.Tensor:
        _as_counted(mode, func, args, out, scope)
    elif func is aten._to_copy.default and args[0].dtype is torch.bool:
        setattr(out, _COUNTED, 1)


def _bound(out: torch.Tensor, sources: Iterable[torch.Tensor]) -> None:
    """Keep the most that whole numbers of a result can be which are those of some tensors."""
    bounds = [greatest(each) for each in sources]
    if None not in bounds:
        setattr(out, _COUNTED, max(each or 0 for each in bounds))


def _source(func: Any, args: tuple[Any, ...], inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor whose elements a result has, and no others: also one that is scattered everywhere."""
    if func.overloadpacket in _COPIES:
        return inputs[0]
    if func.overloadpacket not in (aten.scatter, aten.scatter_) or len(inputs) < 3 or inputs[0].dim() > 1:
        return None
    index = values_of(inputs[1])
    with no_dispatch():
        is_full = index is not None and len(torch.unique(index)) == inputs[0].numel()
    return inputs[2] if is_full else None


def greatest(tensor: torch.Tensor) -> int | None:
    """Return the most that whole numbers can be of which values or a bound are known."""
    values = values_of(tensor)
    if values is None or not values.numel() or kind_of(values.dtype) == "number":
        most: int | None = _attribute(tensor, _COUNTED)
        return most
    with no_dispatch():
        return int(values.max())


def _succeeded(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    with no_dispatch():
        mode.keep_values(out[-1], torch.zeros(out[-1].shape, dtype=torch.int32))


def choices_of(tensor: torch.Tensor) -> int:
    """Return among how many the elements of a tensor are chosen, 0 if that is not known, or they are not."""
    return int(_attribute(tensor, _CHOSEN) or 0)


def _as_counted(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep the most that a count can be, if it is the largest of several, or a number is added to it."""
    most, more = greatest(args[0]), args[1] if len(args) > 1 else 0
    more = greatest(more) if isinstance(more, torch.Tensor) else more
    if most is not None and isinstance(more, int):
        setattr(out, _COUNTED, most + more)


def _added_in_place(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep the most that a count can be to which another is added, if both are known."""
    is_bounded = not isinstance(args[1], torch.Tensor) or greatest(args[1]) is not None
    _as_counted(mode, func, args, out, scope) if is_bounded else vars(out).pop(_COUNTED, None)


def _cumulated(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep the most that a sum of some elements of a row can be: that of all."""
    most = 1 if args[0].dtype is torch.bool else greatest(args[0])
    if most is not None and not out.dtype.is_floating_point and out.dim():
        setattr(out, _COUNTED, most * out.shape[args[1]])


def _not_zero(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep the most that a number of elements can be: all that are in it."""
    if out.numel():
        setattr(out, _COUNTED, args[0].numel() // out.numel())


def _compared(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Keep the truth of a comparison of single numbers: floats that are not known are 1.0, chosen indices 0.

    Whether floats are equal is not kept.
    """
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    unknown = [each for each in tensors if values_of(each) is None]
    if out.dim() or not unknown:
        return
    is_index = all(map(is_chosen, unknown))
    if not is_index and (
        func.overloadpacket not in _COMPARISONS or not all(each.dtype.is_floating_point for each in tensors)
    ):
        return
    with no_dispatch():
        assumed = torch.tensor(0) if is_index else torch.ones(())
        constants = []
        for each in args:
            values = values_of(each) if isinstance(each, torch.Tensor) else each
            constants.append(assumed if values is None else values)
        setattr(out, _COMPARED, (bool(func(*constants)), "0" if is_index else "1.0"))


def _looked_up(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the indices to which a mask is converted: 8 bytes for each True and dimension (`nonzero`).

    A single value for all of them is filled in without indices (index_put_, canDispatchToMaskedFill).
    """
    _copied(mode, func, args, out, scope)
    tensor, indices, values = args[:3]
    masks = [index for index in indices if index is not None and index.dtype in _MASKS]
    if not masks or (values.numel() == 1 and not (len(args) > 3 and args[3])):
        return
    covered, beside = 0, 1
    for index in indices:
        beside *= tensor.shape[covered] if index is None else 1
        covered += index.dim() if index is not None and index.dtype in _MASKS else 1
    for size in tensor.shape[covered:]:
        beside *= size
    count = values.numel() // max(beside, 1)
    _pass(mode, func, scope, tensor, [8 * count * mask.dim() for mask in masks])


def _pass(mode: CountingFakeMode, func: Any, scope: Scope, tensor: Any, sizes: list[int]) -> None:
    """Record a kernel's temporary buffers, if the tensor is on the estimated type of device."""
    if tensor.fake_device.type == mode.ledger.device_type:
        mode.passing(sizes, func, scope, mode.ledger.device_row(tensor.fake_device))


def is_item(caller: FrameType | None) -> bool:
    """Whether `Tensor.item` of assumed_counts.py reads a value, which may return what is not known."""
    return caller is not None and (caller.f_code.co_name, caller.f_code.co_filename) == ("item", _ASSUMED)


def type_of(dtype: torch.dtype) -> Any:
    """Return the Python type of a tensor's elements."""
    if dtype is torch.bool:
        return bool
    return complex if dtype.is_complex else float if dtype.is_floating_point else int
