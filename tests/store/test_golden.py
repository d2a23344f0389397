"""Files that older versions wrote stay readable."""

import pytest

from tb_memplugin.store import step_records
from tb_memplugin.store.blob import SCHEMA_VERSION, read_metadata, read_summary
from tb_memplugin.store.envelope import VERSION
from tb_memplugin.store.reader import load_window, peak_parts
from tests.step_figures import same_figures
from tests.store.golden.make import FOLDER, golden_figures, golden_trace
from tests.traces import same


def test_every_version_has_its_golden_file():
    assert [path.name for path in sorted(FOLDER.glob("window-*.mem"))] == [
        f"window-v{version}.mem" for version in range(1, VERSION + 1)
    ]
    assert len(list(FOLDER.glob("step-*.blob"))) == SCHEMA_VERSION
    assert len(list(FOLDER.glob("figures-*.record"))) == step_records.VERSION


@pytest.mark.parametrize("path", sorted(FOLDER.glob("figures-*.record")), ids=lambda path: path.name)
def test_figures_of_every_version_are_read(path):
    assert same_figures(step_records.read_figures(path.read_bytes()), golden_figures())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("window-*.mem")), ids=lambda path: path.name)
def test_windows_of_every_version_are_read(path):
    assert same(load_window(str(path)), golden_trace())
    assert [(note.code, note.bytes) for note in load_window(str(path)).notes] == [("other", None)]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("step-*.blob")), ids=lambda path: path.name)
def test_summaries_of_every_version_are_read(path):
    summary = read_summary(path.read_bytes())
    cpu, cuda = summary.devices
    assert (cpu.stats.peak_bytes, cuda.stats.peak_bytes, cuda.stats.peak_reserved_bytes) == (650, 64, 2048)
    assert {part.key: part.bytes for part in peak_parts(summary, cpu, "module")} == {
        "net.layer": 560,
        "(not named)": 90,
    }
    assert [note.text for note in summary.notes] == ["2 bytes are not exact."]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("step-*.metadata")), ids=lambda path: path.name)
def test_metadata_of_every_version_is_read(path):
    metadata = read_metadata(path.read_bytes())
    assert (metadata.worker, metadata.step, metadata.side_file) == ("rank0", 5, "window-000000.mem")
