"""The analyses: pure functions that take a trace and return a frozen result. Import them from here.

Example:
    >>> from tb_memplugin import load
    >>> from tb_memplugin.analysis import peak
    >>> peak(load("snapshot.pickle")).bytes
"""

from tb_memplugin.analysis.advice_rules import Advice, Evidence, Finding, Judgement, Where, advice
from tb_memplugin.analysis.allocations import Action, Allocation, Usage, read_allocation, usage
from tb_memplugin.analysis.allocator import (
    Fragmentation,
    FragmentationCurve,
    Levels,
    PeakSplit,
    PoolState,
    fragmentation,
    fragmentation_curve,
    levels,
    peak_split,
    pools,
)
from tb_memplugin.analysis.allocator_state import DeviceState, device_state
from tb_memplugin.analysis.annotations import AnnotationRange, Stage, annotation_ranges, stages
from tb_memplugin.analysis.comparison import Delta, DeviceComparison, compare
from tb_memplugin.analysis.curves import Curve, curve, profile_over_time
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, By, Part, breakdown
from tb_memplugin.analysis.leak_sites import Leak, leaks
from tb_memplugin.analysis.lines import LineRow, line_table
from tb_memplugin.analysis.moments import LiveAllocation, Moment, events_between, moment, peak
from tb_memplugin.analysis.oom import OomReport, oom_report
from tb_memplugin.analysis.reasons import why
from tb_memplugin.analysis.rules import Rules, read_rules
from tb_memplugin.analysis.segments import BlockState, SegmentState, segments_at
from tb_memplugin.analysis.stacks import StackNode, StackRow, stack_table, stack_tree
from tb_memplugin.analysis.steps import StepStats, step_stats

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
    "events_between",
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
