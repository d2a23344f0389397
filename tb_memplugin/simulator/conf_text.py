"""Parse the text of `PYTORCH_CUDA_ALLOC_CONF` as PyTorch 2.13 does (c10/core/AllocatorConfig.cpp)."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from tb_memplugin.errors import MemPluginError

WHERE = "allocator settings"
MIB = 1 << 20
INTERVALS = 16
LARGEST_MB = 1 << 42
"""Larger numbers of MiB are replaced by this one, which limits nothing."""

NOT_SIMULATED = frozenset(
    {
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
"""Known keys that are not simulated: for host memory, locks, failures and graphs."""


NOT_FOLLOWED = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
"""Those of these keys that may change what is reserved, or when memory runs out."""

_OF_THE_HOST = frozenset(key for key in NOT_SIMULATED if key.startswith("pinned_"))


def not_followed(conf: str) -> tuple[str, ...]:
    """Return a sentence for each setting in a text that has no effect here, with the reason."""
    keys = [part.partition(":")[0] for part in _parts("".join(conf.split()))]
    notes = [f"{key} is not simulated; it is ignored." for key in keys if key in NOT_FOLLOWED]
    notes += [
        f"{key} is a setting for host memory; it changes nothing here." for key in keys if key in _OF_THE_HOST
    ]
    if "garbage_collection_threshold" in keys and "per_process_memory_fraction" not in keys:
        notes.append(
            "garbage_collection_threshold has no effect, in PyTorch and here, until the process is "
            "limited to a share of the device: by set_per_process_memory_fraction, or here by "
            "per_process_memory_fraction:1.0."
        )
    return tuple(notes)


def refused(key: str, value: str, wanted: str) -> MemPluginError:
    """Return the error for a value that PyTorch would refuse."""
    return MemPluginError(
        f"{key}:{value[:80]} is not a valid setting.",
        where=WHERE,
        fix=f"Write {key}:VALUE, where VALUE is {wanted}.",
    )


def conf_values(conf: str) -> dict[str, Any]:
    """Return the fields of `AllocatorSettings` that a text sets. White space is ignored, as in PyTorch.

    Raises:
        MemPluginError: PyTorch does not know a key or value, or the backend is not `native`.
    """
    values: dict[str, Any] = {}
    for part in _parts("".join(conf.split())):
        key, colon, value = part.partition(":")
        if key not in READERS and key not in NOT_SIMULATED:
            raise _unknown(key)
        if not colon or not value:
            raise refused(key, value, "not empty")
        if key in READERS:
            name, read = READERS[key]
            values[name] = read(key, value)
        elif key == "backend" and value != "native":
            raise MemPluginError(
                f"backend:{value[:80]} is a different allocator, which is not simulated.",
                where=WHERE,
                fix="Use backend:native, or leave it out.",
            )
    return values


def _unknown(key: str) -> MemPluginError:
    near = difflib.get_close_matches(key, READERS, 1)
    fix = f"Did you mean {near[0]}? " if near else ""
    fix += f"Simulated settings: {', '.join(sorted(READERS))}."
    if "=" in key:
        fix = "Write key:value with a colon, without the name of the variable: max_split_size_mb:128."
    return MemPluginError(f"{key[:80]!r} is not an allocator setting.", where=WHERE, fix=fix)


def _parts(text: str) -> list[str]:
    """Split a text into `key:value` pairs at commas outside brackets. A comma at the end is allowed.

    Raises:
        MemPluginError: a bracket is not closed.
    """
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth:
        raise MemPluginError("A bracket is not closed.", where=WHERE, fix="Write [SIZE:DIVISIONS,…].")
    if not parts[-1]:
        parts.pop()
    return parts


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise refused(key, value, "True or False, in this spelling")
    return value == "True"


def _mebibytes(least: int) -> Callable[[str, str], int]:
    def read(key: str, value: str) -> int:
        if not _is_number(value) or int(value) < least:
            raise refused(key, value, f"a whole number of MiB, at least {least}")
        return min(int(value), LARGEST_MB) * MIB

    return read


def _share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= (1.0 if key == "per_process_memory_fraction" else 0.999999999):
        raise refused(key, value, "a number between 0 and 1")
    return share


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Parse one number for all sizes, or `[256:1,512:2,>:4]`: the start of an interval in MiB, and divisions.

    The divisions of the first interval also apply to all smaller sizes, those of `>` to all larger ones.
    """
    if not value.startswith("["):
        if not _is_power_of_two(value):
            raise refused(key, value, "a power of two")
        return (int(value),) * INTERVALS
    divisions = [0] * INTERVALS
    last, is_first = 0, True
    for pair in value[1:-1].split(","):
        size, _, count = pair.partition(":")
        if not (_is_power_of_two(count) or count == "0") or not (size == ">" or _is_power_of_two(size)):
            raise refused(key, value, "[SIZE:DIVISIONS,…], both powers of two; SIZE in MiB or >")
        if size == ">":
            divisions[last:] = [int(count)] * (INTERVALS - last)
            continue
        last = min(int(size).bit_length() - 1, INTERVALS - 1)
        if is_first:
            divisions[:last] = [int(count)] * last
            is_first = False
        divisions[last] = int(count)
    return tuple(divisions)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18


def _is_power_of_two(text: str) -> bool:
    return _is_number(text) and int(text) > 0 and int(text) & (int(text) - 1) == 0


READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "garbage_collection_threshold": ("gc_threshold", _share),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes(11)),
    "max_non_split_rounding_mb": ("max_rounding_bytes", _mebibytes(11)),
    "max_split_size_mb": ("max_split_bytes", _mebibytes(11)),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "roundup_power2_divisions": ("divisions", _divisions),
}
"""Simulated keys: the field that each sets, and the function that parses its value."""
