"""Notebooks: after `%load_ext tb_memplugin`, a trace is shown as a report, and `%%memory` measures a cell."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from tb_memplugin.analysis.units import size_text
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.formats import report_page
from tb_memplugin.trace import MemoryTrace

HEIGHT = 640
"""Pixels of a report in a notebook."""

MOST_EVENTS = 500_000
"""A longer recording is not shown as a report, which takes about four bytes of the notebook per event."""

SHOWN = 3


def load_ipython_extension(shell: Any) -> None:
    """Teach IPython to show traces, and the magic `%%memory`."""
    shell.display_formatter.formatters["text/html"].for_type(MemoryTrace, report_frame)
    shell.register_magic_function(_measured_cell(shell), "cell", "memory")


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
