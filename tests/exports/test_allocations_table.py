"""Parquet: other programs read what the recording has."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tb_memplugin import load
from tb_memplugin.analysis import peak
from tests.commands.files import refused, run
from tests.traces import trace

RECORDED = Path(__file__).parents[1] / "data" / "torch-2.13.0" / "training.pickle.gz"


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow")
    path = tmp_path_factory.mktemp("parquet") / "training.parquet"
    assert run("export", RECORDED, "--to", "parquet", "-o", path).exit_code == 0
    return path


def test_pandas_reads_it_as_it_was(parquet: Path) -> None:
    frame, ours = pd.read_parquet(parquet), load(RECORDED).to_pandas()
    assert list(frame.columns) == list(ours.columns)
    assert frame["bytes"].tolist() == ours["bytes"].tolist()
    assert frame["stack"].astype(str).tolist() == ours["stack"].astype(str).tolist()


def test_duckdb_sums_the_peak(parquet: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    state = peak(load(RECORDED))
    alive = f"coalesce(born_event, -1) <= {state.event} and coalesce(freed_event, 1e18) > {state.event}"
    query = f"select category, sum(bytes) from '{parquet}' where {alive} group by category"
    assert dict(duckdb.sql(query).fetchall()) == {part.key: part.bytes for part in state.parts("category")}


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    message = refused("export", RECORDED, "--to", "parquet", "-o", tmp_path / "a.parquet")
    assert "pip install 'tb-memplugin[arrow]'" in message
    assert not list(tmp_path.iterdir())


def test_a_trace_without_events_has_no_rows() -> None:
    assert len(trace().to_pandas()) == 0
