"""Convert a summary to the bytes in an event file and back."""

from __future__ import annotations

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.metadata_pb2 import StepMetadata
from tb_memplugin.proto.summary_pb2 import StepBlob, StepSummary
from tb_memplugin.store.envelope import RERECORD, check_version, unpacked
from tb_memplugin.store.summary_check import check_figures, check_summary
from tb_memplugin.trace import Category

SCHEMA_VERSION = 1

MOST_SUMMARY_BYTES = 64 << 20
SUMMARY_OF_ANY_BLOB, SUMMARY_PER_BYTE = 4 << 20, 100
"""The largest decompressed size: at all, of a small blob, and per byte of the blob. More is an attack."""

FIRST_CATEGORIES = 12
"""How many categories the first version had."""

_SUBJECT = "A step's summary has"


def pack(summary: StepSummary) -> bytes:
    """Serialize and compress a summary."""
    raw = summary.SerializeToString()
    packed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(raw)
    return StepBlob(version=SCHEMA_VERSION, raw_size=len(raw), summary=packed).SerializeToString()


def read_summary(blob: bytes, where: str = "", described: StepMetadata | None = None) -> StepSummary:
    """Return the summary in a blob.

    Args:
        described: the metadata of the step's tag, whose figures are those of the summary; None: not known.

    Raises:
        UnreadableFileError: the blob is damaged, newer than this reader, or contradicts itself or its
            metadata.
    """
    try:
        outer = StepBlob.FromString(blob)
        check_version(_SUBJECT, outer.version, SCHEMA_VERSION, where)
        most = min(MOST_SUMMARY_BYTES, max(SUMMARY_OF_ANY_BLOB, SUMMARY_PER_BYTE * len(outer.summary)))
        summary = StepSummary.FromString(unpacked(outer.summary, outer.raw_size, most))
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
        UnreadableFileError: the metadata is damaged, contradicts itself or is newer than this reader. The
            error names `where`.
    """
    damaged = "The description of a step is damaged"
    try:
        metadata = StepMetadata.FromString(content)
        check_version(_SUBJECT, metadata.version, SCHEMA_VERSION, where)
        check_figures(metadata)
    except DecodeError as error:
        raise UnreadableFileError(f"{damaged}.", where=where, fix=RERECORD) from error
    except ValueError as error:
        raise UnreadableFileError(f"{damaged} ({error}).", where=where, fix=RERECORD) from error
    return metadata
