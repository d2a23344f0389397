"""A summary as the bytes in an event file, and back; what would be too large is folded first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.metadata_pb2 import StepMetadata
from tb_memplugin.proto.summary_pb2 import ModuleTable, Note, Parts, StepBlob, StepSummary
from tb_memplugin.store.envelope import RERECORD, UPGRADE
from tb_memplugin.store.summary import SCHEMA_VERSION, Limits
from tb_memplugin.trace import Category
from tb_memplugin.trace.tables import OUTSIDE

MOST_BLOB_BYTES = 100_000
"""What a step may take in an event file: TensorBoard keeps all of them in memory."""

MOST_SUMMARY_BYTES = 64 << 20
"""After decompression. A blob that claims more is damage or an attack."""

LEVELS = (
    Limits(),
    Limits(calls=100, parts=300, modules=1000, text=300),
    Limits(largest=15, calls=50, parts=100, modules=250, text=150),
    Limits(largest=5, calls=20, parts=20, modules=40, text=60),
)
"""Tried in order until a summary is small enough."""


def pack(summarise: Callable[[Limits], StepSummary], most: int = MOST_BLOB_BYTES) -> bytes:
    """The blob of a summary, folded as little as its size allows.

    Args:
        summarise: makes the summary within limits of its largest allocations and calls.
        most: bytes that the blob may have.
    """
    blob = b""
    for limits in LEVELS:
        summary = summarise(limits)
        if limits is not LEVELS[0]:
            fold(summary, limits)
        raw = summary.SerializeToString()
        packed = zstandard.ZstdCompressor(level=1).compress(raw)
        blob = StepBlob(version=SCHEMA_VERSION, raw_size=len(raw), summary=packed).SerializeToString()
        if len(blob) <= most:
            break
    return blob


def read_summary(blob: bytes, where: str = "") -> StepSummary:
    """The summary in a blob.

    Raises:
        UnreadableFileError: damaged, or newer than this reader; it names `where`.
    """
    try:
        outer = StepBlob.FromString(blob)
        _check_version(outer.version, where)
        if outer.raw_size > MOST_SUMMARY_BYTES:
            raise UnreadableFileError("A step's summary claims to be too large.", where=where, fix=RERECORD)
        if zstandard.get_frame_parameters(outer.summary).content_size != outer.raw_size:
            raise UnreadableFileError("A step's summary is damaged: its size is wrong.", where=where, fix=RERECORD)
        raw = zstandard.ZstdDecompressor().decompress(outer.summary, max_output_size=outer.raw_size)
        return StepSummary.FromString(raw)
    except (DecodeError, zstandard.ZstdError) as error:
        raise UnreadableFileError("A step's summary is damaged.", where=where, fix=RERECORD) from error


def read_metadata(content: bytes, where: str = "") -> StepMetadata:
    """What a step's tag carries.

    Raises:
        UnreadableFileError: damaged, or newer than this reader; it names `where`.
    """
    try:
        metadata = StepMetadata.FromString(content)
    except DecodeError as error:
        raise UnreadableFileError("The description of a step is damaged.", where=where, fix=RERECORD) from error
    _check_version(metadata.version, where)
    return metadata


def fold(summary: StepSummary, limits: Limits) -> None:
    """Cut names and merge small rows in place. Every sum stays what it was, and a note tells."""
    told = [f"names over {limits.text} characters are cut"]
    for device in summary.devices:
        for name in ("by_module", "by_operator"):
            rest = f"(other {name[3:]}s)"
            whole = getattr(device.peak, name)
            if limits.parts and len(whole.keys) > limits.parts:
                told.append(f"{device.name}: {limits.parts} of {len(whole.keys)} {name[3:]}s at the peak have a row")
                _fold_parts(whole, limits.parts, rest)
        rows = len(device.modules.modules)
        if limits.modules and rows > limits.modules:
            told.append(f"{device.name}: {limits.modules} of {rows} modules have a row, the others are in their parents'")
            _fold_modules(summary, device.modules, limits.modules)
    if limits.text:
        _cut_names(summary, limits.text)
    summary.folded = True
    text = "This summary is shortened, because the step has very many or very long names: " + "; ".join(told)
    summary.notes.append(Note(text=text + ". The side file has all of it."))


def cut(text: str, most: int) -> str:
    """A long name's beginning and a hash of the whole: still one name for one thing."""
    if len(text) <= most:
        return text
    return f"{text[: most - 10]}…{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _check_version(version: int, where: str) -> None:
    if version > SCHEMA_VERSION:
        raise UnreadableFileError(
            f"A step's summary has version {version}; this tb_memplugin reads up to {SCHEMA_VERSION}.",
            where=where,
            fix=UPGRADE,
        )


def _fold_parts(found: Parts, keep: int, rest: str) -> None:
    sizes, counts = list(found.bytes), list(found.counts)
    inner = np.array(found.categories, np.int64).reshape(-1, len(Category))
    keys = [*found.keys[:keep], rest]
    rows = sorted(
        range(keep + 1), key=lambda row: -(sizes[row] if row < keep else sum(sizes[keep:]))
    )
    merged = {
        "keys": keys,
        "bytes": [*sizes[:keep], sum(sizes[keep:])],
        "counts": [*counts[:keep], sum(counts[keep:])],
    }
    table = np.vstack((inner[:keep], inner[keep:].sum(axis=0))) if len(inner) else inner
    for name, values in merged.items():
        column = getattr(found, name)
        del column[:]
        column.extend(values[row] for row in rows)
    del found.categories[:]
    if len(table):
        found.categories.extend(table[rows].ravel().tolist())


def _fold_modules(summary: StepSummary, table: ModuleTable, keep: int) -> None:
    """Keep the rows that hold most; the bytes of the others go to the nearest ancestor that stays."""
    raise NotImplementedError


def _cut_names(summary: StepSummary, most: int) -> None:
    for names in (summary.modules.keys, summary.modules.class_names):
        names[:] = [cut(name, most) for name in names]
    for device in summary.devices:
        peak = device.peak
        for found in (peak.by_module, peak.by_operator):
            found.keys[:] = [cut(key, most) for key in found.keys]
        for owner in (peak, *peak.largest):
            for field in ("operator", "module", "name"):
                if field in owner.DESCRIPTOR.fields_by_name and owner.HasField(field):
                    setattr(owner, field, cut(getattr(owner, field), most))
