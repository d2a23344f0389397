"""Describe a convolution to cuDNN as PyTorch's Conv_v8.cpp does, and the process in which cuDNN is asked.

`python -m tb_memplugin.estimate.libraries.cudnn.convolution FD PATH` reads (description of the GPU,
convolution) pairs from a connection and sends one `Answer` for each, until the connection is closed. The
first answer comes without a question and has cuDNN's version.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tb_memplugin.estimate.libraries.cudnn.library import (
    CROSS_CORRELATION,
    CudnnError,
    DataType,
    Descriptor,
    Descriptors,
    Library,
    NumericalNote,
    workspaces,
)

OPERATIONS = {
    "forward": (Descriptor.OPERATION_CONVOLUTION_FORWARD, "FORWARD_", "W", "X", "Y"),
    "input": (Descriptor.OPERATION_CONVOLUTION_BACKWARD_DATA, "BWD_DATA_", "W", "DX", "DY"),
    "weight": (Descriptor.OPERATION_CONVOLUTION_BACKWARD_FILTER, "BWD_FILTER_", "DW", "X", "DY"),
}
"""What is computed (the result, or a gradient): the descriptor, and the names of its attributes."""


@dataclass(frozen=True)
class Operand:
    """A tensor as cuDNN sees it; strides count elements, the alignment bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = 16


@dataclass(frozen=True)
class Convolution:
    """One call of cuDNN. The number of groups follows from the shapes of input and weight.

    Attributes:
        computes: a key of `OPERATIONS`.
        dtype: the name of a `DataType`.
        tf32: whether TensorFloat-32 is allowed (torch.backends.cudnn.allow_tf32).
        deterministic: whether only deterministic kernels are (torch.backends.cudnn.deterministic).
        fits_bytes: the bytes of memory that are free, where torch.backends.cudnn.benchmark tries all plans;
            they share the largest of the workspaces that fit (Conv_v8.cpp, generate_and_filter_plans).
    """

    computes: str
    dtype: str
    x: Operand
    w: Operand
    y: Operand
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    tf32: bool = True
    deterministic: bool = False
    fits_bytes: int | None = None

    def workspace_bytes(self, descriptors: Descriptors, device: int) -> int:
        """Return the bytes of its workspace on a device.

        Raises:
            CudnnError: cuDNN cannot compute it.
        """
        dtype = DataType[self.dtype]
        computed = DataType.FLOAT if dtype in (DataType.HALF, DataType.BFLOAT16) else dtype
        x, w, y = (
            descriptors.tensor(ord(name), operand.shape, operand.strides, dtype, operand.alignment)
            for name, operand in (("x", self.x), ("w", self.w), ("y", self.y))
        )
        convolution = descriptors.make(
            Descriptor.CONVOLUTION,
            CONVOLUTION_SPATIAL_DIMS=len(self.stride),
            CONVOLUTION_COMP_TYPE=computed,
            CONVOLUTION_CONV_MODE=CROSS_CORRELATION,
            CONVOLUTION_PRE_PADDINGS=self.padding,
            CONVOLUTION_POST_PADDINGS=self.padding,
            CONVOLUTION_DILATIONS=self.dilation,
            CONVOLUTION_FILTER_STRIDES=self.stride,
        )
        kind, prefix, *names = OPERATIONS[self.computes]
        operands = dict(zip(names, (w, x, y), strict=True))
        values = {"ALPHA": 1.0, "BETA": 0.0, "CONV_DESC": convolution, **operands}
        operation = descriptors.make(
            kind, **{f"OPERATION_CONVOLUTION_{prefix}{name}": value for name, value in values.items()}
        )
        sizes = workspaces(descriptors, device, operation, _unwanted(self))
        if self.fits_bytes is None:
            return next(sizes)
        return max((size for size in sizes if size <= self.fits_bytes), default=0)


def _unwanted(asked: Convolution) -> frozenset[NumericalNote]:
    """Return the notes of engines that PyTorch passes over (Conv_v8.cpp, filterEngineConfigs)."""
    notes: set[NumericalNote] = set()
    if asked.deterministic:
        notes.add(NumericalNote.NONDETERMINISTIC)
    if asked.dtype == "FLOAT" or not asked.tf32:
        notes.add(NumericalNote.DOWN_CONVERT_INPUTS)
    if asked.dtype == "FLOAT" and not asked.tf32:
        notes.add(NumericalNote.TENSOR_CORE)
    return frozenset(notes)


@dataclass(frozen=True)
class Answer:
    """A number (bytes, or a version), or why there is none."""

    number: int = 0
    refusal: str = ""


def answer(library: Library, description: str, question: Convolution) -> Answer:
    """Return what cuDNN answers for a described GPU."""
    try:
        with Descriptors(library) as descriptors:
            text = description.encode()
            device = descriptors.make(Descriptor.DEVICEPROP, DEVICEPROP_JSON_REPRESENTATION=text)
            return Answer(question.workspace_bytes(descriptors, device))
    except CudnnError as error:
        return Answer(refusal=str(error))


def main() -> None:
    """Answer until the other side goes."""
    connection, path = Connection(int(sys.argv[1])), sys.argv[2]
    try:
        library = Library(path)
    except CudnnError as error:
        connection.send(Answer(refusal=str(error)))
        return
    connection.send(Answer(library.version))
    try:
        while True:
            connection.send(answer(library, *connection.recv()))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    from tb_memplugin.estimate.libraries.cudnn import convolution

    convolution.main()  # so that answers are pickled under their own name
