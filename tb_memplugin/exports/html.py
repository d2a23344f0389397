"""One HTML page: live bytes over time, by what they are. It needs no server and no network."""

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
"""The page's program: the tab's own drawing code (frontend/src/report), bundled with the tab."""

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
    """Write the page: every event of the trace is in it, about four bytes each.

    Args:
        trace: any trace.
        path: the file to write.
        divisions: what the curve can be coloured by; the first is shown first.
        title: the page's heading.

    Raises:
        MemPluginError: the tab's bundle is not built, or the file cannot be written.
    """
    page = page_with(report_data(trace, divisions, title))
    with replacing(path) as stream:
        stream.write(page.encode())


def page_with(data: Json) -> str:
    """The page around a report's data. Nothing in the data can end its element or start another."""
    script = _script()
    return _PAGE.format(
        policy=_policy(script), title=escape(data["title"]), data=_inlined(data), script=script
    )


def _inlined(data: Json) -> str:
    """JSON without a character that HTML's parser acts on: what is a letter to JSON stays one."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def _script() -> str:
    try:
        text = SCRIPT.read_text("utf-8")
    except FileNotFoundError:
        raise MemPluginError(
            "The report's program is not built.",
            where=str(SCRIPT),
            fix="In the source checkout, run: make bundle. Wheels and source distributions carry it.",
        ) from None
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--").strip()


def _policy(script: str) -> str:
    """Runs this script and no other, and asks nobody for anything."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
