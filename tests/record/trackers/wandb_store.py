"""Read the file that W&B keeps of a run offline.

It is a log of LevelDB (doc/log_format.md there) after a header of seven bytes: blocks of 32 KiB with chunks,
each of a checksum (4 bytes), its length (2), its kind (1) and a record of protobuf, or a part of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tb_memplugin.extras import library

HEADER, BLOCK, CHUNK_HEADER = 7, 1 << 15, 7
WHOLE, LAST = 1, 4
"""The kinds of a chunk that ends a record; 2 begins one, 3 goes on."""


def records(path: Path) -> Iterator[Any]:
    """Yield the records, as W&B's own `Record`."""
    record_of = library("wandb.proto.wandb_internal_pb2", "wandb").Record.FromString
    content, offset, record = path.read_bytes(), HEADER, b""
    assert content.startswith(b":W&B")
    while offset + CHUNK_HEADER <= len(content):
        if BLOCK - offset % BLOCK < CHUNK_HEADER:
            offset += BLOCK - offset % BLOCK
            continue
        length, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
        offset += CHUNK_HEADER + length
        record += content[offset - length : offset]
        if kind in (WHOLE, LAST):
            yield record_of(record)
            record = b""
