"""Event files: one event per captured step, with its summary and the scalars of the same step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_BLOB_SEQUENCE,
    DATA_CLASS_SCALAR,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING

from tb_memplugin.proto.recording_pb2 import StepMetadata
from tb_memplugin.store.paths import PLUGIN_NAME, readable
from tb_memplugin.store.records import record


def first_record() -> bytes:
    """Return the record at the start of an event file."""
    return record(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())


def step_record(metadata: StepMetadata, blob: bytes) -> bytes:
    """Return one captured step as a record: the blob under its own tag, and the peaks as scalars."""
    tag = f"memory/window-{metadata.window:06d}/step-{metadata.step}"
    step_value = blob_value(tag, metadata.SerializeToString(), blob, DATA_CLASS_BLOB_SEQUENCE)
    values = [step_value, *_scalars(metadata)]
    event = Event(wall_time=time.time(), step=metadata.step, summary=Summary(value=values))
    return record(event.SerializeToString())


def blobs_of(data: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the tag, serialized metadata and serialized blob of each value of this plugin in a record.

    Raises:
        google.protobuf.message.DecodeError: the data is not an event.
    """
    for value in Event.FromString(data).summary.value:
        if value.metadata.plugin_data.plugin_name == PLUGIN_NAME and value.tensor.string_val:
            yield value.tag, value.metadata.plugin_data.content, value.tensor.string_val[0]


def blob_value(tag: str, content: bytes, blob: bytes, data_class: Any) -> Summary.Value:
    """Return a value of this plugin: a serialized blob, and the serialized metadata of its tag."""
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content),
            data_class=data_class,
        ),
        tensor=TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[blob]),
    )


def _scalars(metadata: StepMetadata) -> Iterator[Summary.Value]:
    several = len(metadata.devices) > 1
    for device in metadata.devices:
        series = f"memory/{readable(device.device)}" if several else "memory"
        stats = device.stats
        yield scalar_value(
            f"{series}/peak_allocated", stats.peak_bytes, f"Highest live bytes on {device.device} in the step"
        )
        if stats.HasField("peak_reserved_bytes"):
            about = f"Highest bytes reserved by the allocator of {device.device} in the step"
            yield scalar_value(f"{series}/peak_reserved", stats.peak_reserved_bytes, about)


def scalar_value(tag: str, value: int, about: str) -> Summary.Value:
    """Return a point of a scalar series for TensorBoard's Scalars tab."""
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"),
            data_class=DATA_CLASS_SCALAR,
            summary_description=about,
        ),
        tensor=TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(), float_val=[float(value)]),
    )
