from tb_memplugin.proto import whole_device_pb2 as _whole_device_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSTANT: _ClassVar[Encoding]
    OFFSET: _ClassVar[Encoding]
    DELTA: _ClassVar[Encoding]
    DICTIONARY: _ClassVar[Encoding]
CONSTANT: Encoding
OFFSET: Encoding
DELTA: Encoding
DICTIONARY: Encoding

class Footer(_message.Message):
    __slots__ = ("version", "source", "notes", "properties", "devices", "steps", "columns", "names", "streams", "pools", "ooms", "counters", "note_data", "whole_devices", "writer_id", "window")
    version: int
    source: bytes
    notes: _containers.RepeatedScalarFieldContainer[bytes]
    properties: _containers.RepeatedCompositeFieldContainer[Property]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceInfo]
    steps: _containers.RepeatedCompositeFieldContainer[StepInfo]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    names: Chunk
    streams: _containers.RepeatedScalarFieldContainer[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolId]
    ooms: _containers.RepeatedCompositeFieldContainer[OutOfMemory]
    counters: _containers.RepeatedCompositeFieldContainer[CounterReading]
    note_data: _containers.RepeatedCompositeFieldContainer[NoteData]
    whole_devices: _containers.RepeatedCompositeFieldContainer[_whole_device_pb2.WholeDevice]
    writer_id: str
    window: int
    def __init__(self, version: _Optional[int] = ..., source: _Optional[bytes] = ..., notes: _Optional[_Iterable[bytes]] = ..., properties: _Optional[_Iterable[_Union[Property, _Mapping]]] = ..., devices: _Optional[_Iterable[_Union[DeviceInfo, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[StepInfo, _Mapping]]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., names: _Optional[_Union[Chunk, _Mapping]] = ..., streams: _Optional[_Iterable[int]] = ..., pools: _Optional[_Iterable[_Union[PoolId, _Mapping]]] = ..., ooms: _Optional[_Iterable[_Union[OutOfMemory, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[CounterReading, _Mapping]]] = ..., note_data: _Optional[_Iterable[_Union[NoteData, _Mapping]]] = ..., whole_devices: _Optional[_Iterable[_Union[_whole_device_pb2.WholeDevice, _Mapping]]] = ..., writer_id: _Optional[str] = ..., window: _Optional[int] = ...) -> None: ...

class NoteData(_message.Message):
    __slots__ = ("code", "warning", "size", "device")
    code: str
    warning: bool
    size: int
    device: bytes
    def __init__(self, code: _Optional[str] = ..., warning: bool = ..., size: _Optional[int] = ..., device: _Optional[bytes] = ...) -> None: ...

class CounterReading(_message.Message):
    __slots__ = ("device", "moment", "counter", "bytes", "at_least", "causes", "cause_bytes")
    device: int
    moment: int
    counter: int
    bytes: int
    at_least: bool
    causes: _containers.RepeatedScalarFieldContainer[int]
    cause_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device: _Optional[int] = ..., moment: _Optional[int] = ..., counter: _Optional[int] = ..., bytes: _Optional[int] = ..., at_least: bool = ..., causes: _Optional[_Iterable[int]] = ..., cause_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class PoolId(_message.Message):
    __slots__ = ("first", "second")
    first: int
    second: int
    def __init__(self, first: _Optional[int] = ..., second: _Optional[int] = ...) -> None: ...

class OutOfMemory(_message.Message):
    __slots__ = ("event", "requested_bytes", "free_bytes")
    event: int
    requested_bytes: int
    free_bytes: int
    def __init__(self, event: _Optional[int] = ..., requested_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class Property(_message.Message):
    __slots__ = ("key", "value")
    key: bytes
    value: bytes
    def __init__(self, key: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class DeviceInfo(_message.Message):
    __slots__ = ("name", "capacity_bytes", "product", "reserved_at_start")
    name: bytes
    capacity_bytes: int
    product: bytes
    reserved_at_start: int
    def __init__(self, name: _Optional[bytes] = ..., capacity_bytes: _Optional[int] = ..., product: _Optional[bytes] = ..., reserved_at_start: _Optional[int] = ...) -> None: ...

class StepInfo(_message.Message):
    __slots__ = ("number", "start_ns", "end_ns")
    number: int
    start_ns: int
    end_ns: int
    def __init__(self, number: _Optional[int] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "rows", "chunks")
    name: str
    rows: int
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "size", "checksum", "raw_size", "rows", "encoding", "width", "base", "first", "values")
    offset: int
    size: int
    checksum: int
    raw_size: int
    rows: int
    encoding: Encoding
    width: int
    base: int
    first: int
    values: int
    def __init__(self, offset: _Optional[int] = ..., size: _Optional[int] = ..., checksum: _Optional[int] = ..., raw_size: _Optional[int] = ..., rows: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., width: _Optional[int] = ..., base: _Optional[int] = ..., first: _Optional[int] = ..., values: _Optional[int] = ...) -> None: ...

class Names(_message.Message):
    __slots__ = ("operators", "labels", "module_keys", "module_parents", "module_classes", "frames", "stack_lengths", "stack_frames", "contexts", "annotation_names", "tensor_dtypes", "tensor_dims", "tensor_shapes", "tensor_strides")
    operators: _containers.RepeatedScalarFieldContainer[bytes]
    labels: _containers.RepeatedScalarFieldContainer[bytes]
    module_keys: _containers.RepeatedScalarFieldContainer[bytes]
    module_parents: _containers.RepeatedScalarFieldContainer[int]
    module_classes: _containers.RepeatedScalarFieldContainer[bytes]
    frames: _containers.RepeatedScalarFieldContainer[bytes]
    stack_lengths: _containers.RepeatedScalarFieldContainer[int]
    stack_frames: _containers.RepeatedScalarFieldContainer[int]
    contexts: _containers.RepeatedScalarFieldContainer[bytes]
    annotation_names: _containers.RepeatedScalarFieldContainer[bytes]
    tensor_dtypes: _containers.RepeatedScalarFieldContainer[bytes]
    tensor_dims: _containers.RepeatedScalarFieldContainer[int]
    tensor_shapes: _containers.RepeatedScalarFieldContainer[int]
    tensor_strides: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, operators: _Optional[_Iterable[bytes]] = ..., labels: _Optional[_Iterable[bytes]] = ..., module_keys: _Optional[_Iterable[bytes]] = ..., module_parents: _Optional[_Iterable[int]] = ..., module_classes: _Optional[_Iterable[bytes]] = ..., frames: _Optional[_Iterable[bytes]] = ..., stack_lengths: _Optional[_Iterable[int]] = ..., stack_frames: _Optional[_Iterable[int]] = ..., contexts: _Optional[_Iterable[bytes]] = ..., annotation_names: _Optional[_Iterable[bytes]] = ..., tensor_dtypes: _Optional[_Iterable[bytes]] = ..., tensor_dims: _Optional[_Iterable[int]] = ..., tensor_shapes: _Optional[_Iterable[int]] = ..., tensor_strides: _Optional[_Iterable[int]] = ...) -> None: ...
