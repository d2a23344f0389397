from tb_memplugin.proto import metadata_pb2 as _metadata_pb2
from tb_memplugin.proto import whole_device_pb2 as _whole_device_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepBlob(_message.Message):
    __slots__ = ("version", "raw_size", "summary")
    version: int
    raw_size: int
    summary: bytes
    def __init__(self, version: _Optional[int] = ..., raw_size: _Optional[int] = ..., summary: _Optional[bytes] = ...) -> None: ...

class StepSummary(_message.Message):
    __slots__ = ("metadata", "source", "properties", "notes", "folded", "modules", "devices", "phases", "calls")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    metadata: _metadata_pb2.StepMetadata
    source: str
    properties: _containers.ScalarMap[str, str]
    notes: _containers.RepeatedCompositeFieldContainer[Note]
    folded: bool
    modules: Modules
    devices: _containers.RepeatedCompositeFieldContainer[DeviceSummary]
    phases: Spans
    calls: Spans
    def __init__(self, metadata: _Optional[_Union[_metadata_pb2.StepMetadata, _Mapping]] = ..., source: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ..., notes: _Optional[_Iterable[_Union[Note, _Mapping]]] = ..., folded: bool = ..., modules: _Optional[_Union[Modules, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[DeviceSummary, _Mapping]]] = ..., phases: _Optional[_Union[Spans, _Mapping]] = ..., calls: _Optional[_Union[Spans, _Mapping]] = ...) -> None: ...

class Note(_message.Message):
    __slots__ = ("warning", "text", "code", "bytes", "device")
    warning: bool
    text: str
    code: str
    bytes: int
    device: str
    def __init__(self, warning: bool = ..., text: _Optional[str] = ..., code: _Optional[str] = ..., bytes: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class Modules(_message.Message):
    __slots__ = ("keys", "classes", "class_names")
    keys: _containers.RepeatedScalarFieldContainer[str]
    classes: _containers.RepeatedScalarFieldContainer[int]
    class_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., classes: _Optional[_Iterable[int]] = ..., class_names: _Optional[_Iterable[str]] = ...) -> None: ...

class DeviceSummary(_message.Message):
    __slots__ = ("name", "capacity_bytes", "product", "stats", "peak", "curve", "modules", "accounts", "whole_devices")
    name: str
    capacity_bytes: int
    product: str
    stats: _metadata_pb2.StepStats
    peak: Peak
    curve: Curve
    modules: ModuleTable
    accounts: _containers.RepeatedCompositeFieldContainer[Account]
    whole_devices: _containers.RepeatedCompositeFieldContainer[_whole_device_pb2.WholeDevice]
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., product: _Optional[str] = ..., stats: _Optional[_Union[_metadata_pb2.StepStats, _Mapping]] = ..., peak: _Optional[_Union[Peak, _Mapping]] = ..., curve: _Optional[_Union[Curve, _Mapping]] = ..., modules: _Optional[_Union[ModuleTable, _Mapping]] = ..., accounts: _Optional[_Iterable[_Union[Account, _Mapping]]] = ..., whole_devices: _Optional[_Iterable[_Union[_whole_device_pb2.WholeDevice, _Mapping]]] = ...) -> None: ...

class Account(_message.Message):
    __slots__ = ("moment", "counted_bytes", "counter", "allocator_bytes", "at_least", "causes", "cause_bytes")
    moment: int
    counted_bytes: int
    counter: int
    allocator_bytes: int
    at_least: bool
    causes: _containers.RepeatedScalarFieldContainer[int]
    cause_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, moment: _Optional[int] = ..., counted_bytes: _Optional[int] = ..., counter: _Optional[int] = ..., allocator_bytes: _Optional[int] = ..., at_least: bool = ..., causes: _Optional[_Iterable[int]] = ..., cause_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class Peak(_message.Message):
    __slots__ = ("event", "time_ns", "bytes", "phase", "operator", "module", "by_category", "by_operator", "by_phase", "largest")
    event: int
    time_ns: int
    bytes: int
    phase: int
    operator: str
    module: str
    by_category: Parts
    by_operator: Parts
    by_phase: Parts
    largest: Allocations
    def __init__(self, event: _Optional[int] = ..., time_ns: _Optional[int] = ..., bytes: _Optional[int] = ..., phase: _Optional[int] = ..., operator: _Optional[str] = ..., module: _Optional[str] = ..., by_category: _Optional[_Union[Parts, _Mapping]] = ..., by_operator: _Optional[_Union[Parts, _Mapping]] = ..., by_phase: _Optional[_Union[Parts, _Mapping]] = ..., largest: _Optional[_Union[Allocations, _Mapping]] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("keys", "bytes", "counts")
    keys: _containers.RepeatedScalarFieldContainer[str]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., bytes: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Allocations(_message.Message):
    __slots__ = ("bytes", "addresses", "categories", "phases", "modules", "operators", "names", "born_ns", "freed_ns", "reasons", "module_confidences", "tensors")
    bytes: _containers.RepeatedScalarFieldContainer[int]
    addresses: _containers.RepeatedScalarFieldContainer[int]
    categories: _containers.RepeatedScalarFieldContainer[int]
    phases: _containers.RepeatedScalarFieldContainer[int]
    modules: _containers.RepeatedScalarFieldContainer[int]
    operators: _containers.RepeatedScalarFieldContainer[str]
    names: _containers.RepeatedScalarFieldContainer[str]
    born_ns: _containers.RepeatedScalarFieldContainer[int]
    freed_ns: _containers.RepeatedScalarFieldContainer[int]
    reasons: _containers.RepeatedScalarFieldContainer[int]
    module_confidences: _containers.RepeatedScalarFieldContainer[int]
    tensors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, bytes: _Optional[_Iterable[int]] = ..., addresses: _Optional[_Iterable[int]] = ..., categories: _Optional[_Iterable[int]] = ..., phases: _Optional[_Iterable[int]] = ..., modules: _Optional[_Iterable[int]] = ..., operators: _Optional[_Iterable[str]] = ..., names: _Optional[_Iterable[str]] = ..., born_ns: _Optional[_Iterable[int]] = ..., freed_ns: _Optional[_Iterable[int]] = ..., reasons: _Optional[_Iterable[int]] = ..., module_confidences: _Optional[_Iterable[int]] = ..., tensors: _Optional[_Iterable[str]] = ...) -> None: ...

class Curve(_message.Message):
    __slots__ = ("t0_ns", "t1_ns", "columns", "low", "high", "reserved", "categories", "stacks", "peak_event", "peak_time_ns", "peak_column")
    t0_ns: int
    t1_ns: int
    columns: int
    low: _containers.RepeatedScalarFieldContainer[int]
    high: _containers.RepeatedScalarFieldContainer[int]
    reserved: _containers.RepeatedScalarFieldContainer[int]
    categories: _containers.RepeatedScalarFieldContainer[int]
    stacks: _containers.RepeatedScalarFieldContainer[int]
    peak_event: int
    peak_time_ns: int
    peak_column: int
    def __init__(self, t0_ns: _Optional[int] = ..., t1_ns: _Optional[int] = ..., columns: _Optional[int] = ..., low: _Optional[_Iterable[int]] = ..., high: _Optional[_Iterable[int]] = ..., reserved: _Optional[_Iterable[int]] = ..., categories: _Optional[_Iterable[int]] = ..., stacks: _Optional[_Iterable[int]] = ..., peak_event: _Optional[int] = ..., peak_time_ns: _Optional[int] = ..., peak_column: _Optional[int] = ...) -> None: ...

class ModuleTable(_message.Message):
    __slots__ = ("modules", "parents", "own", "own_count", "peak_inside", "calls", "allocations", "allocated_bytes", "forward_ns", "backward_ns")
    modules: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    own: _containers.RepeatedScalarFieldContainer[int]
    own_count: _containers.RepeatedScalarFieldContainer[int]
    peak_inside: _containers.RepeatedScalarFieldContainer[int]
    calls: _containers.RepeatedScalarFieldContainer[int]
    allocations: _containers.RepeatedScalarFieldContainer[int]
    allocated_bytes: _containers.RepeatedScalarFieldContainer[int]
    forward_ns: _containers.RepeatedScalarFieldContainer[int]
    backward_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, modules: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., own: _Optional[_Iterable[int]] = ..., own_count: _Optional[_Iterable[int]] = ..., peak_inside: _Optional[_Iterable[int]] = ..., calls: _Optional[_Iterable[int]] = ..., allocations: _Optional[_Iterable[int]] = ..., allocated_bytes: _Optional[_Iterable[int]] = ..., forward_ns: _Optional[_Iterable[int]] = ..., backward_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class Spans(_message.Message):
    __slots__ = ("starts", "lengths", "names", "depths", "phases")
    starts: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    names: _containers.RepeatedScalarFieldContainer[int]
    depths: _containers.RepeatedScalarFieldContainer[int]
    phases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, starts: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., names: _Optional[_Iterable[int]] = ..., depths: _Optional[_Iterable[int]] = ..., phases: _Optional[_Iterable[int]] = ...) -> None: ...
