import shutil
import threading
from dataclasses import replace

import pytest

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import StepMetadata
from tb_memplugin.server.catalog import Entry
from tb_memplugin.server.windows import Windows
from tb_memplugin.store.writer import RunWriter
from tests.server.conftest import BASELINE

LATER = replace(BASELINE, events=replace(BASELINE.events, time_ns=BASELINE.events.time_ns - 1_000))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"run": "nope"}, 404),
        ({"worker": "nope"}, 404),
        ({"step": 99}, 404),
        ({"device": "cuda:9"}, 404),
        ({"run": "../../etc"}, 404),
        ({"worker": "../rank0"}, 404),
        ({"step": "five"}, 400),
        ({"step": "9" * 5_000}, 400),
        ({"px": 0}, 400),
        ({"px": 4_001}, 400),
        ({"px": "NaN"}, 400),
        ({"t0": 5, "t1": 5}, 400),
        ({"t0": "1e9"}, 400),
        ({"t0": -(1 << 62), "t1": 1 << 62}, 400),
        ({"by": "colour"}, 400),
    ],
)
def test_wrong_parameters_are_refused_in_words(tab, baseline, change, status):
    found, error = tab.refused("curve", **{**baseline, **change})
    assert found == status
    assert error["what"]
    assert error["fix"]


def test_a_missing_parameter_is_named(tab, baseline):
    status, error = tab.refused("moment", **baseline)
    assert (status, error["what"], error["where"]) == (400, "Parameter 't' is missing.", "t")
    assert "docs/http_api.md" in error["fix"]


@pytest.mark.parametrize("absent", ["run", "worker", "step"])
@pytest.mark.parametrize("route", ["step", "curve", "moment", "lanes", "modules", "compare"])
def test_absent_parameters_are_named(tab, baseline, route, absent):
    del baseline[absent]
    status, error = tab.refused(route, **baseline)
    assert (status, error["where"]) == (400, absent)


@pytest.mark.parametrize("event", [-2, 6, 10**18])
def test_an_event_that_is_not_there_is_refused(tab, baseline, event):
    assert tab.refused("moment", **baseline, event=event)[0] == 400


def test_only_get_is_served(tab, baseline):
    for method in ("POST", "PUT", "DELETE"):
        assert tab.answer("step", method=method, **baseline)[0] == 405


def test_our_own_failures_are_told_and_logged(tab, baseline, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(tab.backend._session.catalog, "find", fail)
    status, body = tab.answer("step", **baseline)
    assert status == 500
    assert "a bug" in body["error"]["what"]
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    "name", ["../../../secret.mem", "/etc/passwd", "window-000000.mem/../../x", "window-000000.mem\0", ""]
)
def test_a_summary_cannot_make_us_open_another_file(tmp_path, name):
    entry = Entry("r", "w", "r/w", "t", StepMetadata(side_file=name))
    with pytest.raises(UnreadableFileError, match="not opened"):
        Windows(str(tmp_path)).path(entry)


@pytest.mark.parametrize("folder", ["../outside", "/abs", "a/../../b", "nul\0"])
def test_a_run_outside_the_logdir_is_not_opened(tmp_path, folder):
    entry = Entry("r", "w", folder, "t", StepMetadata(side_file="window-000000.mem"))
    with pytest.raises(UnreadableFileError, match="not opened"):
        Windows(str(tmp_path)).path(entry)


def test_requests_side_by_side_load_a_window_once(tab, baseline, monkeypatch):
    import tb_memplugin.server.windows as windows

    loads = []

    def load(path, epoch_ns):
        loads.append(path)
        return BASELINE

    monkeypatch.setattr(windows, "load_window", load)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(tab.get("curve", **baseline)["peak"]["bytes"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [560] * 8
    assert len(loads) == 1


def test_windows_that_no_longer_fit_are_forgotten_the_least_used_first(tmp_path, logdir):
    from tests.server.tab import Tab

    small = Tab(logdir)
    small.backend._session.windows._kept.most_bytes = 1
    for run in ("demo/baseline", "demo/bigger", "demo/baseline"):
        assert small.get("curve", run=run, worker="rank0", step=5, device="cpu")["exact"]
        assert len(small.backend._session.windows._kept._slots) == 1


def test_a_replaced_side_file_is_read_anew(tab, logdir, side_file, baseline):
    assert tab.get("curve", **baseline)["peak"]["bytes"] == 560
    side_file.write_bytes(b"junk")
    assert tab.get("curve", **baseline)["exact"] is False


def test_a_window_that_does_not_have_the_step_is_named(tab, baseline):
    status, error = tab.refused("step", **baseline, window=77)
    assert status == 404
    assert error == {"what": "Window 77 has no step 5.", "where": "window", "fix": "Choose one of: 0."}


@pytest.mark.parametrize("over", ["time", "event"])
def test_a_stretch_of_centuries_is_drawn(tab, baseline, over):
    century = 1 << 61
    answer = tab.get("curve", **baseline, over=over, t0=-century, t1=century, px=4_000)
    assert (answer["peak"]["bytes"], answer["peak"]["column"]) == (560, 2_000)


def test_the_side_file_of_another_run_is_not_shown(tab, logdir, side_file, baseline):
    written = RunWriter(str(logdir / "later"), "rank0").write(LATER)
    shutil.copyfile(written.side_file, side_file)
    assert tab.get("curve", **baseline)["exact"] is False
    status, error = tab.refused("moment", **baseline, t=0)
    assert (status, error["what"]) == (404, "The side file belongs to another window.")
    assert [problem["reason"] for problem in tab.get("runs")["problems"]] == [error["what"]]


def test_a_long_parameter_is_not_repeated_in_full(tab, baseline):
    _, error = tab.refused("step", **{**baseline, "worker": "x" * 5_000})
    assert len(error["what"]) < 1_001
