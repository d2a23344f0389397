"""The breakdown of a step is in its side file: the event file has the step's figures alone."""

import pytest

from tb_memplugin.store.writer import RunWriter
from tests.server.tab import Tab
from tests.traces import trace

MODULES = 1_200
CHOSEN = {"run": "run", "worker": "rank0", "step": 0, "device": "cpu"}


@pytest.fixture
def written(tmp_path):
    lines = [
        f"alloc {row + 1} b{row} module=block{row % 40}.part{row} operator=op{row}" for row in range(MODULES)
    ]
    return RunWriter(str(tmp_path / "run"), "rank0").write(trace(*lines))


def test_with_the_side_file_every_row_is_shown(written, tmp_path):
    assert max(written.summary_bytes) <= 1_000
    tab = Tab(tmp_path)
    peak = tab.get("step", **CHOSEN)["peak"]
    assert len(peak["by_module"]) == len(peak["by_operator"]) == MODULES
    rows = tab.get("modules", **CHOSEN)["rows"]
    assert len(rows) == MODULES + 40
    assert all(row["highest"] is not None for row in rows)


def test_thousands_of_modules_are_all_compared_and_other_rows_are_cut_with_their_sum_kept(tmp_path):
    lines = [f"alloc {row + 1} b{row} module=layers.{row} operator=op{row}" for row in range(2_100)]
    RunWriter(str(tmp_path / "run"), "rank0").write(trace(*lines))
    tab = Tab(tmp_path)
    asked = {**CHOSEN, **{f"base_{key}": value for key, value in CHOSEN.items()}}
    whole = 2_100 * 2_101 // 2
    for by, count in (("module", 2_100), ("operator", 2_001)):
        rows = tab.get("compare", by=by, **asked)["rows"]
        assert len(rows) == count
        assert sum(row["other_bytes"] for row in rows) == sum(row["base_bytes"] for row in rows) == whole


def test_without_it_one_part_is_the_whole_and_a_note_tells(written, tmp_path):
    (tmp_path / "run/rank0/plugins/tb_memplugin/window-000000.mem").unlink()
    tab = Tab(tmp_path)
    step = tab.get("step", **CHOSEN)
    assert any("side file" in note["text"] for note in step["notes"])
    whole = MODULES * (MODULES + 1) // 2
    for by in ("by_category", "by_module", "by_operator", "by_phase"):
        assert [part["bytes"] for part in step["peak"][by]] == [step["peak"]["bytes"]] == [whole]
    assert [row["inclusive_bytes"] for row in tab.get("modules", **CHOSEN)["rows"]] == [whole]
