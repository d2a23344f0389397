"""Ways to damage side files and event files behind their checksums, which are computed again."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import zstandard
from google.protobuf.message import DecodeError, Message

from tb_memplugin.proto import recording_pb2
from tb_memplugin.proto.recording_pb2 import Chunk, Footer, StepMetadata
from tb_memplugin.store.envelope import TAIL, TAIL_MAGIC, VERSION
from tb_memplugin.store.paths import STEPS_TAG
from tb_memplugin.store.records import record, records
from tests.mutations.damage import bytes_damaged

NUMBERS = (0, 1, -1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 62) - 1, (1 << 63) - 1, (1 << 64) - 1)

Damage = Callable[[bytes, Random], bytes]


def side_file_damaged(content: bytes, random: Random) -> bytes:
    """Other bytes, or another index or column under right checksums."""
    way = random.randrange(4)
    if way == 0:
        return bytes_damaged(content, random)
    length = TAIL.unpack(content[-TAIL.size :])[0]
    body, index = content[: -TAIL.size - length], content[-TAIL.size - length : -TAIL.size]
    if way == 1:
        return body + _ended(bytes_damaged(index, random))
    footer = Footer.FromString(index)
    if way == 2:
        message_damaged(footer, random)
        return body + _ended(footer.SerializeToString())
    chunks = [chunk for column in footer.columns for chunk in column.chunks if chunk.size] + [footer.names]
    chunk = random.choice(chunks)
    raw = zstandard.ZstdDecompressor().decompress(content[chunk.offset :][: chunk.size])
    return _with_chunk(body, chunk, bytes_damaged(raw, random), footer, random)


def _with_chunk(body: bytes, chunk: Chunk, raw: bytes, footer: Footer, random: Random) -> bytes:
    packed = zstandard.ZstdCompressor(level=1).compress(raw)
    chunk.offset, chunk.size, chunk.checksum = len(body), len(packed), zlib.crc32(packed)
    if random.random() < 0.5:
        chunk.raw_size = len(raw)
    return body + packed + _ended(footer.SerializeToString())


def _ended(index: bytes) -> bytes:
    return index + TAIL.pack(len(index), zlib.crc32(index), VERSION, TAIL_MAGIC)


def event_file_damaged(content: bytes, random: Random) -> bytes:
    """Other bytes, or other records under right checksums."""
    if random.random() < 0.25:
        return bytes_damaged(content, random)
    every = _events(content)
    way, row = random.randrange(4), random.randrange(len(every))
    if way == 0:
        every[row] = bytes_damaged(every[row], random)
    elif way == 1:
        random.shuffle(every)
    elif way == 2:
        every.insert(random.randrange(len(every)), every[row])
    else:
        every = [_blob_damaged(data, random) for data in every]
    return b"".join(map(record, every))


def descriptions_damaged(content: bytes, random: Random) -> bytes:
    """Other messages that describe steps, in records with right checksums."""
    return b"".join(record(_description_damaged(data, random)) for data in _events(content))


def _events(content: bytes) -> list[bytes]:
    return [
        data for data, _, _ in records(lambda offset, count: content[offset : offset + count], len(content))
    ]


def _description_damaged(data: bytes, random: Random) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event.FromString(data)
    for value in event.summary.value:
        described = value.metadata.plugin_data
        if described.content and random.random() < 0.5:
            described.content = bytes_damaged(described.content, random)
        elif described.content:
            message = StepMetadata.FromString(described.content)
            message_damaged(message, random)
            described.content = message.SerializeToString()
    return event.SerializeToString()


def _blob_damaged(data: bytes, random: Random) -> bytes:
    """Return an event of which what this package wrote says something else, also where it is compressed."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event.FromString(data)
    for value in event.summary.value:
        if not value.tensor.string_val:
            continue
        of_steps = value.tag == STEPS_TAG
        outer_kind = recording_pb2.StepRecord if of_steps else recording_pb2.StepBlob
        inner_kind = recording_pb2.StepFigures if of_steps else recording_pb2.StepSummary
        field = "figures" if of_steps else "summary"
        outer: Any = outer_kind.FromString(value.tensor.string_val[0])
        raw = zstandard.ZstdDecompressor().decompress(getattr(outer, field))
        inner: Any = inner_kind.FromString(raw)
        way = random.randrange(4)
        if way == 0:
            raw = bytes_damaged(raw, random)
        elif way == 1:
            message_damaged(outer, random)
        else:
            message_damaged(inner, random)
            raw = inner.SerializeToString()
            if not of_steps and way == 3:  # what describes the step in its tag says the same
                value.metadata.plugin_data.content = inner.metadata.SerializeToString()
        if way != 1:
            setattr(outer, field, zstandard.ZstdCompressor(level=1, write_checksum=True).compress(raw))
            outer.raw_size = len(raw)
        value.tensor.string_val[0] = outer.SerializeToString()
    return event.SerializeToString()


def message_damaged(message: Message, random: Random) -> None:
    """Change one to three fields anywhere in a message: other numbers or texts, rows removed or doubled."""
    for _ in range(random.randint(1, 3)):
        places = list(_fields(message))
        if places:
            with suppress(
                ValueError, TypeError, DecodeError, OverflowError
            ):  # a number out of the field's range
                _damage_field(*random.choice(places), random)


def _fields(message: Any) -> list[tuple[Any, Any, Any]]:
    """Return each field in a message and in those below it that has a value: message, field, value."""
    found = []
    for field, value in message.ListFields():
        found.append((message, field, value))
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            below = value if hasattr(value, "add") else [value]
            found += [place for one in below for place in _fields(one)]
    return found


def _damage_field(message: Any, field: Any, value: Any, random: Random) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value.clear()
    elif hasattr(value, "extend"):
        way, row = random.randrange(4), random.randrange(len(value))
        if way == 0:
            del value[row]
        elif way == 1 and field.message_type is None:
            value[row] = _other(value[row], random)
        elif way == 2:
            value.extend([value[row]])
        else:
            rows = [value[random.randrange(len(value))] for _ in value]
            del value[:]
            value.extend(rows)
    elif field.message_type is None:
        setattr(message, field.name, _other(value, random))
    elif random.random() < 0.3:
        message.ClearField(field.name)


def _other(value: Any, random: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return random.choice((*NUMBERS, value + 1, value - 1, value * 2, -value))
    if isinstance(value, bytes):
        return bytes_damaged(value, random)
    return value[: len(value) // 2] + random.choice(("", "é", "\0", "x" * 5000))
