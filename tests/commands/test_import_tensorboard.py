"""Imports in a real TensorBoard, over the Rust data server and over the Python one."""

import json
import platform
import sys
import time
from pathlib import Path

import pytest

from tests.commands.files import run, step_snapshot, write
from tests.tensorboard.process import tensorboard

HAS_RUST = sys.platform in {"linux", "darwin"} and platform.machine() in {"x86_64", "AMD64"}
CHOSEN = {"run": "job", "worker": "rank0", "step": 0}


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
    folder = tmp_path_factory.mktemp("imports")
    logdir = folder / "runs"
    put(folder, logdir, 300)
    with tensorboard(logdir, f"--load_fast={request.param}") as server:
        server.wait_for("runs", lambda answer: answer["runs"])
        yield server, folder, logdir


def put(folder, logdir, kept, device=0):
    path = write(folder / "rank0.pickle", step_snapshot(kept, device))
    assert run("import", path, "--logdir", logdir, "--run", "job").exit_code == 0


def peaks(answer):
    """Peaks by run, worker and device."""
    return [
        (run["run"], worker["worker"], device, peak)
        for run in answer["runs"]
        for worker in run["workers"]
        for device, stats in worker["steps"]["devices"].items()
        for peak in stats["peak_bytes"]
    ]


def scalar_runs(server):
    body = json.loads(server.fetch("data/plugin/scalars/tags")[1])
    return {run: sorted(tags) for run, tags in body.items() if tags}


def test_what_was_imported_is_there(served):
    server, _, _ = served
    assert peaks(server.get("runs")) == [("job", "rank0", "cuda:0", 390)]
    assert server.get("curve", **CHOSEN, device="cuda:0")["exact"] is True


def test_imported_again_it_is_replaced_and_never_doubled(served):
    server, folder, logdir = served
    seen = []

    def shown(answer):
        seen.append(peaks(answer))
        return seen[-1]

    for number, kept in ((2, 400), (3, 500)):
        put(folder, logdir, kept, device=number)
        wanted = [("job", "rank0", f"cuda:{number}", kept + 90)]
        answer = server.wait_for("runs", lambda answer, wanted=wanted: shown(answer) == wanted)
        assert answer["problems"] == []
        chosen = {**CHOSEN, "device": f"cuda:{number}"}
        assert server.get("step", **chosen)["peak"]["bytes"] == kept + 90
        assert server.get("curve", **chosen)["peak"]["bytes"] == kept + 90
    assert all(len(found) <= 1 for found in seen), "old and new stood side by side"


def test_the_scalars_of_what_was_replaced_go_too(served):
    server, folder, logdir = served
    put(folder, logdir, 600, device=4)
    server.wait_for("runs", lambda answer: peaks(answer) == [("job", "rank0", "cuda:4", 690)])
    (run_name,) = _wait_for_one_run(server)
    status, body, _ = server.fetch("data/plugin/scalars/scalars", run=run_name, tag="memory/peak_allocated")
    assert (status, [value for _, _, value in json.loads(body)]) == (200, [690.0])


def _wait_for_one_run(server):
    """TensorBoard lets go of a deleted folder at the reload after."""
    end = time.monotonic() + 20
    while len(found := scalar_runs(server)) != 1 and time.monotonic() < end:
        time.sleep(0.2)
    return found


def test_an_import_that_broke_off_before_the_old_was_deleted_shows_the_new(tmp_path):
    put(tmp_path, tmp_path / "runs", 300)
    worker = tmp_path / "runs/job/rank0"
    kept = {path.relative_to(worker): path.read_bytes() for path in worker.rglob("*") if path.is_file()}
    put(tmp_path, tmp_path / "runs", 400)
    for name, content in kept.items():
        (worker / name).parent.mkdir(parents=True, exist_ok=True)
        Path(worker / name).write_bytes(content)
    with tensorboard(tmp_path / "runs", "--load_fast=false") as server:
        answer = server.wait_for("runs", lambda answer: answer["runs"])
    assert peaks(answer) == [("job", "rank0", "cuda:0", 490)]
    put(tmp_path, tmp_path / "runs", 500)
    assert not worker.exists()
