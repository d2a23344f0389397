"""Notebooks: traces are shown as reports, results as tables, and `%%memory` measures a cell."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from tb_memplugin.analysis.comparison import DeviceComparison
from tb_memplugin.analysis.divisions import By, informative
from tb_memplugin.analysis.findings import Advice
from tb_memplugin.analysis.moments import Moment, peak
from tb_memplugin.analysis.units import size_text
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.formats import report_page
from tb_memplugin.exports.table_html import table_html
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import AnalysisResult

HEIGHT = 640
"""Pixels of a report in a notebook."""

MOST_EVENTS = 500_000
"""A longer recording is not shown as a report, which takes about four bytes of the notebook per event."""

SHOWN = 3


def load_ipython_extension(shell: Any) -> None:
    """Teach IPython the magic `%%memory`."""
    shell.register_magic_function(_measured_cell(shell), "cell", "memory")


def html_of(shown: AnalysisResult) -> str | None:
    """Return the HTML of a trace or result; None for one that is shown as its text.

    A trace is its report. A moment is its parts, and at the peak, where the report opens, that too.
    A table has a row for each result.
    """
    if isinstance(shown, MemoryTrace):
        return report_frame(shown)
    if isinstance(shown, Moment):
        return _moment(shown)
    if isinstance(shown, Advice):
        return table_html(shown.findings)
    if isinstance(shown, DeviceComparison):
        return _comparison(shown)
    return table_html(shown) if isinstance(shown, tuple) else None


def _moment(state: Moment) -> str:
    trace, where = (
        state.trace,
        f"after event {state.event:,}" if state.event >= 0 else "before the first event",
    )
    text = f"{state.device}: {size_text(state.bytes)} in step {state.step}, {where} ({state.phase.key})"
    divisions = informative(trace, trace.device_row(state.device))
    named: tuple[By, ...] = ("module", "line")
    by = [each for each in named if each in divisions][:1]
    tables = "".join(table_html(state.parts(each)) for each in ("category", *by))
    is_peak = peak(trace, state.device, largest=0).event == state.event
    return f"<p>{escape(text)}</p>{tables}{report_frame(trace) or '' if is_peak else ''}"


def _comparison(comparison: DeviceComparison) -> str:
    names = [name or "(none)" for name in (comparison.device, comparison.other_device)]
    sizes = [size_text(size) for size in (comparison.base_peak_bytes, comparison.other_peak_bytes)]
    text = f"{names[0]}: {sizes[0]} at the peak, then {names[1]}: {sizes[1]}"
    return f"<p>{escape(text)}</p>{table_html(comparison.rows)}"


def report_frame(trace: MemoryTrace) -> str | None:
    """Return an element of HTML with the trace's report, None if it is too long or cannot be drawn.

    The report is a page of its own, which may not reach anything outside it.
    """
    if not len(trace.events) or len(trace.events) > MOST_EVENTS:
        return None
    try:
        page = report_page(trace, trace.source)
    except MemPluginError:
        return None
    style = f"width:100%;height:{HEIGHT}px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'


def _measured_cell(shell: Any) -> Any:
    def memory(line: str, cell: str) -> MemoryTrace | None:
        """Run the cell and show its memory; `%%memory net` names the layers of the model in a variable."""
        from tb_memplugin.callbacks.measured import MeasuredMemory

        name = line.strip()
        if name and name not in shell.user_ns:
            raise MemPluginError("There is no such variable.", where=f"%%memory {name}", fix="Give a model.")
        with MeasuredMemory(shell.user_ns.get(name)) as used:
            shell.run_cell(cell)
        for device, size in used.peak_bytes_of().items():
            parts = used.parts("module" if name else "category", device)[:SHOWN]
            largest = ", ".join(f"{part.key or '(root)'} {size_text(part.bytes)}" for part in parts)
            sys.stdout.write(f"{device}: at most {size_text(size)} more than before; the peak: {largest}\n")
        return used.trace

    return memory
