"""pytest's plugin: `@pytest.mark.peak_memory`, `@pytest.mark.no_memory_growth`, and the fixture `memory`.

pytest imports this file at its start, so torch is imported only by tests that measure.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tb_memplugin.analysis.units import read_size, size_text
from tb_memplugin.errors import MemPluginError

if TYPE_CHECKING:
    from tb_memplugin.analysis.divisions import By
    from tb_memplugin.callbacks.measured import MeasuredMemory

PEAK, GROWTH = "peak_memory", "no_memory_growth"
_ENDED = pytest.StashKey[bool]()

SHOWN = 5
"""How many parts of the memory a failure names, by each division."""

DIVISIONS: tuple[By, ...] = ("category", "module", "line")
WARMUP = 2
"""How often a test runs before growth counts: caches are filled, and optimizers have their state."""


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest the markers."""
    config.addinivalue_line(
        "markers",
        f'{PEAK}(limit): fail if the test has more torch memory allocated at once than limit, "512 MiB"',
    )
    config.addinivalue_line(
        "markers",
        f"{GROWTH}(steps=5): run the test {WARMUP} + steps times; fail if more torch memory stays each time",
    )


@pytest.fixture
def memory() -> type[MeasuredMemory]:
    """Return the class that measures a block, for use in a `with` statement."""
    from tb_memplugin.callbacks.measured import MeasuredMemory

    return MeasuredMemory


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note that a test failed or was skipped: a subtest does that before the test itself ends."""
    if call.excinfo is not None:
        item.stash[_ENDED] = True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measure a marked test, and fail it if it is above its limit."""
    growth = item.get_closest_marker(GROWTH)
    with _errors_in_words(item):
        limits = [_limit(marker) for marker in item.iter_markers(PEAK)]
        steps = 0 if growth is None else WARMUP - 1 + _steps(growth)
    if not limits and growth is None:
        return (yield)
    from tb_memplugin.callbacks.measured import MeasuredMemory

    attributes: dict[str, Any] = getattr(getattr(item, "instance", None), "__dict__", {})
    with_fixtures = dict(attributes)
    item.stash[_ENDED] = False
    with MeasuredMemory() as used:
        result = yield
        gc.collect()  # what is in reference cycles would stay for some time
        for _ in range(steps):
            if item.stash[_ENDED] or getattr(item, "_excinfo", None):  # a unittest.TestCase raises nothing
                break
            used.step()
            attributes.clear()
            attributes.update(with_fixtures)  # an IsolatedAsyncioTestCase runs only once
            item.runtest()
            gc.collect()
    with _errors_in_words(item):
        item.user_properties.append(("peak_memory_bytes", used.peak_bytes))
        for limit in limits:
            _hold(limit, used)
        if growth is not None:
            _hold_level(used)
    return result


@contextmanager
def _errors_in_words(item: pytest.Item) -> Iterator[None]:
    """Fail the test with an error of ours, without the traceback through our code."""
    try:
        yield
    except MemPluginError as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None


def _hold(limit: int, used: MeasuredMemory) -> None:
    for device, size in used.peak_bytes_of().items():
        if size > limit:
            over = f"{size_text(size - limit)} above its limit of {size_text(limit)}"
            text = f"The test had {size_text(size)} allocated on {device}, {over}."
            pytest.fail("\n".join([text, *_parts(used, device)]), pytrace=False)


def _hold_level(used: MeasuredMemory) -> None:
    for device, levels in used.levels().items():
        later = levels[WARMUP - 1 :]
        gaps = [after - before for before, after in pairwise(later)]
        if gaps and min(gaps) > 0:
            more = size_text(round(statistics.median(gaps)))
            text = f"Memory on {device} grew in each of {len(gaps)} runs of the test, by {more} (median)."
            pytest.fail("\n".join([text, *_kept(used, device)]), pytrace=False)


def _kept(used: MeasuredMemory, device: str) -> list[str]:
    """Return lines that say where what stays was allocated."""
    from tb_memplugin.analysis.advice_rules import advice

    trace = used.trace
    findings = (
        [] if trace is None else [each for each in advice(trace, device).findings if each.kind == "growth"]
    )
    return [f"  {row.what}: {size_text(row.bytes)} kept" for each in findings for row in each.evidence]


def _parts(used: MeasuredMemory, device: str) -> list[str]:
    """Return lines with the largest parts of the peak."""
    return [
        f"  {by} {part.key or '(root)'}: {size_text(part.bytes)}"
        for by in DIVISIONS
        for part in used.largest(by, device, SHOWN)
    ]


def _limit(marker: pytest.Mark) -> int:
    limit = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else marker.kwargs.get("limit")
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
        return limit
    where = f"@pytest.mark.{PEAK}"
    if not isinstance(limit, str):
        raise MemPluginError(f"{limit!r} is no limit.", where=where, fix=f'Give {where}("512 MiB").')
    return read_size(limit, where)


def _steps(marker: pytest.Mark) -> int:
    steps = marker.args[0] if len(marker.args) == 1 else marker.kwargs.get("steps", 5)
    is_known = len(marker.args) + len(marker.kwargs) <= 1 and marker.kwargs.keys() <= {"steps"}
    if not is_known or isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        where = f"@pytest.mark.{GROWTH}"
        raise MemPluginError("This is no number of steps.", where=where, fix=f"Give {where}(steps=5).")
    return steps
