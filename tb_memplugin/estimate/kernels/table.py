"""What kernels allocate besides their results: one row for each operator, and the call that it is asked for.

`run/chosen.py` has all of them. Rows that allocate nothing besides results are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Union

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec

ANY_GPU = GpuSpec.named("a100")
"""The GPU whose properties count if no particular GPU is given."""

HALVES = (torch.float16, torch.bfloat16)

READ = "2.13.0"
"""The PyTorch whose sources the rows were read from, where a row does not say otherwise."""

Buffers = Sequence[Union[int, torch.Tensor, "Buffers", None]]
"""What a kernel allocates, in order.

A number is a buffer of so many bytes, and a tensor is a result of the operator. A sequence in it is what the
kernel allocates and frees in between. Buffers are freed at the end of their sequence, the last one first.
Results exist before all buffers if none of them is named; else those that are not come last.
"""


class Outliving(int):
    """The bytes of a buffer that is freed with the sequence around its own."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator.

    `call["dim"]` is the argument of that name, its default if the program gives none.

    Attributes:
        func: the operator.
        args, kwargs: its arguments, as they were given.
        out: what it returned.
        gpu: the GPU that is estimated for.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    gpu: GpuSpec

    def __getitem__(self, name: str) -> Any:
        position, default = _positions(self.func)[name]
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def get(self, name: str) -> Any:
        """Return an argument, None if the operator has none of this name."""
        return self[name] if name in _positions(self.func) else None


@cache
def _positions(func: Any) -> dict[str, tuple[int, Any]]:
    """Return the position and the default of each argument of an operator."""
    arguments = enumerate(func._schema.arguments)
    return {argument.name: (row, argument.default_value) for row, argument in arguments}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row: a kernel, and what it allocates.

    Attributes:
        operators: the operators that it computes; those that the installed torch lacks are left out.
        buffers: from a call to its buffers; without it, the row is there for its results.
        source: the file in aten/src/ATen/native and the function in it, or what else was read.
        on: the type of device, "" for every one.
        read: the PyTorch that was read.
        results: returns the operator's results, where torch's fake implementation has none or is wrong.
        rare: the program that needs this row, if hardly one does.
    """

    operators: Iterable[Any]
    buffers: Callable[[Call], Buffers] = lambda call: ()
    source: str = field(kw_only=True)
    on: str = "cuda"
    read: str = READ
    results: Callable[..., Any] | None = None
    rare: str = ""


class Table(dict[Any, Kernel]):
    """The rows for one type of device, by operator.

    Raises:
        ValueError: there are two rows for one operator.
    """

    def __init__(self, rows: Iterable[Kernel], device_type: str) -> None:
        super().__init__()
        for row in rows:
            for operator in row.operators if row.on in ("", device_type) else ():
                if operator in self:
                    raise ValueError(f"There is a second row for {operator} on {device_type}: {row.source}.")
                self[operator] = row


def operators(*names: str) -> list[Any]:
    """Return operators of aten by name, those that the installed torch has.

    A name without an overload, such as `mm`, stands for the default one, and `mean.*` for all of them.
    """
    functions = []
    for name in names:
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        overloads = packet.overloads() if packet is not None else ()
        wanted = overloads if overload == "*" else [overload or "default"]
        functions += [getattr(packet, name) for name in wanted if name in overloads]
    return functions


def copied_bytes(tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Return the bytes of a copy in a memory format, 0 if the tensor is in it already."""
    return 0 if tensor.is_contiguous(memory_format=memory_format) else tensor.nbytes
