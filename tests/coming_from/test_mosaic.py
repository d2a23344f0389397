"""Scripts written for Mosaic run with the import changed, and say what our commands say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tb_memplugin import MemPluginError, load
from tb_memplugin.analysis import peak, stages
from tb_memplugin.coming_from import mosaic
from tests.commands.files import step_snapshot, write

PAGE = Path(__file__).parents[3] / "shared" / "seeds" / "mosaic.md"
SNAPSHOTS = Path(__file__).parents[3] / "shared" / "data" / "snapshots"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if PAGE.exists() else []
STAGES = [f"{name}_{stage}" for name in ("forward", "backward", "optimizer") for stage in ("START", "END")]


@pytest.fixture
def step(tmp_path, monkeypatch):
    """300 bytes stay of 390 at the peak; each of three annotations begins and ends, 5 µs apart."""
    notes = [
        {"device": 0, "name": key[: key.index("_")], "stage": key[key.index("_") + 1 :], "time_us": 5 * row}
        for row, key in enumerate(STAGES)
    ]
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "snapshot.pickle", step_snapshot(external_annotations=notes))


@pytest.mark.skipif(not EXAMPLES, reason="Mosaic's page is not on this machine")
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_of_the_page_runs(step, number, capsys):
    code = EXAMPLES[number].replace("from mosaic.", "from tb_memplugin.coming_from.mosaic.")
    names: dict[str, object] = {"json": json}
    exec(code, names)  # the page is the project's own brief
    shown = capsys.readouterr().out
    if "memory_peak" in code:
        assert (names["peak_memory"], shown) == (390, "Peak memory: 0.00 GiB\n")
    elif "profile.html" in code:
        assert "Model Forward" in Path("profile.html").read_text("utf-8")
    else:
        assert [line.partition(":")[0] for line in shown.splitlines()] == STAGES


def test_an_example_was_found_for_each_of_the_three_ways():
    assert len(EXAMPLES) in (0, 3)


def test_stages_are_those_of_the_analysis(step, capsys):
    found = mosaic.get_memory_usage_by_annotation_stage(step, ("forward",), paste=True)
    assert found == {"forward_START": ("forward", 300), "forward_END": ("forward", 300)}
    assert capsys.readouterr().out == "300\n300\n"


def test_each_command_is_a_function(step):
    assert mosaic.get_memory_usage_peak(step).bytes == 390
    found = mosaic.get_memory_usage(step, "1200_0", "free")
    assert (found.bytes_before, found.bytes_after) == (390, 300)
    (device,) = mosaic.get_memory_usage_diff(step, step)
    assert (device.base_peak_bytes, device.delta_bytes) == (390, 0)
    mosaic.get_json_snapshot(step, "out.json")
    assert json.loads(Path("out.json").read_text("utf-8"))["devices"][0]["peak_bytes"] == 390


@pytest.mark.parametrize("profile", ["annotations", "categories", "compile_context"])
def test_each_profile_is_a_page(step, profile):
    mosaic.get_memory_profile(str(step), "page.html", profile)
    assert "<script" in Path("page.html").read_text("utf-8")


def test_what_there_is_not_is_told(step):
    with pytest.raises(MemPluginError, match="no profile 'flame'"):
        mosaic.get_memory_profile(step, "page.html", "flame")
    with pytest.raises(MemPluginError, match="needs rules"):
        mosaic.get_memory_profile(step, "page.html", "custom")
    with pytest.raises(MemPluginError, match="no analysis 'leaks'"):
        mosaic.MemorySnapshot(load(step)).analyze_memory_snapshot("leaks")
    with pytest.raises(MemPluginError, match="load_memory_snapshot"):
        _ = mosaic.MemoryAbstract(step).memory_snapshot


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="strangers' snapshots are not on this machine")
def test_of_several_devices_the_highest_is_taken_and_stages_are_of_the_one_that_has_them():
    path = next(SNAPSHOTS.glob("01_*"))
    found = mosaic.MemoryAbstract(memory_snapshot_file=str(path))
    found.load_memory_snapshot()
    found.memory_snapshot.analyze_memory_snapshot(opt="memory_peak")
    trace = load(path)
    assert found.memory_snapshot.memory_peak == max(
        peak(trace, device.name).bytes for device in trace.devices
    )
    assert mosaic.get_memory_usage_by_annotation_stage(path) == {
        stage.key: (stage.name, stage.bytes) for stage in stages(trace) if stage.device == "cuda:0"
    }
