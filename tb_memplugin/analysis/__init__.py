"""The analyses: pure functions that take a trace and return a frozen result. Import them from here.

Example:
    >>> from tb_memplugin import load
    >>> from tb_memplugin.analysis import peak
    >>> peak(load("snapshot.pickle")).bytes
"""

from tb_memplugin.analysis.advice import Advice, Evidence, Finding, Judgement, Where, advice
from tb_memplugin.analysis.allocator import (
    Fragmentation,
    Levels,
    PeakSplit,
    PoolState,
    levels,
    peak_split,
    pools,
)
from tb_memplugin.analysis.annotations import AnnotationRange, annotation_ranges
from tb_memplugin.analysis.breakdown import ALL_DIVISIONS, By, Part, breakdown
from tb_memplugin.analysis.compare import Delta, DeviceComparison, compare
from tb_memplugin.analysis.curve import Curve, curve
from tb_memplugin.analysis.device_state import DeviceState, device_state
from tb_memplugin.analysis.fragmentation import FragmentationCurve, fragmentation_curve
from tb_memplugin.analysis.leaks import Leak, leaks
from tb_memplugin.analysis.lines import LineRow, line_table
from tb_memplugin.analysis.moment import LiveAllocation, Moment, moment
from tb_memplugin.analysis.oom import OomReport, oom_report
from tb_memplugin.analysis.peak import peak
from tb_memplugin.analysis.profile import profile_over_time
from tb_memplugin.analysis.rules import Rules, read_rules
from tb_memplugin.analysis.segments import BlockState, SegmentState, segments_at
from tb_memplugin.analysis.stacks import StackNode, StackRow, stack_table, stack_tree
from tb_memplugin.analysis.stages import Stage, stages
from tb_memplugin.analysis.steps import StepStats, step_stats
from tb_memplugin.analysis.usage import Action, Allocation, Usage, read_allocation, usage
from tb_memplugin.analysis.why import why

# isort: split
# Imported after the module `fragmentation`, so that the name refers to the function.
from tb_memplugin.analysis.allocator import fragmentation

__all__ = [
    "ALL_DIVISIONS",
    "Action",
    "Advice",
    "Allocation",
    "AnnotationRange",
    "BlockState",
    "By",
    "Curve",
    "Delta",
    "DeviceComparison",
    "DeviceState",
    "Evidence",
    "Finding",
    "Fragmentation",
    "FragmentationCurve",
    "Judgement",
    "Leak",
    "Levels",
    "LineRow",
    "LiveAllocation",
    "Moment",
    "OomReport",
    "Part",
    "PeakSplit",
    "PoolState",
    "Rules",
    "SegmentState",
    "StackNode",
    "StackRow",
    "Stage",
    "StepStats",
    "Usage",
    "Where",
    "advice",
    "annotation_ranges",
    "breakdown",
    "compare",
    "curve",
    "device_state",
    "fragmentation",
    "fragmentation_curve",
    "leaks",
    "levels",
    "line_table",
    "moment",
    "oom_report",
    "peak",
    "peak_split",
    "pools",
    "profile_over_time",
    "read_allocation",
    "read_rules",
    "segments_at",
    "stack_table",
    "stack_tree",
    "stages",
    "step_stats",
    "usage",
    "why",
]
