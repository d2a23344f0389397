"""What Mosaic's commands do, as functions of its names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tb_memplugin import analysis
from tb_memplugin.analysis.breakdown import By
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import html
from tb_memplugin.exports import json as trace_json
from tb_memplugin.exports.report_data import Division
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
    """Write a page of memory over time.

    Args:
        snapshot: any file that `tb_memplugin.load` reads.
        out_path: the HTML file.
        profile: "annotations", "categories", "compile_context" or "custom".
        custom_profile: with "custom": JSON of names and patterns, or the path of such a file.

    Raises:
        MemPluginError: no such profile, rules that are none, or a file that cannot be read or written.
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
    """Write all that a snapshot holds as JSON; docs/json_format.md tells its form."""
    trace_json.write(load(snapshot), output_file)


def get_memory_usage(snapshot: _Path, allocation: str, action: analysis.Action = "alloc") -> analysis.Usage:
    """How much was live before and after an allocation was made or given back.

    Args:
        snapshot: any file that `tb_memplugin.load` reads.
        allocation: `ADDRESS` or `ADDRESS_VERSION`, in hexadecimal; the version counts from 0.
        action: "alloc" or "free".

    Raises:
        MemPluginError: the text is no such thing, or there is no such block.
    """
    address, version = analysis.read_allocation(allocation)
    return analysis.usage(load(snapshot), address, version, action)


def get_memory_usage_peak(snapshot: _Path) -> analysis.Moment:
    """The moment with the most live bytes, on the device where they are most."""
    return analysis.peak(load(snapshot))


def get_memory_usage_diff(
    snapshot_base: _Path, snapshot_diff: _Path
) -> tuple[analysis.DeviceComparison, ...]:
    """What of the peak was added, removed, grown and shrunk from one snapshot to another, by stack."""
    return analysis.compare(load(snapshot_base), load(snapshot_diff), by="stack")


def get_memory_usage_by_annotation_stage(
    snapshot: _Path, annotation: Sequence[str] | None = None, paste: bool = False
) -> dict[str, tuple[str, int]]:
    """The live bytes at the START and END of annotations: `{name}_{stage}` -> (name, bytes), in time order.

    Of the device with the highest peak of those that have such annotations. From the second time on a key
    ends with `(1)`, `(2)`, ...

    Args:
        snapshot: any file that `tb_memplugin.load` reads.
        annotation: names that are wanted; default: all.
        paste: also print the bytes, one a line, to be pasted into a table.

    Raises:
        NotRecordedError: a name that no annotation has.
    """
    trace = load(snapshot)
    stages = analysis.stages(trace, annotation)
    device = max(
        {stage.device for stage in stages}, key=lambda one: analysis.peak(trace, one).bytes, default=""
    )
    found = {stage.key: (stage.name, stage.bytes) for stage in stages if stage.device == device}
    if paste:
        sys.stdout.write("".join(f"{size}\n" for _, size in found.values()))
    return found
