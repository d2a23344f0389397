from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SeriesMetadata(_message.Message):
    __slots__ = ("version", "worker", "writer_id", "epoch_ns", "torch")
    version: int
    worker: str
    writer_id: str
    epoch_ns: int
    torch: str
    def __init__(self, version: _Optional[int] = ..., worker: _Optional[str] = ..., writer_id: _Optional[str] = ..., epoch_ns: _Optional[int] = ..., torch: _Optional[str] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("version", "raw_size", "figures")
    version: int
    raw_size: int
    figures: bytes
    def __init__(self, version: _Optional[int] = ..., raw_size: _Optional[int] = ..., figures: _Optional[bytes] = ...) -> None: ...

class StepFigures(_message.Message):
    __slots__ = ("steps", "durations_ns", "devices", "phases", "notes", "note_codes")
    steps: _containers.RepeatedScalarFieldContainer[int]
    durations_ns: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceFigures]
    phases: _containers.RepeatedCompositeFieldContainer[PhaseFigures]
    notes: _containers.RepeatedScalarFieldContainer[str]
    note_codes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, steps: _Optional[_Iterable[int]] = ..., durations_ns: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[_Union[DeviceFigures, _Mapping]]] = ..., phases: _Optional[_Iterable[_Union[PhaseFigures, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., note_codes: _Optional[_Iterable[str]] = ...) -> None: ...

class DeviceFigures(_message.Message):
    __slots__ = ("name", "kind", "product", "capacity_bytes", "peak_bytes", "at_least", "end_bytes", "peak_reserved_bytes", "end_reserved_bytes", "retries", "ooms", "allocations", "allocated_bytes", "end_requested_bytes", "whole_free_bytes", "whole_total_bytes", "heap_free_bytes")
    name: str
    kind: str
    product: str
    capacity_bytes: int
    peak_bytes: _containers.RepeatedScalarFieldContainer[int]
    at_least: _containers.RepeatedScalarFieldContainer[bool]
    end_bytes: _containers.RepeatedScalarFieldContainer[int]
    peak_reserved_bytes: _containers.RepeatedScalarFieldContainer[int]
    end_reserved_bytes: _containers.RepeatedScalarFieldContainer[int]
    retries: _containers.RepeatedScalarFieldContainer[int]
    ooms: _containers.RepeatedScalarFieldContainer[int]
    allocations: _containers.RepeatedScalarFieldContainer[int]
    allocated_bytes: _containers.RepeatedScalarFieldContainer[int]
    end_requested_bytes: _containers.RepeatedScalarFieldContainer[int]
    whole_free_bytes: _containers.RepeatedScalarFieldContainer[int]
    whole_total_bytes: _containers.RepeatedScalarFieldContainer[int]
    heap_free_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., product: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., peak_bytes: _Optional[_Iterable[int]] = ..., at_least: _Optional[_Iterable[bool]] = ..., end_bytes: _Optional[_Iterable[int]] = ..., peak_reserved_bytes: _Optional[_Iterable[int]] = ..., end_reserved_bytes: _Optional[_Iterable[int]] = ..., retries: _Optional[_Iterable[int]] = ..., ooms: _Optional[_Iterable[int]] = ..., allocations: _Optional[_Iterable[int]] = ..., allocated_bytes: _Optional[_Iterable[int]] = ..., end_requested_bytes: _Optional[_Iterable[int]] = ..., whole_free_bytes: _Optional[_Iterable[int]] = ..., whole_total_bytes: _Optional[_Iterable[int]] = ..., heap_free_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class PhaseFigures(_message.Message):
    __slots__ = ("name", "counts", "durations_ns", "devices")
    name: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    durations_ns: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedCompositeFieldContainer[PhaseBytes]
    def __init__(self, name: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ..., durations_ns: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[_Union[PhaseBytes, _Mapping]]] = ...) -> None: ...

class PhaseBytes(_message.Message):
    __slots__ = ("peak_bytes", "at_least", "end_bytes")
    peak_bytes: _containers.RepeatedScalarFieldContainer[int]
    at_least: _containers.RepeatedScalarFieldContainer[bool]
    end_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, peak_bytes: _Optional[_Iterable[int]] = ..., at_least: _Optional[_Iterable[bool]] = ..., end_bytes: _Optional[_Iterable[int]] = ...) -> None: ...
