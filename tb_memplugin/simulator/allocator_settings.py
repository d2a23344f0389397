"""Settings of PyTorch's caching allocator, from `PYTORCH_CUDA_ALLOC_CONF`, and the sizes that follow.

Sources of keys, limits and rounding: c10/core/AllocatorConfig.{h,cpp} of PyTorch 2.13, and round_size and
get_allocation_size in c10/cuda/CUDACachingAllocator.cpp. All sizes are bytes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.allocator import (
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
    new_segment_bytes,
    rounded_by_rule,
)
from tb_memplugin.trace.tables import Int64

WHERE = "allocator settings"
INTERVALS = 16
SMALLEST_MB, LARGEST_MB = 11, 1 << 42
"""Smaller numbers of MiB are refused; larger ones are replaced by the largest, which limits nothing."""

NOT_FOLLOWED = (
    "graph_capture_record_stream_reuse",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)
"""Known keys that are not simulated, and may change what is reserved, or when memory runs out."""

OF_THE_HOST = (
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
)
"""Known keys for host memory."""


def not_followed(conf: str) -> tuple[str, ...]:
    """Return a sentence for each setting in a text that has no effect here, with the reason."""
    keys = [part.partition(":")[0] for part in _parts("".join(conf.split()))]
    notes = [f"{key} is not simulated; it is ignored." for key in keys if key in NOT_FOLLOWED]
    notes += [
        f"{key} is a setting for host memory; it changes nothing here." for key in keys if key in OF_THE_HOST
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


def _mebibytes(key: str, value: str) -> int:
    if not _is_number(value) or int(value) < SMALLEST_MB:
        raise refused(key, value, f"a whole number of MiB, at least {SMALLEST_MB}")
    return min(int(value), LARGEST_MB) * MIB


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
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_rounding_bytes", _mebibytes),
    "garbage_collection_threshold": ("gc_threshold", _share),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "roundup_power2_divisions": ("divisions", _divisions),
}
"""Simulated keys: the field of `AllocatorSettings` that each sets, and the function that parses its value."""


MIB = 1 << 20
UNLIMITED = 1 << 62
"""The value of `max_split_bytes` that means no limit."""

OF_SETTINGS = frozenset(
    {
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "expandable_segments",
        "garbage_collection_threshold",
        "max_split_size",
    }
)
"""Properties of a snapshot that record its allocator's settings."""

FIRST_INTERVAL = 20
"""`divisions` has 16 intervals of sizes; the first begins at 2 to this power, 1 MiB."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings of one allocator. The defaults are PyTorch's.

    Attributes:
        expandable_segments: segments grow page by page, instead of each being allocated at once.
        max_split_bytes: larger blocks are neither split nor given to smaller requests.
        max_rounding_bytes: a block for a request of `max_split_bytes` or more is larger by less than this.
        divisions: into how many steps sizes between two powers of two are rounded; 16 intervals, 0 for none.
        gc_threshold: the share of the allowed memory above which unused segments are freed; 0 for never.
        memory_fraction: the share of the device that may be reserved; None where no limit was set.
        large_segment_bytes: the size of the segment for requests of the large pool below `SERVED_ALONE`.
    """

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    max_rounding_bytes: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * 16
    gc_threshold: float = 0.0
    memory_fraction: float | None = None
    large_segment_bytes: int = LARGE_SEGMENT

    @classmethod
    def from_conf(cls, conf: str) -> AllocatorSettings:
        """Parse a text such as `expandable_segments:True,max_split_size_mb:128`.

        White space is ignored, as in PyTorch. Keys that are not simulated, such as `pinned_…`, are checked
        for their form and dropped.

        Raises:
            MemPluginError: PyTorch would refuse the text, or it names an unknown key or another backend.
        """
        values: dict[str, Any] = {}
        for part in _parts("".join(conf.split())):
            key, colon, value = part.partition(":")
            if key not in (*READERS, *NOT_FOLLOWED, *OF_THE_HOST, "backend"):
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
        settings = cls(**values)
        least = settings.large_segment_bytes
        for key, name in (
            ("max_split_size_mb", "max_split_bytes"),
            ("max_non_split_rounding_mb", "max_rounding_bytes"),
        ):
            if values.get(name, least) < least:
                raise refused(
                    key, f"{values[name] // MIB}", f"at least large_segment_size_mb, {least // MIB}"
                )
        return settings

    @property
    def conf(self) -> str:
        """The text that `from_conf` parses into these settings; PyTorch's defaults are left out."""
        usual, parts = AllocatorSettings(), []
        for key, (name, _) in READERS.items():
            value = getattr(self, name)
            if value == getattr(usual, name):
                continue
            if name == "divisions":
                value = f"[{','.join(f'{1 << power}:{count}' for power, count in enumerate(value))}]"
            parts.append(f"{key}:{value // MIB if key.endswith('_mb') else value}")
        return ",".join(parts)

    def rounded(self, requested: int) -> int:
        """Return the size to which the allocator rounds a request, in bytes (round_size)."""
        if requested < SMALLEST_BLOCK:
            return SMALLEST_BLOCK
        divisions = self.divisions[min(max(requested.bit_length() - 1 - FIRST_INTERVAL, 0), 15)]
        if divisions > 1 and requested > SMALLEST_BLOCK * divisions:
            power = 1 << (requested.bit_length() - 1)
            step = power >> (divisions.bit_length() - 1)
            return 2 * power if step == 0 and requested != power else -(-requested // step) * step
        return -(-requested // SMALLEST_BLOCK) * SMALLEST_BLOCK

    def rounded_all(self, requested: Int64) -> Int64:
        """Apply `rounded` to many requests: int64, of the same shape."""
        if max(self.divisions) <= 1:
            return rounded_by_rule(requested)
        sizes, inverse = np.unique(requested, return_inverse=True)
        rounded = np.array([self.rounded(size) for size in sizes.tolist()], np.int64)
        return rounded[inverse].reshape(requested.shape)

    def segment_size(self, rounded: int) -> int:
        """Return the size of a new segment for a request of a rounded size (get_allocation_size)."""
        return new_segment_bytes(rounded, self.large_segment_bytes)

    def page(self, small: bool) -> int:
        """Return the size of the pages in which an expandable segment is mapped, in bytes."""
        return SMALL_SEGMENT if small else self.large_segment_bytes


def records_settings(trace: MemoryTrace) -> bool:
    """Return whether a trace contains its allocator's settings; snapshots of PyTorch 2.1 and older do not."""
    return not OF_SETTINGS.isdisjoint(trace.properties)


def recorded_settings(trace: MemoryTrace) -> AllocatorSettings:
    """Return the settings under which a trace was recorded; PyTorch's defaults where the trace lacks them.

    If the trace has no configuration text, the single settings that PyTorch recorded are used, and mapped
    segments show that segments are expandable.

    Raises:
        MemPluginError: the recorded text is not valid, or cannot be simulated.
    """
    properties = trace.properties
    conf = properties.get("PYTORCH_CUDA_ALLOC_CONF") or properties.get("PYTORCH_ALLOC_CONF")
    if conf:
        try:
            return AllocatorSettings.from_conf(conf)
        except MemPluginError as error:
            raise MemPluginError(
                f"The recorded allocator settings cannot be simulated: {error.what}",
                where=trace.source,
                fix="Give the settings to use with --alloc-conf.",
            ) from error
    split, threshold = (properties.get(key, "") for key in ("max_split_size", "garbage_collection_threshold"))
    mapped = bool((trace.events.kind == Kind.SEGMENT_MAP).any() or trace.segments.expandable.any())
    return AllocatorSettings(
        expandable_segments=properties.get("expandable_segments", str(mapped)) == "True",
        max_split_bytes=int(split) if split.isdecimal() and int(split) else UNLIMITED,
        gc_threshold=float(threshold) if threshold.replace(".", "", 1).isdecimal() else 0.0,
    )
