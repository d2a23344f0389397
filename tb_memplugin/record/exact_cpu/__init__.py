"""Count every block of torch's CPU allocator in the running process, exactly, on all threads."""

from tb_memplugin.record.exact_cpu.counting import (
    CALL,
    CountedCalls,
    CountedWindow,
    Figures,
    begin_window,
    figures,
    is_counting,
    start_counting,
)

__all__ = [
    "CALL",
    "CountedCalls",
    "CountedWindow",
    "Figures",
    "begin_window",
    "figures",
    "is_counting",
    "start_counting",
]
