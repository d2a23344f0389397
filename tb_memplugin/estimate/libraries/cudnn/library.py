"""Load cuDNN, make the descriptors of its backend API, and choose the plan that PyTorch would run.

Imports no torch: this runs in a process of its own (`answers.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tb_memplugin.estimate.libraries.cudnn.header import (
    ATTRIBUTES,
    C_TYPES,
    DataType,
    Descriptor,
    HeurMode,
    NumericalNote,
)

FIRST_VERSION = 90800
"""The first version that answers for a described device."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def device_descriptor(descriptors: Descriptors, description: str) -> int:
    """Return the descriptor of a described device (`device.described`)."""
    return descriptors.make(Descriptor.DEVICEPROP, DEVICEPROP_JSON_REPRESENTATION=description.encode())


def workspaces(
    descriptors: Descriptors,
    device: int,
    operations: Sequence[int],
    modes: Iterable[HeurMode],
    unwanted: frozenset[NumericalNote] = frozenset(),
) -> Iterator[int]:
    """Yield the workspace's bytes of each plan for a graph of operations that cuDNN can make, in its order.

    Args:
        modes: the heuristics to ask, one after the other.
        unwanted: engines with one of these notes are passed over.

    Raises:
        CudnnError: there is no plan.
    """
    graph = descriptors.make(Descriptor.OPERATIONGRAPH, OPERATIONGRAPH_OPS=operations)
    refusal, plans = "cuDNN has no plan", 0
    for mode in modes:
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
