"""docs/corpus.md has what `benchmarks.corpus` says now."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.corpus import SOURCES, answers, table

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PAGE = (ROOT / "docs" / "corpus.md").read_text("utf-8").partition("## Where they differ")[0].splitlines()
OURS = 6
"""Columns of the second table, up to what the file itself says."""


def columns(line: str) -> list[str]:
    return [column.strip() for column in line.split("|")[1:-1]]


def test_a_file_itself_says_the_level_at_its_end_or_its_highest() -> None:
    folder = ROOT / "tests" / "data" / "torch-2.13.0"
    (snapshot,) = answers(folder / "training.pickle.gz", None, {"peak": {"dynamic_bytes": 7}})
    assert (snapshot.device, snapshot.start, snapshot.mosaic) == ("cuda:0", 0, 7)
    assert snapshot.itself == snapshot.end < snapshot.peak
    profile = {answer.device: answer for answer in answers(folder / "profiled.pt.trace.json.gz", None, {})}
    assert profile["cuda:0"].itself == profile["cuda:0"].peak > profile["cuda:0"].end


def test_the_page_names_every_file() -> None:
    listed = {columns(line)[0].strip("`"): columns(line)[2] for line in PAGE if line.startswith("| `")}
    assert listed.keys() == SOURCES.keys()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} holds strangers' recordings; it is absent")
def test_the_page_has_our_answers() -> None:
    ours = [columns(line)[:OURS] for line in table(DATA, None) if line.startswith("| `")]
    assert ours == [columns(line)[:OURS] for line in PAGE if line.startswith("| `")]
