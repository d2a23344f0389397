"""Private names of the profilers: the events of torch.profiler, its windows, and the legacy profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tb_memplugin.record.torch_private.table import Absent, name, private

_NO_WINDOW = "the memory of a profile is not recorded, with a warning"

Event = Any
"""An event of torch.profiler's tree; its class is not typed upstream."""


def _field(path: str, purpose: str) -> Callable[[Any], Any]:
    """Return the function that gets a property, to save the attribute look-up at every event.

    pybind11 wraps some of these functions once more, for binding, which takes a third of a call.
    """
    value = private(f"torch._C._profiler.{path}", purpose, _NO_WINDOW)
    if isinstance(value, Absent):
        return value
    return getattr(value.fget, "__func__", value.fget)  # type: ignore[no-any-return]


event_children = _field("_ProfilerEvent.children", "the events inside an event")
event_name = _field("_ProfilerEvent.name", "an event's name")
event_start = _field("_ProfilerEvent.start_time_ns", "when an event began, epoch nanoseconds")
event_duration = _field("_ProfilerEvent.duration_time_ns", "how long an event took, 0 for an allocation")
event_thread = _field("_ProfilerEvent.start_tid", "the thread of an event")
event_fields = _field("_ProfilerEvent.extra_fields", "what only events of one kind have")
event_correlation = _field("_ProfilerEvent.correlation_id", "tells operators from Python functions")
allocation_address = _field("_ExtraFields_Allocation.ptr", "an allocation's address")
allocation_size = _field("_ExtraFields_Allocation.alloc_size", "its bytes, negative for a free")
allocated_after = _field("_ExtraFields_Allocation.total_allocated", "the allocator's counter after it")
reserved_after = _field("_ExtraFields_Allocation.total_reserved", "the allocator's reserve after it")
operator_sequence = _field("_ExtraFields_TorchOp.sequence_number", "the autograd node an operator made")

operator_inputs = _field("_ExtraFields_TorchOp.inputs", "the tensors that an operator received")
tensor_address = _field("_TensorMetadata.storage_data_ptr", "where an operator's tensor lies")
tensor_allocation = _field("_TensorMetadata.allocation_id", "tells allocations at one address apart")
tensor_dtype = _field("_TensorMetadata.dtype", "the tensor's dtype")
tensor_shape = _field("_TensorMetadata.sizes", "its shape")
tensor_strides = _field("_TensorMetadata.strides", "its strides")

TensorFields: Any = private(
    "torch._C._profiler._TensorMetadata", "tells tensors from other inputs of an operator", _NO_WINDOW
)
AllocationFields: Any = private(
    "torch._C._profiler._ExtraFields_Allocation", "tells allocations from other events", _NO_WINDOW
)
OperatorFields: Any = private(
    "torch._C._profiler._ExtraFields_TorchOp", "tells operators from other events", _NO_WINDOW
)
KinetoFields: Any = private(
    "torch._C._profiler._ExtraFields_Kineto",
    "tells ranges of a GPU's timeline from those of the program",
    "steps and optimizers on a GPU count twice",
    instead=type("NoKineto", (), {}),
)
CallFields: tuple[Any, ...] = tuple(
    private(
        f"torch._C._profiler._ExtraFields_{kind}",
        "tells Python functions from other events",
        "a profile with stacks has no stacks of allocations",
        instead=type(f"No{kind}", (), {}),
    )
    for kind in ("PyCall", "PyCCall")
)
CALLER, _ = (
    name(
        f"torch._C._profiler._ExtraFields_{kind}.caller",
        "the line at which a Python function called another",
        "call stacks have the first lines of functions",
    )
    for kind in ("PyCall", "PyCCall")
)
RecordScope: Any = private(
    "torch._C._profiler.RecordScope", "tells the user's ranges from operators", _NO_WINDOW
)

_HEARS_NOTHING = (
    "a window may begin before models are looked at, and kernels' buffers on the CPU are not seen"
)
WINDOW_STARTS = name(
    "torch.autograd.profiler._run_on_profiler_start", "torch calls it before each window", _HEARS_NOTHING
)
WINDOW_STOPS = name(
    "torch.autograd.profiler._run_on_profiler_stop", "torch calls it after each window", _HEARS_NOTHING
)

_FAILS = "a program that starts its own profiler in a window of ours gets torch's error"
PREPARES = name("torch.autograd.profiler._prepare_profiler", "what a profile calls to get ready", _FAILS)
ENABLES = name("torch.autograd.profiler._enable_profiler", "what a profile calls to begin", _FAILS)

_NO_BUFFERS = "MemoryTracer does not see what kernels allocate on the CPU, which a note says"
profiler_enabled: Callable[[], bool] | None = private(
    "torch._C._autograd._profiler_enabled",
    "whether a profiler records on this thread",
    _NO_BUFFERS,
    instead=None,
)
profiler_type: Callable[[], Any] | None = private(
    "torch._C._autograd._profiler_type", "which profiler records on this thread", _NO_BUFFERS, instead=None
)
enable_legacy: Callable[[Any], None] | None = private(
    "torch._C._autograd._enable_profiler_legacy",
    "starts the profiler that reports the CPU allocator's events for one operator",
    _NO_BUFFERS,
    instead=None,
)
disable_legacy: Callable[[], list[list[Any]]] | None = private(
    "torch._C._autograd._disable_profiler_legacy",
    "ends it, and returns its reports",
    _NO_BUFFERS,
    instead=None,
)
record_operators: Callable[[bool], None] | None = private(
    "torch._C._autograd._enable_record_function",
    "whether operators of this thread are told to profilers",
    f"{_NO_BUFFERS}; looking at sparse tensors adds operators to the user's profile",
    instead=None,
)
ProfilerConfig: Any = private(
    "torch._C._profiler.ProfilerConfig", "the legacy profiler's settings", _NO_BUFFERS, instead=None
)
ProfilerState: Any = private(
    "torch._C._profiler.ProfilerState", "one of these settings", _NO_BUFFERS, instead=None
)
ExperimentalConfig: Any = private(
    "torch._C._profiler._ExperimentalConfig", "one of these settings", _NO_BUFFERS, instead=None
)
ActiveProfilerType: Any = private(
    "torch._C._profiler.ActiveProfilerType",
    "tells the legacy profiler from others",
    _NO_BUFFERS,
    instead=None,
)


def adjusts_timestamps(config: Any) -> bool:
    """Whether the settings of a profile move the times of its events. Only their pickled state tells it."""
    if ExperimentalConfig is None or not isinstance(config, ExperimentalConfig):
        return False
    try:
        adjusting = ExperimentalConfig(adjust_timestamps=True)
    except TypeError:  # a torch that cannot
        return False
    states = (each.__getstate__() for each in (config, adjusting, ExperimentalConfig()))
    return any(own == moved != still for own, moved, still in zip(*states, strict=True))
