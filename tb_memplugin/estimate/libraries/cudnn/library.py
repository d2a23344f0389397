"""Load cuDNN, make the descriptors of its backend API, and choose the plan that PyTorch would run.

Imports no torch: this runs in a process of its own (`convolution.py`). Values of cuDNN's header cudnn_graph.h
(version 9) have the names there without CUDNN_.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

FIRST_VERSION = 90800
"""The first version that answers for a described device."""


class Descriptor(IntEnum):
    """cudnnBackendDescriptorType_t: CUDNN_BACKEND_..._DESCRIPTOR."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATIONGRAPH = 15
    TENSOR = 17
    DEVICEPROP = 38


class DataType(IntEnum):
    """cudnnDataType_t: CUDNN_DATA_..."""

    FLOAT = 0
    DOUBLE = 1
    HALF = 2
    BFLOAT16 = 9


class HeurMode(IntEnum):
    """cudnnBackendHeurMode_t: CUDNN_HEUR_MODE_..., in the order in which PyTorch asks them."""

    INSTANT = 0
    FALLBACK = 2


class NumericalNote(IntEnum):
    """cudnnBackendNumericalNote_t: CUDNN_NUMERICAL_NOTE_..."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    NONDETERMINISTIC = 4
    TYPE_COUNT = 10


CROSS_CORRELATION = 1
"""CUDNN_CROSS_CORRELATION of cudnnConvolutionMode_t."""


class Type(IntEnum):
    """cudnnBackendAttributeType_t: CUDNN_TYPE_..."""

    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    NUMERICAL_NOTE = 11
    BACKEND_DESCRIPTOR = 15
    CHAR = 24


C_TYPES: dict[Type, Any] = {
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.BACKEND_DESCRIPTOR: ctypes.c_void_p,
    Type.CHAR: ctypes.c_char,
}
"""The types of C for values; all others are enumerations, so `c_int`."""

ATTRIBUTES = {
    "CONVOLUTION_COMP_TYPE": (100, Type.DATA_TYPE),
    "CONVOLUTION_CONV_MODE": (101, Type.CONVOLUTION_MODE),
    "CONVOLUTION_DILATIONS": (102, Type.INT64),
    "CONVOLUTION_FILTER_STRIDES": (103, Type.INT64),
    "CONVOLUTION_POST_PADDINGS": (104, Type.INT64),
    "CONVOLUTION_PRE_PADDINGS": (105, Type.INT64),
    "CONVOLUTION_SPATIAL_DIMS": (106, Type.INT64),
    "ENGINEHEUR_MODE": (200, Type.HEUR_MODE),
    "ENGINEHEUR_OPERATION_GRAPH": (201, Type.BACKEND_DESCRIPTOR),
    "ENGINEHEUR_RESULTS": (202, Type.BACKEND_DESCRIPTOR),
    "ENGINEHEUR_DEVICEPROP": (204, Type.BACKEND_DESCRIPTOR),
    "ENGINECFG_ENGINE": (300, Type.BACKEND_DESCRIPTOR),
    "EXECUTION_PLAN_ENGINE_CONFIG": (401, Type.BACKEND_DESCRIPTOR),
    "EXECUTION_PLAN_WORKSPACE_SIZE": (402, Type.INT64),
    "EXECUTION_PLAN_DEVICEPROP": (407, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_ALPHA": (700, Type.FLOAT),
    "OPERATION_CONVOLUTION_FORWARD_BETA": (701, Type.FLOAT),
    "OPERATION_CONVOLUTION_FORWARD_CONV_DESC": (702, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_W": (703, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_X": (704, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_Y": (705, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_ALPHA": (706, Type.FLOAT),
    "OPERATION_CONVOLUTION_BWD_DATA_BETA": (707, Type.FLOAT),
    "OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC": (708, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_W": (709, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_DX": (710, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_DY": (711, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_ALPHA": (712, Type.FLOAT),
    "OPERATION_CONVOLUTION_BWD_FILTER_BETA": (713, Type.FLOAT),
    "OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC": (714, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_DW": (715, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_X": (716, Type.BACKEND_DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_DY": (717, Type.BACKEND_DESCRIPTOR),
    "OPERATIONGRAPH_OPS": (801, Type.BACKEND_DESCRIPTOR),
    "TENSOR_BYTE_ALIGNMENT": (900, Type.INT64),
    "TENSOR_DATA_TYPE": (901, Type.DATA_TYPE),
    "TENSOR_DIMENSIONS": (902, Type.INT64),
    "TENSOR_STRIDES": (903, Type.INT64),
    "TENSOR_UNIQUE_ID": (906, Type.INT64),
    "ENGINE_NUMERICAL_NOTE": (1303, Type.NUMERICAL_NOTE),
    "DEVICEPROP_JSON_REPRESENTATION": (2702, Type.CHAR),
}
"""cudnnBackendAttributeName_t: CUDNN_ATTR_..., each with the type of its values."""


class CudnnError(Exception):
    """cuDNN cannot be used, or refused what was asked. The message says why."""


class Library:
    """A loaded cuDNN.

    Attributes:
        version: as `cudnnGetVersion` returns it: 92000 is 9.20.0.
    """

    def __init__(self, path: str) -> None:
        """Load the library at a path.

        Raises:
            CudnnError: it cannot be loaded, is not cuDNN, or is too old.
        """
        try:
            for compiler in _compilers(path):
                ctypes.CDLL(str(compiler))
            self.c = ctypes.CDLL(path)
            self.c.cudnnGetVersion.restype = ctypes.c_size_t
            self.version: int = self.c.cudnnGetVersion()
        except (OSError, AttributeError) as error:
            raise CudnnError(f"{path} is not a cuDNN that can be loaded: {error}") from error
        if self.version < FIRST_VERSION:
            raise CudnnError(f"cuDNN {version_name(self.version)} is older than 9.8")


def _compilers(path: str) -> list[Path]:
    """Return the part of NVRTC's wheel, beside that of cuDNN, that cuDNN does not find by itself.

    cuDNN compiles some kernels, but only where a driver is. Without one, it leaves these kernels out.
    """
    return sorted(Path(path).parent.parent.parent.glob("*/lib/libnvrtc-builtins.so.*"))


def version_name(version: int) -> str:
    """Return a version as people write it: 92000 is 9.20.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Descriptors:
    """Makes descriptors, and destroys them when its block ends.

    Example:
        with Descriptors(library) as made:
            x = made.tensor(1, (8, 64, 56, 56), (200704, 3136, 56, 1), DataType.HALF, 16)
            conv = made.make(Descriptor.CONVOLUTION, CONVOLUTION_SPATIAL_DIMS=2, ...)
    """

    def __init__(self, library: Library) -> None:
        self._c = library.c
        self._pointers: list[ctypes.c_void_p] = []

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        for pointer in reversed(self._pointers):
            self._c.cudnnBackendDestroyDescriptor(pointer)
        self._pointers.clear()

    def make(self, kind: Descriptor, **attributes: Any) -> int:
        """Return a finalized descriptor.

        Args:
            attributes: values by the names in `ATTRIBUTES`, each one value or a sequence. Descriptors are
                what this method returned; CHAR is bytes.

        Raises:
            CudnnError: cuDNN refuses it.
        """
        descriptor = self.empty(kind)
        for name, value in attributes.items():
            self._set(descriptor, name, value)
        self._check(self._c.cudnnBackendFinalize(ctypes.c_void_p(descriptor)), f"finalize {kind.name}")
        return descriptor

    def empty(self, kind: Descriptor) -> int:
        """Return a descriptor without attributes, which is not finalized."""
        pointer = ctypes.c_void_p()
        self._check(
            self._c.cudnnBackendCreateDescriptor(int(kind), ctypes.byref(pointer)), f"make {kind.name}"
        )
        self._pointers.append(pointer)
        return pointer.value or 0

    def tensor(
        self, uid: int, shape: Sequence[int], strides: Sequence[int], dtype: DataType, alignment: int
    ) -> int:
        """Return the descriptor of a tensor; strides count elements, the alignment bytes."""
        return self.make(
            Descriptor.TENSOR,
            TENSOR_UNIQUE_ID=uid,
            TENSOR_DIMENSIONS=shape,
            TENSOR_STRIDES=strides,
            TENSOR_DATA_TYPE=dtype,
            TENSOR_BYTE_ALIGNMENT=alignment,
        )

    def numbers(self, descriptor: int, name: str, most: int = 1) -> list[int]:
        """Return the numbers of an attribute, at most so many.

        Raises:
            CudnnError: cuDNN does not tell.
        """
        attribute, kind = ATTRIBUTES[name]
        count, out = ctypes.c_int64(), (C_TYPES.get(kind, ctypes.c_int) * most)()
        self._get(descriptor, attribute, kind, most, count, out)
        return list(out)[: count.value]

    def descriptors(self, descriptor: int, name: str, kind: Descriptor) -> list[int]:
        """Return the descriptors of one kind that an attribute holds.

        Raises:
            CudnnError: cuDNN does not tell.
        """
        attribute, value = ATTRIBUTES[name]
        count = ctypes.c_int64()
        self._get(descriptor, attribute, value, 0, count, None)
        pointers = (ctypes.c_void_p * count.value)(*(self.empty(kind) for _ in range(count.value)))
        self._get(descriptor, attribute, value, len(pointers), count, pointers)
        return [each or 0 for each in pointers][: count.value]

    def _set(self, descriptor: int, name: str, value: Any) -> None:
        attribute, kind = ATTRIBUTES[name]
        values = value if isinstance(value, (Sequence, bytes)) else (value,)
        array = (C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
        status = self._c.cudnnBackendSetAttribute(
            ctypes.c_void_p(descriptor), attribute, int(kind), ctypes.c_int64(len(values)), array
        )
        self._check(status, f"set {name}")

    def _get(
        self, descriptor: int, attribute: int, kind: int, most: int, count: ctypes.c_int64, out: Any
    ) -> None:
        status = self._c.cudnnBackendGetAttribute(
            ctypes.c_void_p(descriptor), attribute, int(kind), ctypes.c_int64(most), ctypes.byref(count), out
        )
        self._check(status, f"get attribute {attribute}")

    def _check(self, status: int, action: str) -> None:
        if status:
            text = ctypes.create_string_buffer(500)
            self._c.cudnnGetLastErrorString(text, ctypes.c_size_t(len(text)))
            raise CudnnError(
                f"cuDNN does not {action}: status {status} {text.value.decode(errors='replace')}"
            )


def workspaces(
    descriptors: Descriptors, device: int, operation: int, unwanted: frozenset[NumericalNote]
) -> Iterator[int]:
    """Yield the workspace's bytes of each plan for an operation that cuDNN can make, in its order.

    Args:
        unwanted: engines with one of these notes are passed over.

    Raises:
        CudnnError: there is no plan.
    """
    graph = descriptors.make(Descriptor.OPERATIONGRAPH, OPERATIONGRAPH_OPS=operation)
    refusal, plans = "cuDNN has no plan", 0
    for mode in HeurMode:
        try:
            heuristics = descriptors.make(
                Descriptor.ENGINEHEUR,
                ENGINEHEUR_OPERATION_GRAPH=graph,
                ENGINEHEUR_MODE=mode,
                ENGINEHEUR_DEVICEPROP=device,
            )
            configs = descriptors.descriptors(heuristics, "ENGINEHEUR_RESULTS", Descriptor.ENGINECFG)
        except CudnnError as error:
            refusal = str(error)
            continue
        for config in configs:
            if unwanted and unwanted & _notes(descriptors, config):
                continue
            try:
                plan = descriptors.make(
                    Descriptor.EXECUTION_PLAN,
                    EXECUTION_PLAN_ENGINE_CONFIG=config,
                    EXECUTION_PLAN_DEVICEPROP=device,
                )
                size = descriptors.numbers(plan, "EXECUTION_PLAN_WORKSPACE_SIZE")[0]
            except CudnnError as error:
                refusal = str(error)
                continue
            plans += 1
            yield size
    if not plans:
        raise CudnnError(refusal)


def _notes(descriptors: Descriptors, config: int) -> frozenset[NumericalNote]:
    """Return what cuDNN notes on the numerics of an engine's configuration."""
    (engine,) = descriptors.descriptors(config, "ENGINECFG_ENGINE", Descriptor.ENGINE)
    numbers = descriptors.numbers(engine, "ENGINE_NUMERICAL_NOTE", NumericalNote.TYPE_COUNT)
    return frozenset(NumericalNote(number) for number in numbers if number in set(NumericalNote))
