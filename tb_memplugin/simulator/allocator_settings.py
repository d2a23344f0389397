"""Settings of PyTorch's caching allocator, from `PYTORCH_CUDA_ALLOC_CONF`, and the sizes that follow.

Sources of keys, limits and rounding: c10/core/AllocatorConfig.{h,cpp} of PyTorch 2.13, and round_size and
get_allocation_size in c10/cuda/CUDACachingAllocator.cpp. All sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator.conf_text import conf_values, refused
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Int64

MIB = 1 << 20
UNLIMITED = 1 << 62
"""The value of `max_split_bytes` that means no limit."""

SMALLEST_BLOCK = 512
"""Block sizes are multiples of this (kMinBlockSize)."""

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

LARGEST_SMALL = MIB
"""Requests whose rounded size is at most this come from the small pool (kSmallSize)."""

SMALL_SEGMENT = 2 * MIB
"""The size of a segment of the small pool, and of a page of its expandable segments (kSmallBuffer)."""

OWN_SEGMENT = 10 * MIB
"""Requests of at least this size get a segment of their own size (kMinLargeAlloc)."""

SEGMENT_STEP = 2 * MIB
"""The size of such a segment is rounded up to a multiple of this (kRoundLarge)."""

CONF_KEYS = {
    "large_segment_size_mb": "large_segment_bytes",
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_rounding_bytes",
    "garbage_collection_threshold": "gc_threshold",
    "per_process_memory_fraction": "memory_fraction",
}
"""Keys with numbers as values, and the fields of `AllocatorSettings` that they set."""

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
        large_segment_bytes: the size of the segment for requests of the large pool below `OWN_SEGMENT`.
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
        """Parse a text such as `expandable_segments:True,max_split_size_mb:128`.

        Keys that are not simulated, such as `pinned_…`, are checked for their form and dropped.

        Raises:
            MemPluginError: PyTorch would refuse the text, or it names an unknown key or another backend.
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
        """The text that `from_conf` parses into these settings; PyTorch's defaults are left out."""
        usual, parts = AllocatorSettings(), []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        for key, name in CONF_KEYS.items():
            value = getattr(self, name)
            if value != getattr(usual, name):
                parts.append(f"{key}:{value // MIB if key.endswith('_mb') else value}")
        if self.divisions != usual.divisions:
            divisions = ",".join(f"{1 << power}:{count}" for power, count in enumerate(self.divisions))
            parts.append(f"roundup_power2_divisions:[{divisions}]")
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
        units = np.maximum(-(-requested // SMALLEST_BLOCK), 1)
        plain: Int64 = units * SMALLEST_BLOCK
        if max(self.divisions) <= 1:
            return plain
        sizes, inverse = np.unique(requested, return_inverse=True)
        rounded = np.array([self.rounded(size) for size in sizes.tolist()], np.int64)
        return rounded[inverse].reshape(requested.shape)

    def segment_size(self, rounded: int) -> int:
        """Return the size of a new segment for a request of a rounded size (get_allocation_size)."""
        if rounded <= LARGEST_SMALL:
            return SMALL_SEGMENT
        if rounded < OWN_SEGMENT:
            return self.large_segment_bytes
        return -(-rounded // SEGMENT_STEP) * SEGMENT_STEP

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
    split, threshold = (
        properties.get("max_split_size", ""),
        properties.get("garbage_collection_threshold", ""),
    )
    mapped = bool((trace.events.kind == Kind.SEGMENT_MAP).any() or trace.segments.expandable.any())
    return AllocatorSettings(
        expandable_segments=properties.get("expandable_segments", str(mapped)) == "True",
        max_split_bytes=int(split) if split.isdecimal() and int(split) else UNLIMITED,
        gc_threshold=float(threshold) if threshold.replace(".", "", 1).isdecimal() else 0.0,
    )
