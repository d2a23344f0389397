"""Work whose allocations stand on known lines, traced, and that nothing is left of the tracing afterwards."""

from __future__ import annotations

import inspect
import sys
import threading

import pytest
import torch
from torch.utils import _python_dispatch as dispatch

from tb_memplugin import LineTracer
from tests.watched import is_watched


def is_clean() -> bool:
    return (
        dispatch._get_current_dispatch_mode() is None
        and not dispatch.is_in_torch_dispatch_mode()
        and threading.getprofile() is None
        and sys.getprofile() is None
        and not is_watched()
    )


def line_of(function, text: str) -> str:
    """`file:line (function)` of the first line of a function that has a text."""
    lines, first = inspect.getsourcelines(function)
    line = first + next(number for number, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{line} ({function.__name__})"


def traced(work, **options):
    """The tracer of a piece of work, whose result is let go when tracing has stopped."""
    tracer = LineTracer(**options)
    with tracer:
        kept = work()
    del kept
    return tracer


def made_now(tracer, **choice):
    """What tracing saw being born, by line: (bytes, count, median)."""
    return {
        use.location: (use.bytes, use.count, use.median_bytes)
        for use in tracer.report(**choice).lines
        if use.location != "untraced"
    }


def two_lines():
    x = torch.zeros(1000)
    parts = list(map(torch.clone, [x] * 3))
    return x, parts


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert is_clean()
    yield
    assert is_clean()
