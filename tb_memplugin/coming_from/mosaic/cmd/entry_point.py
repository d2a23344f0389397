"""The functions behind Mosaic's commands, with Mosaic's names and parameters, in Mosaic's order.

Where Mosaic has no default, the default here is the one of its command, but for files that are written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tb_memplugin import analysis
from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.units import size_text
from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_abstract import MemoryAbstract
from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_snapshot import MemoryEvent, MemorySnapshot
from tb_memplugin.commands.tables import printable
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import html
from tb_memplugin.exports import snapshot as snapshot_export
from tb_memplugin.exports.html import Division, Plot
from tb_memplugin.loading import load

PROFILES: Mapping[str, By] = {
    "annotations": "annotation",
    "categories": "category",
    "compile_context": "context",
}
CUSTOM = "custom"

_Path = str | os.PathLike[str]


def get_memory_usage(
    snapshot: _Path,
    trace: str = "",  # noqa: ARG001  # Mosaic's signature
    allocation: str = "",
    action: str = "alloc",
    paste: bool = False,
    print_stack: bool = True,
) -> MemoryAbstract:
    """Find the live bytes after an event; print them, and the stacks of what is alive then.

    Args:
        snapshot: any file that `tb_memplugin.load` reads.
        trace: not used, as in Mosaic.
        allocation: `ADDRESS` or `ADDRESS_VERSION`, in hexadecimal; the version counts from 0.
        action: "alloc", "free", "free_completed", or "segment_" and alloc, free, map or unmap.
        paste: print the stacks, too; there is no pastebin.

    Returns:
        The snapshot; the bytes are in `memory_snapshot.memory_usage`.

    Raises:
        MemPluginError: `allocation` or `action` has another form.
        NotRecordedError: there is no such event.
    """
    abstract = _loaded(snapshot)
    content = abstract.memory_snapshot
    content.analyze_memory_snapshot("memory_usage", allocation, action)
    (size,) = content.memory_usage.values()
    _print_state(content, f"Live after {action} of {allocation}: {size_text(size)}", paste or print_stack)
    return abstract


def get_memory_usage_peak(
    snapshot: _Path,
    trace: str = "",  # noqa: ARG001  # Mosaic's signature
    allocation: str = "",
    action: str = "alloc",
    paste: bool = False,
    print_stack: bool = True,
    upload_result: bool = False,
    start_time: int | None = None,
    end_time: int | None = None,
) -> MemoryAbstract:
    """Find the peak of the device where it is highest; print it, and the stacks of what is alive then.

    Args:
        snapshot, trace, paste, print_stack: as in `get_memory_usage`.
        allocation, action: look up to this event; "" is the end of the recording.
        upload_result: must be False.
        start_time, end_time: look between these times, in microseconds as in the file.

    Returns:
        The snapshot; the peak is in `memory_snapshot.memory_peak`.

    Raises:
        MemPluginError: an argument has another form, or `upload_result` is set.
        NotRecordedError: there is no such event, or nothing between the times.
    """
    _refuse_upload(upload_result)
    abstract = _loaded(snapshot)
    content = abstract.memory_snapshot
    content.analyze_memory_snapshot(
        "memory_peak", allocation, action, start_time=start_time, end_time=end_time
    )
    parts = f"{size_text(content.static_memory)} from before the recording"
    heading = f"Peak of {content.device}: {size_text(content.memory_peak)}, of which {parts}"
    _print_state(content, heading, paste or print_stack)
    return abstract


def get_memory_usage_diff(
    snapshot_base: _Path,
    snapshot_diff: _Path,
    paste: bool = False,  # noqa: ARG001  # printed anyway
) -> dict[int, MemoryEvent]:
    """Return what the peak of a snapshot has more than that of another, by stack, largest first; print it.

    A stack that both have is in it with its growth, if it grew: the bytes and the calls that are more.
    """
    base, other = (_loaded(path).memory_snapshot for path in (snapshot_base, snapshot_diff))
    for content in (base, other):
        content.analyze_memory_snapshot()
    grown = {}
    for key, event in other.call_stack_hash_set.items():
        before = base.call_stack_hash_set.get(key)
        if before is None:
            grown[key] = event
        elif event.mem_size > before.mem_size:
            size, calls = event.mem_size - before.mem_size, event.num_call - before.num_call
            grown[key] = replace(event, mem_size=size, num_call=calls)
    grown = dict(sorted(grown.items(), key=lambda row: -row[1].mem_size))
    sys.stdout.write(_table(grown.values()) or "No stack has more.\n")
    return grown


def get_memory_usage_by_annotation_stage(
    snapshot: _Path,
    annotation: str | Iterable[str] = (),
    paste: bool = False,  # noqa: ARG001  # printed anyway
) -> dict[str, tuple[dict[str, Any], int]]:
    """Return live bytes at the START and END of annotations, and print them.

    See `MemorySnapshot.get_memory_usage_by_annotation_stage`.

    Args:
        annotation: a text in the names of the annotations, or several; default: all annotations.
    """
    texts = {annotation} if isinstance(annotation, str) else set(annotation)
    by_key = _loaded(snapshot).memory_snapshot.get_memory_usage_by_annotation_stage(texts)
    for key, (_, size) in by_key.items():
        sys.stdout.write(f"{printable(key)}: {size_text(size)} ({size:,} bytes)\n")
    return by_key


def get_memory_profile(
    snapshot: _Path,
    out_path: _Path,
    profile: str = "categories",
    custom_profile: str | None = None,
    sampling_rate: int = 1,
    start_idx: int = 0,
    end_idx: int = sys.maxsize,
    preserve_allocation_order: bool = False,
) -> MemoryAbstract:
    """Write an HTML page of memory over time, and print the peak.

    Args:
        profile: "annotations", "categories", "compile_context" or "custom".
        custom_profile: with "custom": JSON of names and patterns, or the path of such a file.
        sampling_rate: draw the level after every so many events, and at the peak.
        start_idx, end_idx: the first and the last event to draw, counted on the device with the highest peak.
        preserve_allocation_order: stack the parts in the order in which they first allocated.

    Returns:
        The snapshot; the peak is in `memory_snapshot.max_memory_usage`.

    Raises:
        MemPluginError: there is no such profile, the rules or numbers are invalid, or a file cannot be read
            or written.
    """
    if profile not in PROFILES and (profile != CUSTOM or not custom_profile):
        raise MemPluginError(
            f"There is no profile {profile!r}." if profile != CUSTOM else "A custom profile needs rules.",
            where="profile",
            fix=f'Give {", ".join(PROFILES)}, or custom and custom_profile=\'{{"name": "regex"}}\'.',
        )
    if profile in PROFILES:
        division = Division(PROFILES[profile], profile)
    else:
        division = Division(analysis.read_rules([custom_profile or ""]), "Rules")
    abstract = _loaded(snapshot)
    content = abstract.memory_snapshot
    content.analyze_memory_snapshot("alloc_history")
    first, last = _events_of(content, start_idx, end_idx)
    peak = content.max_memory_usage
    sizes = f"{size_text(peak.total_alloc)} allocated, {size_text(peak.total_reserved)} reserved"
    sys.stdout.write(f"Memory Usage At Peak: {sizes}\n")
    plot = Plot(first, last, sampling_rate, allocation_order=preserve_allocation_order)
    html.write(content.trace, out_path, [division], Path(snapshot).name, plot)
    return abstract


def get_json_snapshot(snapshot: _Path, output_file: _Path, upload_result: bool = False) -> None:
    """Write everything in a snapshot as JSON, in PyTorch's own structure; `upload_result` must be False."""
    _refuse_upload(upload_result)
    if output_file:
        snapshot_export.write_json(load(snapshot), output_file)


def _loaded(snapshot: _Path) -> MemoryAbstract:
    abstract = MemoryAbstract(snapshot)
    abstract.load_memory_snapshot()
    return abstract


def _refuse_upload(upload_result: bool) -> None:
    if upload_result:
        raise MemPluginError(
            "Nothing is uploaded.", where="upload_result", fix="Write a file, and upload that."
        )


def _events_of(content: MemorySnapshot, start: int, end: int) -> tuple[int, int]:
    """Return the range of the trace's events from one to another of the device's own, both included."""
    own = (content.trace.events.device == content.trace.device_row(content.device)).nonzero()[0]
    if not 0 <= start < max(len(own), 1):
        raise MemPluginError(
            f"{content.device} has no event {start}.",
            where="start_idx",
            fix=f"Its events are 0 to {len(own) - 1}.",
        )
    return int(own[start]) if start else 0, int(own[end]) if end + 1 < len(own) else sys.maxsize


def _print_state(content: MemorySnapshot, heading: str, stacks: bool) -> None:
    sys.stdout.write(f"{printable(heading)}\n")
    if stacks:
        sys.stdout.write(_table(content.call_stack_hash_set.values()))


def _table(stacks: Iterable[MemoryEvent]) -> str:
    """Return stacks as text: bytes, calls, and the frames, the outermost first."""
    lines = []
    for event in stacks:
        lines.append(f"\n{size_text(event.mem_size)} in {event.num_call:,} calls\n")
        for frame in reversed(event.call_stack):
            text = f"{frame['name']} {frame['filename']}:{frame['line']}"
            lines.append(f"  {printable(text)}\n")
    return "".join(lines)
