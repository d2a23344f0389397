"""Convert a summary to the bytes in an event file and back. Summaries that are too large are folded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.metadata_pb2 import StepMetadata
from tb_memplugin.proto.summary_pb2 import StepBlob, StepSummary
from tb_memplugin.store.envelope import RERECORD, check_version
from tb_memplugin.store.fold import fold
from tb_memplugin.store.summary import SCHEMA_VERSION, Limits
from tb_memplugin.store.summary_check import check_summary
from tb_memplugin.trace import Category

MOST_BLOB_BYTES = 100_000
"""The largest size of a step in an event file: TensorBoard keeps all steps in memory."""

MOST_SUMMARY_BYTES = 64 << 20
SUMMARY_OF_ANY_BLOB, SUMMARY_PER_BYTE = 4 << 20, 100
"""The largest decompressed size: at all, of a small blob, and per byte of the blob. More is an attack."""

FIRST_CATEGORIES = 12
"""How many categories the first version had."""

_SUBJECT = "A step's summary has"

LEVELS = (
    Limits(),
    Limits(calls=100, parts=300, modules=1000, text=300),
    Limits(largest=15, calls=50, parts=100, modules=250, text=150),
    Limits(largest=5, calls=20, parts=20, modules=40, text=60),
)
"""Limits that are tried in order until a summary is small enough; the last are used in any case."""


def pack(summarize: Callable[[Limits], StepSummary], most: int = MOST_BLOB_BYTES) -> bytes:
    """Serialize and compress a summary, folded as little as the size limit allows.

    Args:
        summarize: returns the summary with at most as many largest allocations and calls as the limits say.
        most: the size limit of the blob in bytes. The tightest limits are used even if they exceed it.
    """
    blob = b""
    for limits in LEVELS:
        summary = summarize(limits)
        if limits is not LEVELS[0]:
            fold(summary, limits)
        raw = summary.SerializeToString()
        packed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(raw)
        blob = StepBlob(version=SCHEMA_VERSION, raw_size=len(raw), summary=packed).SerializeToString()
        if len(blob) <= most:
            break
    return blob


def read_summary(blob: bytes, where: str = "", described: StepMetadata | None = None) -> StepSummary:
    """Return the summary in a blob.

    Args:
        blob: the blob.
        where: what errors name.
        described: the metadata of the step's tag, whose figures are those of the summary; None: not known.

    Raises:
        UnreadableFileError: the blob is damaged, newer than this reader, or contradicts itself or its
            metadata.
    """
    try:
        outer = StepBlob.FromString(blob)
        check_version(_SUBJECT, outer.version, SCHEMA_VERSION, where)
        most = max(SUMMARY_OF_ANY_BLOB, SUMMARY_PER_BYTE * len(outer.summary))
        if outer.raw_size > min(MOST_SUMMARY_BYTES, most):
            raise UnreadableFileError(
                "A step's summary claims an impossible size.", where=where, fix=RERECORD
            )
        if zstandard.get_frame_parameters(outer.summary).content_size != outer.raw_size:
            raise UnreadableFileError(
                "A step's summary is damaged: its size is wrong.", where=where, fix=RERECORD
            )
        raw = zstandard.ZstdDecompressor().decompress(outer.summary, max_output_size=outer.raw_size)
        summary = StepSummary.FromString(raw)
        _widen(summary)
        check_summary(summary)
        if described is not None and summary.metadata != described:
            raise ValueError("its figures are not those of its description")
        return summary
    except (DecodeError, zstandard.ZstdError) as error:
        raise UnreadableFileError("A step's summary is damaged.", where=where, fix=RERECORD) from error
    except ValueError as error:
        message = f"A step's summary is damaged ({error})."
        raise UnreadableFileError(message, where=where, fix=RERECORD) from error


def _widen(summary: StepSummary) -> None:
    """Add the columns of later categories to the modules' bytes by category, in place."""
    for device in summary.devices:
        table = device.modules
        rows = len(table.modules)
        width, rest = divmod(len(table.own), rows or 1)
        if rest == 0 and FIRST_CATEGORIES <= width < len(Category):
            own = np.array(table.own, np.int64).reshape(rows, width)
            table.own[:] = np.pad(own, ((0, 0), (0, len(Category) - width))).ravel().tolist()


def read_metadata(content: bytes, where: str = "") -> StepMetadata:
    """Return the metadata that is stored with a step's tag.

    Raises:
        UnreadableFileError: the metadata is damaged or newer than this reader. The error names `where`.
    """
    try:
        metadata = StepMetadata.FromString(content)
    except DecodeError as error:
        raise UnreadableFileError(
            "The description of a step is damaged.", where=where, fix=RERECORD
        ) from error
    check_version(_SUBJECT, metadata.version, SCHEMA_VERSION, where)
    return metadata
