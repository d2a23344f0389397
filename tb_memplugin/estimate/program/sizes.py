"""Operators whose result sizes depend on values: `bincount`, `repeat_interleave`, `nms`, `unique` of rows.

Hints give the sizes. Without one, `unique` and `nms` keep everything, an upper bound that is noted, and
`bincount` has its `minlength`, with a note. The others have no bound: they raise an error that names the
hint to write, as comparisons of whole tensors do (`equal`, `allclose`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tb_memplugin.estimate.answer.hints import answer, counted, question, unanswered, unreached, went_on
from tb_memplugin.estimate.program.checks import going_on
from tb_memplugin.estimate.program.values import Asking, choices_of, greatest
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule

aten = torch.ops.aten


class Sizes(Asking):
    """Takes numbers of rows from the user's hints."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for each operator."""
        return {
            aten.bincount.default: self._bincount,
            aten.repeat_interleave.Tensor: self._repeat,
            aten.unique_dim.default: self._unique_dim,
            aten.unique_dim_consecutive.default: self._unique_dim,
            aten.unique_consecutive.default: self._unique_consecutive,
            aten.equal.default: self._same,
            aten.allclose.default: self._same,
            "torchvision.nms.default": self._nms,
        }

    def _bincount(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        weights = args[1] if len(args) > 1 else kwargs.get("weights")
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        asked = question("count", func, args[0], mode.caller())
        count = answer(self._hints, asked)
        if count is None and weights is None:
            count = choices_of(args[0]) or None
        if count is None and (most := greatest(args[0])) is not None:
            count = most + 1
            self.target.note(counted(asked, count))
        if count is None and not least:
            raise unanswered(asked)
        if count is None:
            self.target.note(unreached(asked, least))
        count = max(int(count or 0), least)
        dtype = torch.int64 if weights is None else weights.dtype
        dtype = dtype if dtype in (torch.int64, torch.float32) else torch.float64
        with mode:
            return torch.empty(count, dtype=dtype, device=args[0].device)

    def _repeat(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `repeat_interleave`: indices of rows, each as often as it is repeated."""
        count = kwargs.get("output_size")
        if count is None:
            asked = question("count", func, args[0], mode.caller())
            count, most = answer(self._hints, asked), greatest(args[0])
            if count is None and most is not None:
                count = most * args[0].numel()
                self.target.note(counted(asked, count))
            if count is None:
                raise unanswered(asked)
        with mode:
            return torch.empty(int(count), dtype=args[0].dtype, device=args[0].device)

    def _nms(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the indices of the boxes that torchvision keeps, after what its kernel for CUDA allocates.

        That is the sorted scores and boxes, one bit for each pair of boxes, and a mask (nms_kernel.cu, 0.26).
        """
        boxes, scores = args[:2]
        rows = scores.numel()
        with mode.running(recorded=True):
            order = scores.sort(stable=True, descending=True).indices
            boxes = boxes.index_select(0, order)
            overlaps = boxes.new_empty(rows * -(-rows // 64), dtype=torch.int64)
            kept = order.masked_select(boxes.new_empty(rows, dtype=torch.bool))
            del overlaps
        return kept

    def _unique_dim(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        tensor, along = args[0], args[1]
        rows = tensor.shape[along]
        with mode:
            count = self._selected(mode, func, torch.empty(rows, dtype=tensor.dtype, device="meta"))
            shape = list(tensor.shape)
            shape[along] = count
            longs = {"dtype": torch.int64, "device": tensor.device}
            kept = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            return kept, torch.empty(rows, **longs), torch.empty(count, **longs)

    def _unique_consecutive(
        self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        tensor, names = args[0], ("return_inverse", "return_counts", "dim")
        options = {**dict(zip(names, args[1:], strict=False)), **kwargs}
        if options.get("dim") is not None:
            return self._unique_dim(mode, func, (tensor, options["dim"]), kwargs)
        inverse, counts = options.get("return_inverse", False), options.get("return_counts", False)
        return self._different(mode, func, tensor, inverse, counts)

    def _same(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        asked = question("truth", func, args[0], mode.caller())
        truth = answer(self._hints, asked)
        if truth is None and (truth := self._passing(mode, asked)) is None:
            truth = going_on(mode.caller())
            if truth is None:
                raise unanswered(asked)
            self.target.note(went_on(asked, truth))
        return bool(truth)
