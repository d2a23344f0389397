"""Values in a dry run: small tensors are computed on the host, others are asked for or assumed.

values.cpp computes. What the program reads of other tensors is answered here as on fake tensors: by a hint,
by a note where a guess does no harm, or refused with the line that reads it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tb_memplugin.dryrun.build import values_library
from tb_memplugin.estimate.answer.hints import (
    EVERY_STEP,
    GENERATES,
    LBFGS,
    Question,
    answer,
    asking_frame,
    checked,
    counted,
    kind_of,
    numbered,
    question,
    unanswered,
    unreached,
    went_on,
)
from tb_memplugin.estimate.kernels.recurrent import SIZED, RecurrentCall, reserve_bytes, workspace_bytes
from tb_memplugin.estimate.kernels.uncounted import FOURIER, SOLVERS, SPARSE
from tb_memplugin.estimate.program.checks import generating, going_on, holds_if_equal, passing
from tb_memplugin.estimate.run.patches import Patches, do_nothing
from tb_memplugin.record.torch_private.autograd import current_node

_SELECTED = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_char_p, ctypes.c_long)
_READ = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_char_p, ctypes.c_long)
_CHOSEN = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_FINITE = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_char_p)
_SIZES = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t))

MOST_KEPT = 1 << 20
"""The most bytes of a saved tensor whose values are kept."""

FINITE = (
    "Values that were not computed are assumed to be finite: every check for that passes which no hint "
    "answers."
)

UNSCALES = b"aten::_amp_foreach_non_finite_check_and_unscale_"
"""The operator with which GradScaler finds out whether gradients overflowed."""

_THIS_PACKAGE = str(Path(__file__).parents[1])

_ELEMENT_BYTES = {1: 8, 2: 2, 9: 2}
"""By cudnnDataType_t, for all but those of four bytes."""


class Values:
    """The values of one dry run."""

    def __init__(self, hints: Mapping[str, Any] | None, note: Callable[[str], None]) -> None:
        self._hints, self._note = checked(hints), note
        self._evaluations = 0
        self._prints = False
        self._library = ctypes.CDLL(str(values_library()), mode=ctypes.RTLD_GLOBAL)
        self._standin = ctypes.CDLL(None)
        self._known = self._library.tb_memplugin_values_known
        self._known.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        self._most = self._library.tb_memplugin_values_most
        self._most.argtypes, self._most.restype = (ctypes.c_size_t,), ctypes.c_long
        self._functions = (
            _SELECTED(self._selected),
            _READ(self._read),
            _CHOSEN(self._chosen),
            _FINITE(self._finite),
        )
        self._recurrent = _SIZES(self._size_recurrent)

    def start(self, patches: Patches) -> None:
        """Begin to compute values; ends with the process."""
        patches.register("_local_scalar_dense", self._item, "CUDA")
        patches.register("_linalg_check_errors", do_nothing, "CUDA")
        printed: Any = torch.Tensor.__repr__

        def print_ones(*args: Any, **kwargs: Any) -> Any:
            self._prints = True
            try:
                return printed(*args, **kwargs)
            finally:
                self._prints = False

        patches.set(torch.Tensor, "__repr__", print_ones)
        self._library.tb_memplugin_values_start(*self._functions)
        self._standin.standin_size_recurrent_layers(self._recurrent)

    def note_what_is_not_counted(self) -> None:
        """Say which sizes the stand-in did not know; called once the program has run."""
        standin = self._standin
        counts = {
            FOURIER: standin.standin_fourier_plans,
            SOLVERS: standin.standin_solvers,
            SPARSE: standin.standin_sparse,
        }
        for note, count in counts.items():
            if count():
                self._note(note)

    def watch_allocations(self) -> None:
        """Forget what was in memory when it is allocated; called once the process uses the GPU."""
        self._library.tb_memplugin_values_watch()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a tensor's values on the CPU; None if they are not known, or many."""
        size = tensor.numel() * tensor.element_size()
        if size > MOST_KEPT or not tensor.is_contiguous():
            return None
        is_known = not tensor.is_cuda or self._known(tensor.data_ptr(), size)
        return tensor.detach().to("cpu", copy=True) if is_known else None

    @staticmethod
    def kept(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        """Give a tensor such values; on the CPU, ones that are not known are 0."""
        if values is not None:
            tensor.copy_(values)
        elif tensor.device.type == "cpu":
            tensor.zero_()

    def _size_recurrent(self, call: bytes, sizes: Any) -> None:
        """Write the bytes of the workspace and reserve of a recurrent layer (line_of in recurrent.cpp)."""
        self._note(SIZED)
        capability, train, algorithm, kind, _, directions, dtype, _, _, *rest = map(int, call.split())
        features, hidden, projected, layers, drops, _, packed, steps, sequences, rows = rest
        layer = RecurrentCall(
            kind=kind,
            directions=directions,
            features=features,
            hidden=hidden,
            projected=projected,
            layers=layers,
            drops=bool(drops),
            steps=steps,
            sequences=sequences,
            rows=rows,
            packed=bool(packed),
            element_bytes=_ELEMENT_BYTES.get(dtype, 4),
            persistent=bool(algorithm),
            capability=divmod(capability, 10),
        )
        sizes[0], sizes[1] = workspace_bytes(layer, train=bool(train)), reserve_bytes(layer)

    def _item(self, tensor: torch.Tensor) -> Any:
        """Answer `tensor.item()`, and what asks for the truth of a tensor."""
        size, kind = tensor.element_size(), tensor.dtype
        read = ctypes.create_string_buffer(size)
        answered = self._standin.standin_take_answer(read, ctypes.c_size_t(size))
        if not answered and self._known(tensor.data_ptr(), size):
            ctypes.memmove(read, tensor.data_ptr(), size)
            answered = True
        if answered:
            return torch.frombuffer(read, dtype=kind)[0].item()
        if _looks_for_zeros():
            return 0
        if self._prints:
            return torch.tensor(kind is not torch.bool, dtype=kind).item()
        caller = _caller()
        asked = question(kind_of(kind), "item", tensor, caller)
        hint = answer(self._hints, asked)
        if hint is not None:
            return torch.tensor(hint, dtype=kind).item()
        if asked.kind == "truth" and (truth := generating(caller)) is not None:
            self._note(GENERATES)
            return truth
        if asked.kind == "truth" and (passes := passing(caller)) is not None:
            self._note(f"{asked.place} checks values: the check is assumed to pass; a hint can change that.")
            return passes
        if asking_frame(caller).f_code.co_filename.endswith("lbfgs.py"):
            self._note(LBFGS)
            self._evaluations += 1
            if asked.kind != "truth":
                return 1.0 / self._evaluations
            in_line_search = asking_frame(caller).f_code.co_name != "step"
            return holds_if_equal(caller) if in_line_search else bool(going_on(caller))
        if asked.kind == "truth" and (truth := going_on(caller)) is not None:
            self._note(went_on(asked, truth))
            return truth
        if asked.kind == "count" and (most := self._most(tensor.data_ptr())) >= 0:
            self._note(counted(asked, most))
            return most
        if asked.kind != "number":
            raise unanswered(asked)
        self._note(numbered(asked))
        return 1.0

    def _selected(self, operator: bytes, elements: int) -> int:
        """Return how many elements a mask selects, how many are different, or how many `bincount` counts."""
        if _looks_for_zeros():
            return 0
        if self._prints:
            return elements
        if operator == b"aten::bincount":
            asked = self._question("count", operator.decode(), elements, torch.int64)
            count = answer(self._hints, asked)
            if count is None:
                self._note(unreached(asked, elements))
            return max(int(count or 0), elements)
        asked = self._question("share", operator.decode(), elements, torch.bool)
        hint = answer(self._hints, asked)
        if hint is None:
            self._note(
                f"How many elements {asked.place} selects depends on values: the maximum, all, is assumed; "
                "a hint can set it."
            )
            return elements
        return min(hint, elements) if isinstance(hint, int) else round(elements * hint)

    def _read(self, dtype: bytes, elements: int) -> float:
        """Return what a copy on the host has in place of values that were not computed."""
        if self._prints:
            return 1.0
        kind = getattr(torch, dtype.decode().lower(), torch.float32)
        asked = self._question(kind_of(kind), "copy_", elements, kind)
        hint = answer(self._hints, asked)
        value = float(kind.is_floating_point or kind.is_complex) if hint is None else float(hint)
        if hint is None:
            self._note(
                f"{asked.place} copies values that were not computed to the host: they are assumed to be "
                f"{value:g}; a hint can set them."
            )
        return value

    def _chosen(self, operator: bytes) -> None:
        self._note(
            f"Indices that {operator.decode()} chooses by values that were not computed are assumed: the "
            "first, or several spread evenly."
        )

    def _finite(self, operator: bytes) -> int:
        """Return whether values that were not computed are assumed to be finite, because no hint answers."""
        self._note(EVERY_STEP if operator == UNSCALES else FINITE)
        return answer(self._hints, self._question("truth", operator.decode(), 1, torch.bool)) is None

    @staticmethod
    def _question(kind: str, operator: str, elements: int, dtype: torch.dtype) -> Question:
        return question(kind, operator, torch.empty(elements, dtype=dtype, device="meta"), _caller())


def _caller() -> FrameType | None:
    """Return the frame of the program that asks; that of `loss.backward()` on a thread of autograd."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_THIS_PACKAGE):
        frame = frame.f_back
    return frame or sys._current_frames().get(threading.main_thread().ident or 0)


def _looks_for_zeros() -> bool:
    """Whether the backward of `prod` or `cumprod` asks: its formula is that of numbers without a zero."""
    return type(current_node()).__name__.startswith(("ProdBackward", "CumprodBackward"))
