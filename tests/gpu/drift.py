"""Print the rows of the table of kernels that the installed PyTorch contradicts.

`make drift TORCH=2.15.0` runs this on the stand-in (docs/gpu.md), with that version's CUDA wheel. It runs the
operators of test_operators.py in several dtypes, layouts and sizes, forward and backward, and compares what
PyTorch's allocator counts with the estimate. A row is printed with each case that met it and differs.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel
from tb_memplugin.estimate.run.chosen import TABLES
from tests.gpu.test_operators import OPERATORS, Figures, figures

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "expanded gradient", "channels last")
SIZES = (1, 3)
"""Divisors of the first dimension of every input. Where operators do not fit, the case is left out."""


@dataclass(frozen=True)
class Case:
    """One operator with inputs of a dtype, layout and size."""

    name: str
    dtype: torch.dtype
    layout: str
    divisor: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}, {dtype}, {self.layout}, a {self.divisor}th of the rows"

    def run(self, measure: Callable[[Callable[[], Any]], tuple[Any, Figures]]) -> list[Figures] | None:
        """Return the peak and the level after forward and backward, in bytes; None if it does not run."""
        function, shapes = OPERATORS[self.name]
        inputs = [self._input(shape) for shape in shapes]
        try:
            result, forward = measure(lambda: function(*inputs))
            one = torch.ones((), dtype=result.dtype, device="cuda")
            wide = self.layout == "expanded gradient"
            gradient = one.expand(result.shape) if wide else torch.empty_like(result)
            return [forward, measure(lambda: result.backward(gradient))[1]]
        except (RuntimeError, TypeError, ValueError, IndexError):
            history: Any = torch.cuda.memory
            history._record_memory_history(enabled=None)  # the window that failed has not ended
            return None

    def _input(self, shape: tuple[int, ...]) -> torch.Tensor:
        shape = (max(1, shape[0] // self.divisor), *shape[1:])
        if self.layout == "channels last" and len(shape) == 4:
            images = torch.ones(shape, dtype=self.dtype, device="cuda")
            return images.to(memory_format=torch.channels_last).requires_grad_()
        if self.layout != "transposed" or len(shape) < 2:
            return torch.ones(shape, dtype=self.dtype, device="cuda", requires_grad=True)
        *others, rows, columns = shape
        turned = torch.ones((*others, columns, rows), dtype=self.dtype, device="cuda").transpose(-1, -2)
        return turned.detach().requires_grad_()


@contextmanager
def noting(met: dict[str, Kernel]) -> Iterator[None]:
    """Add rows to `met`, by source, as operators ask for them."""

    def noted(row: Kernel) -> Kernel:
        def buffers(call: Call) -> Buffers:
            met[row.source] = row
            return row.buffers(call)

        return replace(row, buffers=buffers)

    with mock.patch.dict(TABLES["cuda"], {operator: noted(row) for operator, row in TABLES["cuda"].items()}):
        yield


def compare(case: Case, gpu: GpuSpec) -> tuple[dict[str, Kernel], list[Figures] | None, list[Figures] | None]:
    """Return the rows that a case meets, and its figures, estimated and counted."""
    met: dict[str, Kernel] = {}
    with noting(met), MemoryEstimator(gpu=gpu):
        estimated = case.run(figures)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return met, estimated, case.run(figures)


def main() -> None:
    """Run every case, and print rows with cases whose bytes differ."""
    gpu = GpuSpec.named(torch.cuda.get_device_name())
    names = [name for name in OPERATORS if not sys.argv[1:] or name in sys.argv[1:]]
    differing: dict[str, list[str]] = defaultdict(list)
    met_rows: dict[str, Kernel] = {}
    compared = left_out = 0
    for arguments in itertools.product(names, DTYPES, LAYOUTS, SIZES):
        case = Case(*arguments)
        if case.layout == "channels last" and not any(len(shape) == 4 for shape in OPERATORS[case.name][1]):
            continue
        met, estimated, counted = compare(case, gpu)
        if estimated is None or counted is None:
            left_out += 1
            continue
        compared += 1
        met_rows |= met
        if estimated != counted:
            for source in met or ("no row",):
                differing[source].append(f"{case}: estimated {estimated}, counted {counted}")
    console = Console(width=160, highlight=False, markup=False)
    console.print(f"PyTorch {torch.__version__} as {gpu.name}: {compared} cases, {left_out} that do not run.")
    for source, cases in differing.items():
        read = met_rows[source].read if source in met_rows else "-"
        console.print(f"\n{source} (read from {read}), or what runs beside it: {len(cases)} cases differ")
        console.print("\n".join(f"  {case}" for case in cases[:5]))
    console.print(
        f"\n{len(met_rows)} rows met, {len(differing.keys() & met_rows.keys())} in cases that differ."
    )
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
