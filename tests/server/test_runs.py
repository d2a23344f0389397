import shutil
from pathlib import Path

import pytest

from tb_memplugin.store import health
from tb_memplugin.store.envelope import HEAD
from tb_memplugin.store.writer import RunWriter
from tests.server.conftest import BASELINE
from tests.server.tab import Tab
from tests.traces import trace

HOSTILE = "<script>alert(1)</script>\n../\0" + "x" * 10_000


def test_every_run_worker_step_and_device_is_listed(tab, logdir):
    answer = tab.get("runs")
    assert answer["logdir"] == str(logdir)
    assert answer["problems"] == []
    assert [run["run"] for run in answer["runs"]] == ["demo/baseline", "demo/bigger"]
    (worker,) = answer["runs"][0]["workers"]
    assert (worker["worker"], worker["devices"]) == ("rank0", ["cpu"])
    assert (worker["steps"]["step"], worker["steps"]["window"]) == ([5, 6], [0, 0])
    columns = worker["steps"]["devices"]["cpu"]
    assert (columns["at"], columns["peak_reserved_bytes"], columns["capacity_bytes"]) == (
        [0, 1],
        [None, None],
        [None, None],
    )
    assert answer["runs"][0]["end_ns"] == 1_763_000_000_000_006_000  # of step 6
    stats = tab.get("step", run="demo/baseline", worker="rank0", step=5, device="cpu")["stats"]
    assert all(values[0] == stats[name] for name, values in columns.items() if name != "at")
    assert stats == {
        "peak_bytes": 560,
        "peak_time_ns": 3_500,
        "start_bytes": 400,
        "end_bytes": 460,
        "window_peak_bytes": 160,
        "peak_reserved_bytes": None,
        "step_start_ns": 0,
        "step_end_ns": 5_000,
        "allocated_bytes": 180,
        "allocations": 3,
        "stayed_bytes": 60,
        "stayed": 1,
        "capacity_bytes": None,
    }


def test_an_accelerator_has_capacity_and_reserve(tab):
    (worker,) = tab.get("runs")["runs"][1]["workers"]
    assert worker["devices"] == ["cpu", "cuda:0"]
    told = worker["steps"]["devices"]["cuda:0"]
    assert told["peak_bytes"] == [64]
    assert (told["peak_reserved_bytes"], told["capacity_bytes"]) == ([2048], [1 << 20])


def test_an_empty_logdir_has_no_runs(tmp_path):
    tab = Tab(tmp_path)
    assert tab.get("runs") == {"runs": [], "problems": [], "logdir": str(tmp_path)}
    assert not tab.backend.is_active()


def test_a_workers_folder_as_logdir_is_the_run_called_dot(logdir):
    tab = Tab(logdir / "demo" / "baseline" / "rank0")
    assert [run["run"] for run in tab.get("runs")["runs"]] == ["."]
    assert tab.get("step", run=".", worker="rank0", step=5, device="cpu")["stats"]["peak_bytes"] == 560
    assert tab.get("curve", run=".", worker="rank0", step=5, device="cpu")["exact"]


def test_what_is_written_later_shows_after_a_reload(tmp_path):
    writer = RunWriter(str(tmp_path / "live"), "rank0")
    writer.write(trace("step 1", "alloc 10 a"))
    tab = Tab(tmp_path)
    assert tab.get("runs")["runs"][0]["workers"][0]["steps"]["step"] == [1]
    writer.write(trace("step 2", "alloc 20 a"))
    tab.reload()
    assert tab.get("runs")["runs"][0]["workers"][0]["steps"]["step"] == [1, 2]
    chosen = {"run": "live", "worker": "rank0", "step": 2, "device": "cpu"}
    assert tab.get("curve", **chosen)["peak"]["bytes"] == 20


def test_hostile_names_are_text_and_open_nothing(tmp_path):
    RunWriter(str(tmp_path / "run"), HOSTILE).write(BASELINE)
    tab = Tab(tmp_path)
    (worker,) = tab.get("runs")["runs"][0]["workers"]
    assert worker["worker"] == HOSTILE
    assert tab.get("curve", run="run", worker=HOSTILE, step=5, device="cpu")["exact"]


def test_a_copied_folder_is_a_worker_of_its_own(logdir):
    shutil.copytree(logdir / "demo/baseline/rank0", logdir / "demo/baseline/rank0-copy")
    workers = [worker["worker"] for worker in Tab(logdir).get("runs")["runs"][0]["workers"]]
    assert workers == ["rank0", "rank0 (rank0-copy)"]


def test_a_step_recorded_in_two_windows_is_told_apart_by_window(tmp_path):
    writer = RunWriter(str(tmp_path / "run"), "rank0")
    writer.write(trace("step 0", "alloc 10 a"))
    writer.write(trace("step 0", "alloc 20 a"))
    chosen = {"run": "run", "worker": "rank0", "step": 0, "device": "cpu"}
    tab = Tab(tmp_path)
    assert tab.get("step", **chosen)["stats"]["peak_bytes"] == 20
    assert tab.get("step", **chosen, window=0)["stats"]["peak_bytes"] == 10
    assert tab.get("curve", **chosen, window=0)["peak"]["bytes"] == 10


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:100], "truncated"),
        (lambda content: b"", "empty"),
        (lambda content: b"not ours" * 50, "not a tb_memplugin side file"),
        (lambda content: HEAD.pack(b"\x89TBMEM\r\n", 7, 0) + content[HEAD.size :], "version 7"),
    ],
)
def test_a_broken_side_file_is_named_and_the_other_runs_work(
    logdir, side_file, baseline, bigger, damage, reason
):
    side_file.write_bytes(damage(side_file.read_bytes()))
    tab = Tab(logdir)
    (problem,) = tab.get("runs")["problems"]
    assert problem["file"] == "demo/baseline/rank0/plugins/tb_memplugin/window-000000.mem"
    assert reason in problem["reason"]
    assert problem["fix"]
    assert tab.get("curve", **bigger)["exact"] is True
    assert tab.get("curve", **baseline)["exact"] is False
    status, error = tab.refused("moment", **baseline, t=0)
    assert (status, reason in error["what"]) == (404, True)


def test_damage_deep_in_a_side_file_is_named_once_a_view_has_met_it(logdir, side_file, baseline):
    content = bytearray(side_file.read_bytes())
    content[40] ^= 0xFF
    side_file.write_bytes(bytes(content))
    tab = Tab(logdir)
    assert tab.get("curve", **baseline)["exact"] is False
    (problem,) = tab.get("runs")["problems"]
    assert "window-000000.mem" in problem["file"]


def test_a_truncated_event_file_is_named_and_what_stands_before_is_shown(logdir):
    (path,) = (logdir / "demo/baseline/rank0").glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-20])
    tab = Tab(logdir)
    answer = tab.get("runs")
    assert answer["runs"][0]["workers"][0]["steps"]["step"] == [5]
    assert "ends unexpectedly" in answer["problems"][0]["reason"]
    assert answer["problems"][0]["file"].startswith("demo/baseline/rank0/events.out")


def test_a_foreign_event_file_is_named(logdir):
    (logdir / "demo/baseline/rank0/events.out.tfevents.0.x").write_bytes(b"something else entirely")
    problems = Tab(logdir).get("runs")["problems"]
    assert [problem["file"] for problem in problems] == ["demo/baseline/rank0/events.out.tfevents.0.x"]


def test_only_unreadable_files_still_make_the_tab_active(tmp_path):
    folder = tmp_path / "run" / "rank0" / "plugins" / "tb_memplugin"
    folder.mkdir(parents=True)
    (folder / "window-000000.mem").write_bytes(b"junk")
    assert Tab(tmp_path).backend.is_active()


def test_a_newer_summary_is_named_and_the_other_runs_work(logdir, bigger, monkeypatch):
    import tb_memplugin.store.summary as summary

    with monkeypatch.context() as newer:
        newer.setattr(summary, "SCHEMA_VERSION", 99)
        RunWriter(str(logdir / "demo" / "future"), "rank0").write(BASELINE)
    tab = Tab(logdir)
    answer = tab.get("runs")
    assert [run["run"] for run in answer["runs"]] == ["demo/baseline", "demo/bigger"]
    assert {problem["file"].partition(":")[0] for problem in answer["problems"]} == {"demo/future/rank0"}
    assert "version 99" in answer["problems"][0]["reason"]
    assert "newest version of tb-memplugin" in answer["problems"][0]["fix"]
    assert tab.get("step", **bigger)["stats"]["peak_bytes"] == 650


def test_a_flipped_bit_in_an_event_file_is_named_and_what_follows_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "SUM_SECONDS", 60)
    writer = RunWriter(str(tmp_path / "run"), "rank0")
    path = Path(writer.write(BASELINE).event_file)
    tab = Tab(tmp_path)
    assert tab.get("runs")["problems"] == []
    end = path.stat().st_size
    writer.write(BASELINE)
    content = bytearray(path.read_bytes())
    content[end + 500] ^= 1
    path.write_bytes(content)
    (problem,) = tab.get("runs")["problems"]
    assert problem["file"] == f"run/rank0/{path.name}"
    assert f"damaged at byte {end}" in problem["reason"]
    content[end + 500] ^= 1
    path.write_bytes(content)
    assert tab.get("runs")["problems"] == []


def test_a_run_that_is_deleted_takes_its_problem_with_it(tab, logdir, side_file, baseline):
    side_file.unlink()
    assert tab.get("curve", **baseline)["exact"] is False
    assert len(tab.get("runs")["problems"]) == 1
    shutil.rmtree(logdir / "demo" / "baseline")
    assert tab.get("runs")["problems"] == []
