"""The analyses: pure functions that take a trace and return a frozen result. Import them from here.

`trace` is any trace, `device` a row in `trace.devices`, and `event` an index into `trace.events`, where -1 is
the moment before the first; what else an argument may be stands with the function.

Example:
    >>> from tb_memplugin import load
    >>> from tb_memplugin.analysis import peak
    >>> peak(load("snapshot.pickle")).bytes
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tb_memplugin.analysis.advice_rules import Advice as Advice
    from tb_memplugin.analysis.advice_rules import advice as advice
    from tb_memplugin.analysis.allocations import Action as Action
    from tb_memplugin.analysis.allocations import Allocation as Allocation
    from tb_memplugin.analysis.allocations import Usage as Usage
    from tb_memplugin.analysis.allocations import read_allocation as read_allocation
    from tb_memplugin.analysis.allocations import usage as usage
    from tb_memplugin.analysis.allocator import Fragmentation as Fragmentation
    from tb_memplugin.analysis.allocator import Levels as Levels
    from tb_memplugin.analysis.allocator import PeakSplit as PeakSplit
    from tb_memplugin.analysis.allocator import PoolState as PoolState
    from tb_memplugin.analysis.allocator import fragmentation as fragmentation
    from tb_memplugin.analysis.allocator import levels as levels
    from tb_memplugin.analysis.allocator import peak_split as peak_split
    from tb_memplugin.analysis.allocator import pools as pools
    from tb_memplugin.analysis.allocator_state import DeviceState as DeviceState
    from tb_memplugin.analysis.allocator_state import device_state as device_state
    from tb_memplugin.analysis.annotations import AnnotationRange as AnnotationRange
    from tb_memplugin.analysis.annotations import Stage as Stage
    from tb_memplugin.analysis.annotations import annotation_ranges as annotation_ranges
    from tb_memplugin.analysis.annotations import stages as stages
    from tb_memplugin.analysis.comparison import Delta as Delta
    from tb_memplugin.analysis.comparison import DeviceComparison as DeviceComparison
    from tb_memplugin.analysis.comparison import compare as compare
    from tb_memplugin.analysis.curves import Curve as Curve
    from tb_memplugin.analysis.curves import curve as curve
    from tb_memplugin.analysis.curves import profile_over_time as profile_over_time
    from tb_memplugin.analysis.divisions import ALL_DIVISIONS as ALL_DIVISIONS
    from tb_memplugin.analysis.divisions import By as By
    from tb_memplugin.analysis.divisions import Part as Part
    from tb_memplugin.analysis.divisions import breakdown as breakdown
    from tb_memplugin.analysis.findings import Evidence as Evidence
    from tb_memplugin.analysis.findings import Finding as Finding
    from tb_memplugin.analysis.findings import Judgement as Judgement
    from tb_memplugin.analysis.findings import Where as Where
    from tb_memplugin.analysis.leak_sites import Leak as Leak
    from tb_memplugin.analysis.leak_sites import leaks as leaks
    from tb_memplugin.analysis.lines import LineRow as LineRow
    from tb_memplugin.analysis.lines import line_table as line_table
    from tb_memplugin.analysis.moments import LiveAllocation as LiveAllocation
    from tb_memplugin.analysis.moments import Moment as Moment
    from tb_memplugin.analysis.moments import events_between as events_between
    from tb_memplugin.analysis.moments import moment as moment
    from tb_memplugin.analysis.moments import peak as peak
    from tb_memplugin.analysis.oom import OomReport as OomReport
    from tb_memplugin.analysis.oom import oom_report as oom_report
    from tb_memplugin.analysis.reasons import why as why
    from tb_memplugin.analysis.rules import Rules as Rules
    from tb_memplugin.analysis.rules import read_rules as read_rules
    from tb_memplugin.analysis.segments import BlockState as BlockState
    from tb_memplugin.analysis.segments import SegmentState as SegmentState
    from tb_memplugin.analysis.segments import segments_at as segments_at
    from tb_memplugin.analysis.stacks import StackRow as StackRow
    from tb_memplugin.analysis.stacks import stack_table as stack_table
    from tb_memplugin.analysis.steps import StepStats as StepStats
    from tb_memplugin.analysis.steps import step_stats as step_stats

_NAMES = {
    "advice_rules": "Advice advice",
    "allocations": "Action Allocation Usage read_allocation usage",
    "allocator": "Fragmentation Levels PeakSplit PoolState fragmentation levels peak_split pools",
    "allocator_state": "DeviceState device_state",
    "annotations": "AnnotationRange Stage annotation_ranges stages",
    "comparison": "Delta DeviceComparison compare",
    "curves": "Curve curve profile_over_time",
    "divisions": "ALL_DIVISIONS By Part breakdown",
    "findings": "Evidence Finding Judgement Where",
    "leak_sites": "Leak leaks",
    "lines": "LineRow line_table",
    "moments": "LiveAllocation Moment events_between moment peak",
    "oom": "OomReport oom_report",
    "reasons": "why",
    "rules": "Rules read_rules",
    "segments": "BlockState SegmentState segments_at",
    "stacks": "StackRow stack_table",
    "steps": "StepStats step_stats",
}
"""The names in each file. It is imported on first use of one: a command needs a few of them."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)


def __dir__() -> list[str]:
    return [*_HOMES, *filter(lambda name: name.startswith("__"), globals())]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
