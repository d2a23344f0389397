from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepStats(_message.Message):
    __slots__ = ("peak_bytes", "peak_event", "peak_time_ns", "start_bytes", "entry_bytes", "end_bytes", "window_peak_bytes", "peak_reserved_bytes", "step_start_ns", "step_end_ns", "allocated_bytes", "allocations", "stayed_bytes", "stayed")
    peak_bytes: int
    peak_event: int
    peak_time_ns: int
    start_bytes: int
    entry_bytes: int
    end_bytes: int
    window_peak_bytes: int
    peak_reserved_bytes: int
    step_start_ns: int
    step_end_ns: int
    allocated_bytes: int
    allocations: int
    stayed_bytes: int
    stayed: int
    def __init__(self, peak_bytes: _Optional[int] = ..., peak_event: _Optional[int] = ..., peak_time_ns: _Optional[int] = ..., start_bytes: _Optional[int] = ..., entry_bytes: _Optional[int] = ..., end_bytes: _Optional[int] = ..., window_peak_bytes: _Optional[int] = ..., peak_reserved_bytes: _Optional[int] = ..., step_start_ns: _Optional[int] = ..., step_end_ns: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., allocations: _Optional[int] = ..., stayed_bytes: _Optional[int] = ..., stayed: _Optional[int] = ...) -> None: ...

class DeviceStats(_message.Message):
    __slots__ = ("device", "capacity_bytes", "stats", "failed_requests")
    device: str
    capacity_bytes: int
    stats: StepStats
    failed_requests: FailedRequests
    def __init__(self, device: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., stats: _Optional[_Union[StepStats, _Mapping]] = ..., failed_requests: _Optional[_Union[FailedRequests, _Mapping]] = ...) -> None: ...

class FailedRequests(_message.Message):
    __slots__ = ("count", "requested_bytes", "line")
    count: int
    requested_bytes: int
    line: str
    def __init__(self, count: _Optional[int] = ..., requested_bytes: _Optional[int] = ..., line: _Optional[str] = ...) -> None: ...

class StepMetadata(_message.Message):
    __slots__ = ("version", "worker", "writer_id", "window", "step", "epoch_ns", "side_file", "devices", "model_fingerprint")
    version: int
    worker: str
    writer_id: str
    window: int
    step: int
    epoch_ns: int
    side_file: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStats]
    model_fingerprint: str
    def __init__(self, version: _Optional[int] = ..., worker: _Optional[str] = ..., writer_id: _Optional[str] = ..., window: _Optional[int] = ..., step: _Optional[int] = ..., epoch_ns: _Optional[int] = ..., side_file: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceStats, _Mapping]]] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...
