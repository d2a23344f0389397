"""The functions behind Mosaic's commands, by Mosaic's names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tb_memplugin import analysis
from tb_memplugin.analysis.divisions import By
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import html
from tb_memplugin.exports import json as trace_json
from tb_memplugin.exports.html import Division
from tb_memplugin.loading import load

PROFILES: Mapping[str, By] = {
    "annotations": "annotation",
    "categories": "category",
    "compile_context": "context",
}
CUSTOM = "custom"

_Path = str | os.PathLike[str]


def get_memory_profile(
    snapshot: _Path, out_path: _Path, profile: str = "categories", custom_profile: str | None = None
) -> None:
    """Write an HTML page of memory over time.

    Args:
        snapshot: any file that `tb_memplugin.load` reads.
        out_path: the HTML file to write.
        profile: "annotations", "categories", "compile_context" or "custom".
        custom_profile: with "custom": JSON of names and patterns, or the path of such a file.

    Raises:
        MemPluginError: there is no such profile, the rules are invalid, or a file cannot be read or written.
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
    html.write(load(snapshot), out_path, [division], Path(snapshot).name)


def get_json_snapshot(snapshot: _Path, output_file: _Path) -> None:
    """Write everything in a snapshot as JSON, in the form that docs/json_format.md describes."""
    trace_json.write(load(snapshot), output_file)


def get_memory_usage(snapshot: _Path, allocation: str, action: analysis.Action = "alloc") -> analysis.Usage:
    """Return the live bytes before and after a block was allocated or freed.

    Args:
        snapshot: any file that `tb_memplugin.load` reads.
        allocation: `ADDRESS` or `ADDRESS_VERSION`, in hexadecimal; the version counts from 0.
        action: "alloc" or "free".

    Raises:
        MemPluginError: `allocation` does not have this form, or there is no such block.
    """
    address, version = analysis.read_allocation(allocation)
    return analysis.usage(load(snapshot), address, version, action)


def get_memory_usage_peak(snapshot: _Path) -> analysis.Moment:
    """Return the moment with the most live bytes, on the device with the highest peak."""
    return analysis.peak(load(snapshot))


def get_memory_usage_diff(
    snapshot_base: _Path, snapshot_diff: _Path
) -> tuple[analysis.DeviceComparison, ...]:
    """Compare the peaks of two snapshots by stack: what was added and removed, what grew and shrank."""
    return analysis.compare(load(snapshot_base), load(snapshot_diff), by="stack")


def get_memory_usage_by_annotation_stage(
    snapshot: _Path, annotation: Sequence[str] | None = None, paste: bool = False
) -> dict[str, tuple[str, int]]:
    """Return live bytes at the START and END of annotations, in time order: `{name}_{stage}`: (name, bytes).

    The device is the one with the highest peak among those that have such annotations. From the second time
    on a key ends with `(1)`, `(2)`, ...

    Args:
        snapshot: any file that `tb_memplugin.load` reads.
        annotation: names of the annotations to include; default: all.
        paste: also print the bytes, one per line, to paste into a table.

    Raises:
        NotRecordedError: no annotation has one of the names.
    """
    trace = load(snapshot)
    stages = analysis.stages(trace, annotation)
    device = max(
        {stage.device for stage in stages}, key=lambda name: analysis.peak(trace, name).bytes, default=""
    )
    by_key = {stage.key: (stage.name, stage.bytes) for stage in stages if stage.device == device}
    if paste:
        sys.stdout.write("".join(f"{size}\n" for _, size in by_key.values()))
    return by_key
