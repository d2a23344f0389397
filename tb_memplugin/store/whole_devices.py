"""Convert what fills whole devices to messages of a side file or a summary, and back."""

from __future__ import annotations

from tb_memplugin.proto import recording_pb2 as pb
from tb_memplugin.trace import DevicePart, MemoryTrace, Moment, WholeDevice
from tb_memplugin.trace.counters import code_of


def pack_whole(reading: WholeDevice) -> pb.WholeDevice:
    """Return the message of a device at a moment."""
    return pb.WholeDevice(
        device=reading.device,
        moment=reading.moment,
        read_at=reading.read_at,
        is_limit=reading.is_limit,
        parts=[part for part, _ in reading.parts],
        part_bytes=[size for _, size in reading.parts],
    )


def packed_whole(trace: MemoryTrace, device: int) -> list[pb.WholeDevice]:
    """Return the messages of one device of a trace."""
    return [pack_whole(reading) for reading in trace.whole_devices if reading.device == device]


def read_whole(stored: pb.WholeDevice) -> WholeDevice:
    """Return the device of a message.

    Raises:
        ValueError: the message is damaged.
    """
    parts = zip(stored.parts, stored.part_bytes, strict=True)
    return WholeDevice(
        stored.device,
        Moment(stored.moment),
        Moment(stored.read_at),
        tuple((code_of(DevicePart, part), size) for part, size in parts),
        stored.is_limit,
    )
