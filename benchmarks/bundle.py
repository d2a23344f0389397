"""The size of the tab's JavaScript as a browser fetches it."""

from __future__ import annotations

import gzip
from importlib.resources import files

from benchmarks.figures import Figure


def measure() -> list[Figure]:
    """Measure the size of all scripts and styles after gzip, in kB."""
    static = files("tb_memplugin.server") / "static"
    parts = [part.read_bytes() for part in static.iterdir() if part.name.endswith((".js", ".css"))]
    return [
        Figure(
            "the tab's code and the HTML report, gzip",
            "kB",
            [sum(len(gzip.compress(part, 9)) for part in parts) / 1e3],
            150,
        )
    ]
