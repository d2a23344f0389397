"""Notebooks: traces are shown as reports, results as tables, and `%%memory` measures a cell."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import Any

from tb_memplugin.analysis.advice_rules import Advice, heading
from tb_memplugin.analysis.comparison import DeviceComparison
from tb_memplugin.analysis.divisions import By, informative
from tb_memplugin.analysis.moments import Moment, peak
from tb_memplugin.analysis.units import Unit, size_text
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.html import report_page
from tb_memplugin.exports.terminal import printable
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import AnalysisResult, plain
from tb_memplugin.trace.tables import module_text

HEIGHT = 640
"""Pixels of a report in a notebook."""

MOST_EVENTS = 500_000
"""A longer recording is not shown as a report, which takes about four bytes of the notebook per event."""

SHOWN = 3


def load_ipython_extension(shell: Any) -> None:
    """Teach IPython the magic `%%memory`."""
    shell.register_magic_function(_measured_cell(shell), "cell", "memory")


def unload_ipython_extension(shell: Any) -> None:
    """Take the magic away again."""
    shell.magics_manager.magics["cell"].pop("memory", None)


def html_of(shown: AnalysisResult) -> str | None:
    """Return the HTML of a trace or result; None for one that is shown as its text.

    A trace is its report. A moment is its parts, and at the peak, where the report opens, that too. Advice is
    how many findings there are, and the findings.
    A table has a row for each result.
    """
    if isinstance(shown, MemoryTrace):
        return report_frame(shown)
    if isinstance(shown, Moment):
        return _moment(shown)
    if isinstance(shown, Advice):
        findings = table_html(shown.findings) if shown.findings else ""
        return f"<p>{escape(heading(shown))}</p>{findings}"
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
        page = report_page(trace, "Memory over time")
    except MemPluginError:
        return None
    style = f"width:100%;height:{HEIGHT}px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'


def _measured_cell(shell: Any) -> Any:
    from IPython.core.error import UsageError

    def memory(line: str, cell: str) -> MemoryTrace | None:
        """Run the cell and show its memory; `%%memory net` names the layers of a model, an expression."""
        try:
            result, trace = _measured(shell, line.strip(), cell)
        except (MemPluginError, TypeError) as error:
            # IPython shows this kind of error without a traceback.
            raise UsageError(f"%%memory: {error}") from None
        error_of_cell = result.error_before_exec or result.error_in_exec
        if error_of_cell is not None:
            _show_no_more(shell, error_of_cell)
            raise error_of_cell
        return trace

    return memory


def _show_no_more(shell: Any, error: BaseException) -> None:
    """Let an error that IPython has shown end the cell without being shown a second time."""
    show = shell.showtraceback

    def showtraceback(*args: Any, **kwargs: Any) -> None:
        shell.showtraceback = show
        if sys.exc_info()[1] is not error:
            show(*args, **kwargs)

    shell.showtraceback = showtraceback


def _measured(shell: Any, model: str, cell: str) -> tuple[Any, MemoryTrace | None]:
    """Run the cell, and print what it allocated; return IPython's result and what was recorded.

    Args:
        model: an expression of the notebook; "" for none.

    Raises:
        MemPluginError: the expression fails, or the cell cannot be measured.
        TypeError: the expression is no model.
    """
    from tb_memplugin.callbacks.measured import MeasuredMemory

    if _loop_runs() and shell.should_run_async(cell, transformed_cell=shell.transform_cell(cell)):
        raise MemPluginError(
            "A notebook cannot wait within a magic.",
            fix="Await in a cell of its own, or record the window with memory_trace_handler.",
        )
    with MeasuredMemory(_value(shell, model) if model else None) as used:
        result = shell.run_cell(cell)
    try:
        trace = used.trace
    except MemPluginError as error:  # the cell started a profiler; it has run, so this is no error of it
        sys.stdout.write(f"{error}\n")
        return result, None
    if trace is None and result.success:
        sys.stdout.write("The cell allocated no memory in torch.\n")
    for device, size in used.peak_bytes_of().items():
        parts = used.largest("module" if model else "category", device, SHOWN)
        largest = ", ".join(f"{module_text(part.key)} {size_text(part.bytes)}" for part in parts)
        at_peak = f"; the peak: {largest}" if parts else ""
        sys.stdout.write(f"{device}: at most {size_text(size)} more than before{at_peak}\n")
    return result, trace


def _value(shell: Any, expression: str) -> Any:
    try:
        return shell.ev(expression)
    except Exception as error:
        raise MemPluginError(
            f"{type(error).__name__}: {error}",
            where=expression,
            fix="Give a model, as in %%memory net or %%memory trainer.model.",
        ) from error


def _loop_runs() -> bool:
    """Whether an event loop runs in this thread, as in Jupyter; IPython cannot start a second one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


MOST_ROWS, MOST_CHARACTERS = 100, 120
"""How many rows of a table, and how many characters of a cell, are shown."""

# A notebook that is shown elsewhere drops style sheets, so each cell has its own style.
TEXT = "text-align:left;padding:1px 12px 1px 0"
NUMBER = "text-align:right;padding:1px 12px 1px 6px;font-variant-numeric:tabular-nums"
BAR = "background:linear-gradient(to right,rgba(70,130,180,.3) {share:.1f}%,transparent {share:.1f}%)"


def table_html(rows: Sequence[Any]) -> str:
    """Return results of one kind as a table, without what is empty in all, or a table itself.

    All text in it is escaped.
    """
    if not rows:
        return "<p>(nothing)</p>"
    names = [each.name for each in fields(rows[0]) if each.repr]
    values = {name: [getattr(row, name) for row in rows] for name in names}
    columns = [_column(name, column) for name, column in values.items() if any(map(_is_shown, column))]
    head = "".join(each[0] for each in columns)
    lines = ("".join(line) for line in zip(*(each[1:] for each in columns), strict=True))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = len(rows) - MOST_ROWS
    rest = f"<p>{more:,} more</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _column(name: str, values: Sequence[Any]) -> list[str]:
    """Return the cells of a column, its heading first."""
    title, shown = name.replace("_", " "), values[:MOST_ROWS]
    if not name.endswith("bytes") or not all(isinstance(value, int | float | None) for value in values):
        cells = [
            f'<td style="{NUMBER if _is_number(value) else TEXT}">{_text(value, name)}</td>'
            for value in shown
        ]
        is_number = any(map(_is_number, shown))
        return [f'<th style="{NUMBER if is_number else TEXT}">{escape(title)}</th>', *cells]
    sizes = [value for value in values if value is not None]
    unit, most = Unit.for_bytes(sizes), max(map(abs, sizes), default=0) or 1
    cells = ["<td></td>" if value is None else _size(value, unit, most) for value in shown]
    title = f"{title.removesuffix('bytes').strip()} {unit.name}".strip()
    return [f'<th style="{NUMBER}">{escape(title)}</th>', *cells]


def _size(size: float, unit: Unit, most: float) -> str:
    style = f"{NUMBER};{BAR.format(share=100 * abs(size) / most)}"
    return f'<td style="{style}" title="{size:,} B">{unit.show(size)}</td>'


def _is_shown(value: Any) -> bool:
    """Return whether a value is one, or the frames of a stack."""
    if isinstance(value, tuple):
        return any(isinstance(each, str) for each in value)
    return value not in (None, "") and not isinstance(value, dict | AnalysisResult)


def _text(value: Any, name: str) -> str:
    if value is None:
        return ""
    if _is_number(value):
        return f"{value:#x}" if name == "address" else f"{value:,}"
    plain_value = plain(value)
    text = " ← ".join(plain_value) if isinstance(plain_value, list) else str(plain_value)
    return escape(printable(text, MOST_CHARACTERS))


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
