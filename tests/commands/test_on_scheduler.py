"""`import --scheduler`: a real Dask cluster of two processes reads the files."""

import sys

import pytest

from tests.commands.files import refused, run, step_snapshot, told, write
from tests.commands.test_import import recorded

distributed = pytest.importorskip(
    "distributed", reason="Dask is not installed: pip install tb-memplugin[dask]"
)

RANKS = 12


@pytest.fixture(scope="module")
def scheduler():
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        yield cluster.scheduler_address


def ranks(folder):
    """One snapshot of each rank; rank r holds 300 + r bytes, and 90 more at its peak."""
    return [write(folder / f"rank{rank}.pickle", step_snapshot(300 + rank)) for rank in range(RANKS)]


def test_every_rank_is_imported_as_without_a_scheduler(scheduler, tmp_path):
    files = ranks(tmp_path)
    there = told("import", *files, "--logdir", tmp_path / "there", "--run", "job", "--scheduler", scheduler)
    run("import", *files, "--logdir", tmp_path / "here", "--run", "job")
    assert sorted(item["file"] for item in there["imported"]) == sorted(map(str, files))
    expected = {("job", f"rank{rank}", 390 + rank) for rank in range(RANKS)}
    for logdir in ("there", "here"):
        assert {(name, worker, *peaks) for name, worker, peaks in recorded(tmp_path / logdir)} == expected


def test_ranks_of_one_name_do_not_overwrite_each_other(scheduler, tmp_path):
    files = [write(tmp_path / str(n) / "snapshot.pickle", step_snapshot(300 + n)) for n in range(6)]
    run("import", *files, "--logdir", tmp_path / "runs", "--run", "job", "--scheduler", scheduler)
    assert sorted(peak for _, _, (peak,) in recorded(tmp_path / "runs")) == [390 + n for n in range(6)]


def test_a_file_that_cannot_be_read_does_not_keep_the_others_from_it(scheduler, tmp_path):
    good, bad = write(tmp_path / "good.pickle", step_snapshot()), tmp_path / "bad.pickle"
    bad.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    result = run("import", good, bad, "--logdir", tmp_path / "runs", "--scheduler", scheduler)
    alone = run("import", good, bad, "--logdir", tmp_path / "alone")
    assert result.exit_code == alone.exit_code != 0
    assert "os.system" in result.stderr
    assert str(bad) in result.stderr
    assert [peaks for _, _, peaks in recorded(tmp_path / "runs")] == [[390]]


def test_a_scheduler_that_does_not_answer_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tb_memplugin.commands.import_.SECONDS_TO_CONNECT", 1)
    file = write(tmp_path / "a.pickle", step_snapshot())
    message = refused("import", file, "--logdir", tmp_path / "runs", "--scheduler", "tcp://127.0.0.1:1")
    assert "Cannot reach a Dask scheduler" in message
    assert "dask scheduler" in message


def test_what_is_no_address_is_refused_at_once(tmp_path):
    file = write(tmp_path / "a.pickle", step_snapshot())
    message = refused("import", file, "--logdir", tmp_path / "runs", "--scheduler", "scheduler.json")
    assert "tcp://HOST:PORT" in message


def test_without_dask_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    file = write(tmp_path / "a.pickle", step_snapshot())
    message = refused("import", file, "--logdir", tmp_path / "runs", "--scheduler", "tcp://127.0.0.1:1")
    assert "tb-memplugin[dask]" in message
