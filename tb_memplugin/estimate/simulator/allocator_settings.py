"""Settings of PyTorch's caching allocator: what `PYTORCH_CUDA_ALLOC_CONF` says, and how sizes follow.

Keys, limits and rounding: c10/core/AllocatorConfig.{h,cpp} of PyTorch 2.13, and round_size and
get_allocation_size in c10/cuda/CUDACachingAllocator.cpp. All sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.simulator.conf_text import conf_values, refused
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Int64

MIB = 1 << 20
UNLIMITED = 1 << 62
"""What stands for no limit in `max_split_bytes`."""

SMALLEST_BLOCK = 512
"""Blocks are multiples of this (kMinBlockSize)."""

LARGEST_SMALL = MIB
"""Requests up to it, rounded, come from the small pool (kSmallSize)."""

SMALL_SEGMENT = 2 * MIB
"""A segment of the small pool, and a page of one that expands (kSmallBuffer)."""

OWN_SEGMENT = 10 * MIB
"""From here on a request gets a segment of its own size (kMinLargeAlloc)..."""

SEGMENT_STEP = 2 * MIB
"""...rounded up to a multiple of this (kRoundLarge)."""

CONF_KEYS = {
    "large_segment_size_mb": "large_segment_bytes",
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_rounding_bytes",
    "garbage_collection_threshold": "gc_threshold",
    "per_process_memory_fraction": "memory_fraction",
}
"""Keys whose values are numbers, and their fields."""

FIRST_INTERVAL = 20
"""The power of two at which the first of 16 intervals begins that divisions are told for: 1 MiB."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """How one allocator behaves. The defaults are PyTorch's.

    Attributes:
        expandable_segments: segments grow in pages instead of being made one by one.
        max_split_bytes: larger blocks are neither split nor given to smaller requests.
        max_rounding_bytes: how much larger a block may be than a request beyond `max_split_bytes`.
        divisions: into how many steps sizes between two powers of two are rounded; 16 intervals, 0 for none.
        gc_threshold: the share of the allowed memory beyond which unused segments go back; 0 for never.
        memory_fraction: the share of the device that may be reserved; None where no limit was set.
        large_segment_bytes: the segment for requests that are large, but too small for one of their own.
    """

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    max_rounding_bytes: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * 16
    gc_threshold: float = 0.0
    memory_fraction: float | None = None
    large_segment_bytes: int = 20 * MIB

    @classmethod
    def from_conf(cls, conf: str) -> AllocatorSettings:
        """The settings in a text such as `expandable_segments:True,max_split_size_mb:128`.

        Keys that do not bear on where memory lies (`pinned_…`) are checked for their form and dropped.

        Raises:
            MemPluginError: PyTorch would refuse it, it names an unknown key, or another backend.
        """
        values = conf_values(conf)
        settings = cls(**{name: value for name, value in values.items() if name in cls.__slots__})
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
        """The text that gives these settings, without what is PyTorch's default."""
        usual, parts = AllocatorSettings(), []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        for key, name in CONF_KEYS.items():
            value = getattr(self, name)
            if value != getattr(usual, name):
                parts.append(f"{key}:{value // MIB if key.endswith('_mb') else value}")
        if self.divisions != usual.divisions:
            told = ",".join(f"{1 << place}:{count}" for place, count in enumerate(self.divisions))
            parts.append(f"roundup_power2_divisions:[{told}]")
        return ",".join(parts)

    def rounded(self, requested: int) -> int:
        """What the allocator sets aside for a request, bytes (round_size)."""
        if requested < SMALLEST_BLOCK:
            return SMALLEST_BLOCK
        divisions = self.divisions[min(max(requested.bit_length() - 1 - FIRST_INTERVAL, 0), 15)]
        if divisions > 1 and requested > SMALLEST_BLOCK * divisions:
            power = 1 << (requested.bit_length() - 1)
            step = power >> (divisions.bit_length() - 1)
            return 2 * power if step == 0 and requested != power else -(-requested // step) * step
        return -(-requested // SMALLEST_BLOCK) * SMALLEST_BLOCK

    def rounded_all(self, requested: Int64) -> Int64:
        """`rounded` of many requests: int64, of the same shape."""
        units = np.maximum(-(-requested // SMALLEST_BLOCK), 1)
        plain: Int64 = units * SMALLEST_BLOCK
        if max(self.divisions) <= 1:
            return plain
        sizes, place = np.unique(requested, return_inverse=True)
        rounded = np.array([self.rounded(size) for size in sizes.tolist()], np.int64)
        return rounded[place].reshape(requested.shape)

    def segment_size(self, rounded: int) -> int:
        """The size of a new segment for a request of a rounded size (get_allocation_size)."""
        if rounded <= LARGEST_SMALL:
            return SMALL_SEGMENT
        if rounded < OWN_SEGMENT:
            return self.large_segment_bytes
        return -(-rounded // SEGMENT_STEP) * SEGMENT_STEP

    def page(self, small: bool) -> int:
        """The page in which a segment that expands is mapped, bytes."""
        return SMALL_SEGMENT if small else self.large_segment_bytes


def recorded_settings(trace: MemoryTrace) -> AllocatorSettings:
    """The settings under which a trace was recorded, as far as it tells them; else PyTorch's defaults.

    Where the text is absent, single settings that PyTorch wrote down are used, and segments that were
    mapped tell that they expand.

    Raises:
        MemPluginError: the trace's own text is none that PyTorch takes.
    """
    told = trace.properties
    conf = told.get("PYTORCH_CUDA_ALLOC_CONF") or told.get("PYTORCH_ALLOC_CONF")
    if conf:
        try:
            return AllocatorSettings.from_conf(conf)
        except MemPluginError as error:
            raise MemPluginError(
                f"The recorded allocator settings cannot be simulated: {error.what}",
                where=trace.source,
                fix="Give the settings to use with --alloc-conf.",
            ) from error
    split, threshold = told.get("max_split_size", ""), told.get("garbage_collection_threshold", "")
    mapped = bool((trace.events.kind == Kind.SEGMENT_MAP).any() or trace.segments.expandable.any())
    return AllocatorSettings(
        expandable_segments=told.get("expandable_segments", str(mapped)) == "True",
        max_split_bytes=int(split) if split.isdecimal() and int(split) else UNLIMITED,
        gc_threshold=float(threshold) if threshold.replace(".", "", 1).isdecimal() else 0.0,
    )
