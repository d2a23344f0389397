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
    __slots__ = ("version", "worker", "writer_id", "window", "step", "epoch_ns", "side_file", "devices", "model_fingerprint", "dump_of", "not_ended")
    version: int
    worker: str
    writer_id: str
    window: int
    step: int
    epoch_ns: int
    side_file: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStats]
    model_fingerprint: str
    dump_of: str
    not_ended: bool
    def __init__(self, version: _Optional[int] = ..., worker: _Optional[str] = ..., writer_id: _Optional[str] = ..., window: _Optional[int] = ..., step: _Optional[int] = ..., epoch_ns: _Optional[int] = ..., side_file: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceStats, _Mapping]]] = ..., model_fingerprint: _Optional[str] = ..., dump_of: _Optional[str] = ..., not_ended: bool = ...) -> None: ...

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
    metadata: StepMetadata
    source: str
    properties: _containers.ScalarMap[str, str]
    notes: _containers.RepeatedCompositeFieldContainer[Note]
    folded: bool
    modules: Modules
    devices: _containers.RepeatedCompositeFieldContainer[DeviceSummary]
    phases: Spans
    calls: Spans
    def __init__(self, metadata: _Optional[_Union[StepMetadata, _Mapping]] = ..., source: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ..., notes: _Optional[_Iterable[_Union[Note, _Mapping]]] = ..., folded: bool = ..., modules: _Optional[_Union[Modules, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[DeviceSummary, _Mapping]]] = ..., phases: _Optional[_Union[Spans, _Mapping]] = ..., calls: _Optional[_Union[Spans, _Mapping]] = ...) -> None: ...

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
    stats: StepStats
    peak: Peak
    curve: Curve
    modules: ModuleTable
    accounts: _containers.RepeatedCompositeFieldContainer[Account]
    whole_devices: _containers.RepeatedCompositeFieldContainer[WholeDevice]
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., product: _Optional[str] = ..., stats: _Optional[_Union[StepStats, _Mapping]] = ..., peak: _Optional[_Union[Peak, _Mapping]] = ..., curve: _Optional[_Union[Curve, _Mapping]] = ..., modules: _Optional[_Union[ModuleTable, _Mapping]] = ..., accounts: _Optional[_Iterable[_Union[Account, _Mapping]]] = ..., whole_devices: _Optional[_Iterable[_Union[WholeDevice, _Mapping]]] = ...) -> None: ...

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

class WholeDevice(_message.Message):
    __slots__ = ("device", "moment", "read_at", "is_limit", "parts", "part_bytes")
    device: int
    moment: int
    read_at: int
    is_limit: bool
    parts: _containers.RepeatedScalarFieldContainer[int]
    part_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device: _Optional[int] = ..., moment: _Optional[int] = ..., read_at: _Optional[int] = ..., is_limit: bool = ..., parts: _Optional[_Iterable[int]] = ..., part_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

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
    whole_devices: _containers.RepeatedCompositeFieldContainer[WholeDevice]
    writer_id: str
    window: int
    def __init__(self, version: _Optional[int] = ..., source: _Optional[bytes] = ..., notes: _Optional[_Iterable[bytes]] = ..., properties: _Optional[_Iterable[_Union[Property, _Mapping]]] = ..., devices: _Optional[_Iterable[_Union[DeviceInfo, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[StepInfo, _Mapping]]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., names: _Optional[_Union[Chunk, _Mapping]] = ..., streams: _Optional[_Iterable[int]] = ..., pools: _Optional[_Iterable[_Union[PoolId, _Mapping]]] = ..., ooms: _Optional[_Iterable[_Union[OutOfMemory, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[CounterReading, _Mapping]]] = ..., note_data: _Optional[_Iterable[_Union[NoteData, _Mapping]]] = ..., whole_devices: _Optional[_Iterable[_Union[WholeDevice, _Mapping]]] = ..., writer_id: _Optional[str] = ..., window: _Optional[int] = ...) -> None: ...

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
