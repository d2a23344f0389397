"""Mosaic's Python interface on our analysis: `MemoryAbstract`, and the functions behind its commands.

The modules have Mosaic's names (`mosaic.cmd.entry_point`, `mosaic.libmosaic.analyzer...`); everything in them
can be imported from here as well. Mosaic examines only the first device of a snapshot; these functions take
the device with the highest peak, and include what was alive before the recording began.
docs/coming_from.md says which command replaces which.
"""

from tb_memplugin.coming_from.mosaic.cmd.entry_point import (
    get_json_snapshot,
    get_memory_profile,
    get_memory_usage,
    get_memory_usage_by_annotation_stage,
    get_memory_usage_diff,
    get_memory_usage_peak,
)
from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_abstract import MemoryAbstract
from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_snapshot import MemorySnapshot

__all__ = [
    "MemoryAbstract",
    "MemorySnapshot",
    "get_json_snapshot",
    "get_memory_profile",
    "get_memory_usage",
    "get_memory_usage_by_annotation_stage",
    "get_memory_usage_diff",
    "get_memory_usage_peak",
]
