"""Two thousand damaged files, by seed: a clear error or a marked result; no crash, no hang, no silent lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.loading import load
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import MemoryTrace
from tests.mutations.damage import story_damaged
from tests.mutations.kinds import KINDS, NOT_READ, sums_wrong
from tests.mutations.stories import replayed, story
from tests.mutations.sweep import Sweep, check, sweep

LONGEST_SECONDS = 10
BATCH = 50


def outcome(load_it: Callable[[], MemoryTrace]) -> MemoryTrace | None:
    """A trace, or None for a clear error, within the time; anything else that is raised fails the test."""
    begin = time.process_time()  # which other processes do not add to
    refusal: MemPluginError | None = None
    found: MemoryTrace | None = None
    try:
        found = load_it()
    except MemPluginError as error:
        refusal = error
    assert time.process_time() - begin < LONGEST_SECONDS
    assert refusal is None or all((refusal.what, refusal.where, refusal.fix))
    return found


@pytest.mark.parametrize("batch", range(4))
def test_true_stories_are_read_without_a_note(batch: int) -> None:
    for seed in range(BATCH):
        content = story(Random(1000 * batch + seed))
        trace = trace_from_snapshot(content, "x")
        levels, wrong = replayed(content)
        assert wrong == 0
        assert trace.notes == ()
        assert trace.live(0).tolist() == levels


@pytest.mark.parametrize("batch", range(20))
def test_a_snapshot_that_says_something_else_is_refused_or_told_or_right(batch: int) -> None:
    for seed in range(BATCH):
        random = Random(7000 * batch + seed)
        content = story_damaged(story(random), random)
        found = outcome(lambda content=content: load(content))  # type: ignore[misc]
        if found is None:
            continue
        assert sums_wrong(found) == ""
        if not found.notes:
            levels, wrong = replayed(content)
            assert wrong == 0, (batch, seed)
            assert found.live(0).tolist() == levels, (batch, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_read_if_its_kind_is(kind: str, tmp_path: Path) -> None:
    answer = check(KINDS[kind], KINDS[kind].whole(Random(1)), tmp_path)
    assert answer == (None if kind in NOT_READ else "")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_hold_together(kind: str, tmp_path: Path) -> None:
    done = sweep(KINDS[kind], 50, seed=1, folder=tmp_path)
    assert done == Sweep(done.read, 50 - done.read)
