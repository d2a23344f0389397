"""The tab's backend in a real TensorBoard, over the Rust data server and over the Python one."""

import errno
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

from tb_memplugin.server.routes import ROUTES
from tb_memplugin.store.writer import RunWriter
from tests.server.conftest import BASELINE, BIGGER
from tests.tensorboard.process import tensorboard
from tests.traces import trace

HOSTILE = "<script>alert(1)</script>\n../\0" + "x" * 10_000
CHOSEN = {"run": "baseline", "worker": "rank0", "step": 5, "device": "cpu"}
SIDE_FILE = "baseline/rank0/plugins/tb_memplugin/window-000000.mem"
ZOOM = {"over": "event", "t0": 0, "t1": 3, "event": 1, "row": 0, "by": "category"}
BASE = {"base_run": "bigger", "base_worker": "rank0", "base_step": 5}

WITH_FAULTS = """
import os, sys
control, sys.stderr = {control!r}, open({log!r}, "w", buffering=1)

def check(path):
    if {name!r} in os.path.join("", *[os.fspath(path)] if isinstance(path, (str, os.PathLike)) else []):
        if os.path.exists(control):
            number = int(open(control).read())
            raise OSError(number, os.strerror(number), os.fspath(path))

def checked(function):
    return lambda path, *args, **keywords: (check(path), function(path, *args, **keywords))[1]

os.stat, os.lstat = checked(os.stat), checked(os.lstat)
sys.addaudithook(lambda event, args: check(args[0]) if event == "open" else None)
from tensorboard.main import run_main
run_main()
"""
"""TensorBoard, in which a file cannot be opened or looked at while another one says with which errno."""

HAS_RUST = sys.platform in {"linux", "darwin"} and platform.machine() in {"x86_64", "AMD64"}


@pytest.fixture(
    params=[
        pytest.param(
            "true", marks=pytest.mark.skipif(not HAS_RUST, reason="no Rust data server for this system")
        ),
        "false",
    ],
    ids=["rust", "python"],
    scope="module",
)
def served(request, tmp_path_factory):
    logdir = tmp_path_factory.mktemp("logdir")
    RunWriter(str(logdir / "baseline"), "rank0").write(BASELINE)
    RunWriter(str(logdir / "bigger"), "rank0").write(BIGGER)
    RunWriter(str(logdir / "hostile"), HOSTILE).write(BASELINE)
    broken = RunWriter(str(logdir / "broken"), "rank0").write(BASELINE)
    with Path(broken.side_file).open("r+b") as side_file:
        side_file.truncate(100)
    RunWriter(str(logdir / "many"), "rank0").write(
        trace(*(line for step in range(60) for line in (f"step {step}", f"alloc {step + 1} b{step}")))
    )
    faults = {"control": f"{logdir}.fault", "log": f"{logdir}.log", "name": SIDE_FILE}
    program = ("-c", WITH_FAULTS.format(**faults))
    with tensorboard(logdir, f"--load_fast={request.param}", program=program) as server:
        server.wait_for("runs", lambda answer: len(answer["runs"]) == 5)
        yield server, logdir


def test_the_tab_is_there_and_active(served):
    server, _ = served
    listing = json.loads(server.fetch("data/plugins_listing")[1])["tb_memplugin"]
    assert (listing["tab_name"], listing["enabled"]) == ("Memory", True)
    status, page, headers = server.fetch("data/plugin_entry.html", name="tb_memplugin")
    assert (status, b"static/index.js" in page) == (200, True)
    assert "Content-Security-Policy" in headers
    status, script, headers = server.fetch("data/plugin/tb_memplugin/static/index.js")
    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/javascript")
    assert b"render" in script


def test_every_step_is_kept(served):
    server, _ = served
    runs = {run["run"]: run for run in server.get("runs")["runs"]}
    assert runs["many"]["workers"][0]["steps"]["step"] == list(range(60))


def test_every_view_answers(served):
    server, _ = served
    base = {f"base_{key}": value for key, value in CHOSEN.items()}
    assert server.get("step", **CHOSEN)["peak"]["bytes"] == 560
    assert server.get("curve", **CHOSEN, px=5)["max"] == [500, 520, 520, 560, 560]
    assert server.get("moment", **CHOSEN, t=1_700)["bytes"] == 520
    assert len(server.get("lanes", **CHOSEN)["modules"]) == 2
    assert server.get("modules", **CHOSEN)["rows"][0]["inclusive_bytes"] == 560
    assert server.get("compare", by="module", **{**CHOSEN, "run": "bigger"}, **base)["delta_bytes"] == 90


def test_hostile_names_are_text(served):
    server, _ = served
    (worker,) = next(run for run in server.get("runs")["runs"] if run["run"] == "hostile")["workers"]
    assert worker["worker"] == HOSTILE


def test_a_truncated_file_is_named_beside_runs_that_work(served):
    server, _ = served
    (problem,) = server.get("runs")["problems"]
    assert problem["file"] == "broken/rank0/plugins/tb_memplugin/window-000000.mem"
    assert "truncated" in problem["reason"]
    assert server.get("curve", **{**CHOSEN, "run": "broken"})["exact"] is False


@pytest.mark.parametrize("fault", ["EIO", "ESTALE", "EACCES", "gone", "cut"])
def test_while_a_file_fails_it_is_named_with_the_reason_and_the_rest_is_shown(served, fault):
    server, logdir = served
    side_file = logdir / SIDE_FILE

    def answers(**chosen):
        of_routes = {}
        for route in sorted(ROUTES.keys() - {"/runs", "/fleet"}):
            path = f"data/plugin/tb_memplugin{route}"
            status, body, _ = server.fetch(path, **CHOSEN | ZOOM | BASE | chosen)
            of_routes[route] = status, json.loads(body)
        return of_routes

    def shown():
        answer = server.get("runs")
        return answer["runs"], [problem for problem in answer["problems"] if problem["file"] == SIDE_FILE]

    whole, other, listed = answers(), answers(run="bigger"), shown()
    content, control = side_file.read_bytes(), Path(f"{logdir}.fault")
    stamp = side_file.stat()
    try:
        if fault == "gone":
            side_file.unlink()
        elif fault == "cut":
            side_file.write_bytes(content[:100])
        else:
            control.write_text(str(getattr(errno, fault)))
        during = answers()
        assert answers(run="bigger") == other
        runs, problems = shown()
    finally:
        control.unlink(missing_ok=True)
        side_file.write_bytes(content)
        os.utime(side_file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    reason = {"gone": "is missing", "cut": "truncated"}.get(fault) or os.strerror(getattr(errno, fault))
    refused = [body["error"] for route, (status, body) in during.items() if status != whole[route][0] == 200]
    assert all(status in (200, 404) for route, (status, _) in during.items() if whole[route][0] == 200)
    assert len(refused) > 10
    assert all(SIDE_FILE in error["where"] and reason in error["what"] for error in refused), refused
    assert runs == listed[0]
    assert len(problems) == 1, problems
    assert (answers(), shown()) == (whole, listed)
    assert "Traceback" not in Path(f"{logdir}.log").read_text()


def test_scalars_show_the_peaks(served):
    server, _ = served
    status, body, _ = server.fetch(
        "data/plugin/scalars/scalars", run="many/rank0", tag="memory/peak_allocated"
    )
    assert status == 200, body
    assert [[step, value] for _, step, value in json.loads(body)[:3]] == [[0, 1.0], [1, 3.0], [2, 6.0]]


def test_what_is_written_while_it_runs_shows_on_reload(served):
    server, logdir = served
    writer = RunWriter(str(logdir / "later"), "rank0")
    try:
        for number in (1, 2):
            writer.write(trace(f"step {number}", f"alloc {10 * number} a"))
            server.wait_for(
                "runs", lambda answer, wanted=number: _steps(answer, "later") == list(range(1, wanted + 1))
            )
        assert server.get("curve", run="later", worker="rank0", step=2, device="cpu")["peak"]["bytes"] == 20
    finally:
        shutil.rmtree(logdir / "later")


def _steps(answer, name):
    return [
        step
        for run in answer["runs"]
        if run["run"] == name
        for worker in run["workers"]
        for step in worker["steps"]["step"]
    ]


def test_a_logdir_spec_shows_summaries_and_says_what_is_missing(tmp_path):
    RunWriter(str(tmp_path / "a"), "rank0").write(BASELINE)
    with tensorboard("", "--logdir_spec", f"mine:{tmp_path / 'a'}", "--load_fast=false") as server:
        server.wait_for("runs", lambda answer: len(answer["runs"]) == 1)
        chosen = {**CHOSEN, "run": "mine"}
        assert server.get("step", **chosen)["peak"]["bytes"] == 560
        assert server.get("curve", **chosen)["exact"] is False
        status, body, _ = server.fetch("data/plugin/tb_memplugin/moment", **chosen, t=0)
        assert (status, b"--logdir_spec" in body) == (404, True)


@pytest.mark.parametrize("fast", ["true", "false"])
def test_a_runs_name_that_the_rust_server_cannot_read_is_told_with_what_to_do(tmp_path, fast):
    """TensorBoard's Rust data server does not escape names in its blob keys; its Python path reads such."""
    RunWriter(str(tmp_path / 'a "quoted" run'), "rank0").write(BASELINE)
    with tensorboard(tmp_path, f"--load_fast={fast}") as server:
        server.wait_for("runs", lambda answer: answer["runs"])
        status, body, _ = server.fetch("data/plugin/tb_memplugin/step", **{**CHOSEN, "run": 'a "quoted" run'})
    answer = json.loads(body)
    if fast == "true" and HAS_RUST:
        assert (status, "--load_fast=false" in answer["error"]["fix"]) == (404, True)
    else:
        assert (status, answer["worker"]) == (200, "rank0")
