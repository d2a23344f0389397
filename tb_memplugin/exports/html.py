"""One HTML page that shows live bytes over time in several divisions, without a server or a network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.output import replacing
from tb_memplugin.exports.report_data import Division, Json, report_data
from tb_memplugin.trace import MemoryTrace

SCRIPT = Path(__file__).parent.parent / "server" / "static" / "report.js"
"""The page's script: the tab's own drawing code (frontend/src/report), which is bundled with the tab."""

_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="tb_memplugin">
<title>{title}</title>
</head>
<body>
<noscript>This page draws with JavaScript, which is switched off here.</noscript>
<script type="application/json" id="report-data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write(
    trace: MemoryTrace, path: str | os.PathLike[str], divisions: Sequence[Division], title: str
) -> None:
    """Write the page. It contains every event of the trace, at about four bytes each.

    Args:
        trace: any trace.
        path: the file to write.
        divisions: what the curve can be colored by; the first is shown first.
        title: the page's heading.

    Raises:
        MemPluginError: the tab's bundle is not built, or the file cannot be written.
    """
    page = page_with(report_data(trace, divisions, title))
    with replacing(path) as stream:
        stream.write(page.encode())


def page_with(data: Json) -> str:
    """Return the page with a report's data. No text in the data can close its element or open another."""
    script = _script()
    return _PAGE.format(
        policy=_policy(script), title=escape(data["title"]), data=_inlined(data), script=script
    )


def _inlined(data: Json) -> str:
    """Return JSON in which characters special to HTML are written as JSON escapes."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def _script() -> str:
    try:
        text = SCRIPT.read_text("utf-8")
    except FileNotFoundError:
        raise MemPluginError(
            "The JavaScript of the report is not built.",
            where=str(SCRIPT),
            fix="In a source checkout, run: make bundle. Wheels and source distributions include it.",
        ) from None
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--").strip()


def _policy(script: str) -> str:
    """Return a content security policy that allows this script only, and no network access."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
