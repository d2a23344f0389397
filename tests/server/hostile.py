"""Random and hostile requests: `python -m tests.server.hostile [COUNT [SEED]]`, so many for each route.

It prints what was answered with another status than 200 or 4xx, and the memory as it goes.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
from werkzeug.test import Client

from tb_memplugin.analysis.divisions import ALL_DIVISIONS
from tb_memplugin.server.routes import ROUTES
from tb_memplugin.store.writer import RunWriter
from tests.server.conftest import BASELINE, BIGGER
from tests.server.tab import Tab

HOSTILE = (
    *("", "0", "-1", "1", "4000", "4001", "1e9", "NaN", "inf", "0x10", "1_0", " 5 ", "+5", "9" * 30),
    *("\u0663", str(1 << 61), str(-(1 << 61)), str(1 << 63), "\0", "a\0b", "x" * 20_000, "\U0001f600" * 50),
    *("../../etc/passwd", "/etc/passwd", "%2e%2e/", "C:\\", "<script>alert(1)</script>", "'; DROP TABLE x"),
    *("\u202e", "\r\nX-Evil: 1", "a\nb", "name=(", "a=b", "=", "a=[[", "all", "None", "true", "-bytes"),
    *("module", "cuda:0"),
)
VALID = {
    "run": ("demo/baseline", "demo/bigger"),
    "worker": ("rank0",),
    "step": ("5", "5", "5", "6", "all"),
    "device": ("cpu", "cpu", "cpu", "cuda:0"),
    "span": ("step", "window"),
    "over": ("time", "event"),
    "by": ALL_DIVISIONS,
    "colour": ALL_DIVISIONS,
    "fold": ("0", "1"),
    "of": ("moment", "step", "allocated"),
    "frames": ("folded", "all", "python"),
    "sort": ("bytes", "-bytes", "born", "line", "count"),
    "order": ("pool", "size", "address"),
    "to": ("json", "html", "csv", "pickle", "perfetto"),
    "rules": ("a=b", "mm=aten::mm"),
    "find": ("layer", "0x", "w"),
    "open": ("layer", "layer\nadded"),
    **dict.fromkeys(("event", "since", "row", "t", "first", "last", "count", "node"), tuple("01235")),
    **dict.fromkeys(("t0", "t1", "px", "most", "finest", "window", "window_step"), ("0", "10", "1000")),
}
BASES = {f"base_{name}": VALID[name] for name in ("run", "worker", "step", "device", "window")}
ASKED = ("run", "worker", "step", "device")


def queries(seed: str) -> Iterator[dict[str, str]]:
    """Yield parameters without end: mostly valid ones of a step, with some hostile ones among them."""
    choose, names = random.Random(seed), {**VALID, **BASES}
    while True:
        bases = BASES if choose.random() < 0.5 else ()
        chosen = {*choose.sample(list(names), choose.randrange(8)), *ASKED, *bases}
        bad = choose.choice((0.0, 0.1, 0.5))
        yield {
            name: choose.choice(HOSTILE if choose.random() < bad else names[name]) for name in sorted(chosen)
        }


def ask(tab: Tab, route: str, query: dict[str, str], experiment: str = "") -> tuple[int, str]:
    """Return the status of an answer, and what is wrong with it, "" if nothing is."""
    environ = {"HTTP_TENSORBOARD_EXPERIMENT_ID": experiment}
    app = tab.backend.apps[route]
    answer = Client(app).get("/", query_string=query, environ_overrides=environ)
    text = answer.get_data()
    if route == "/export" and answer.status_code == 200:
        return 200, "" if len(text) == int(answer.headers["Content-Length"]) else "another length"
    body = json.loads(text)
    if answer.status_code == 200:
        return 200, ""
    error = body["error"]
    fine = 400 <= answer.status_code < 500 and error["what"] and error["fix"] and len(error["what"]) <= 1_001
    return answer.status_code, "" if fine else str(error)


def wrong_answers(tab: Tab, count: int, seed: str = "0") -> Iterator[str]:
    """Ask each route `count` times, and yield what is wrong."""
    for route in (*ROUTES, "/export"):
        for number, query in zip(range(count), queries(f"{seed} {route}"), strict=False):
            status, wrong = ask(tab, route, query, f"experiment {number}" if number % 10 == 0 else "")
            seen[status] += 1
            if wrong:
                yield f"{route} {query}: {status} {wrong}"


seen: Counter[int] = Counter()
"""How often each status was answered."""


def resident_mib() -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:"))


def main(count: int, seed: str) -> None:
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        RunWriter(f"{folder}/demo/baseline", "rank0").write(BASELINE)
        RunWriter(f"{folder}/demo/bigger", "rank0").write(BIGGER)
        tab = Tab(folder)
        for part in range(4):
            for wrong in wrong_answers(tab, count // 4, f"{seed} {part}"):
                click.echo(wrong[:1_000])
            click.echo(f"{sum(seen.values())} requests, {dict(seen)}: {resident_mib()} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1_000, sys.argv[2] if sys.argv[2:] else "0")
