import os
import shlex
import socket
from importlib import metadata

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from tb_memplugin.commands import doctor, doctor_logdir, main
from tb_memplugin.commands.doctor_findings import Level
from tb_memplugin.store.health import unreadable_files
from tb_memplugin.store.records import record
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Counter, CounterReading, DevicePart, Moment, WholeDevice
from tests.cli import CliRunner
from tests.server.conftest import BASELINE
from tests.traces import trace


@pytest.fixture
def logdir(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(BASELINE)
    return tmp_path


def findings(logdir):
    return list(doctor_logdir.check_logdir(str(logdir)))


def problems(logdir):
    found = [finding for finding in findings(logdir) if finding.level is Level.PROBLEM]
    assert all(finding.fix for finding in found)
    return [finding.text for finding in found]


def test_a_good_logdir_has_no_problem(logdir):
    assert problems(logdir) == []
    assert "2 recorded steps of 1 worker in" in findings(logdir)[0].text


def test_the_exit_code_tells(logdir, monkeypatch):
    monkeypatch.setattr(doctor, "check_installation", lambda: iter(()))
    good = CliRunner().invoke(main, ["doctor", str(logdir)])
    assert (good.exit_code, "The Memory tab should show it" in good.output) == (0, True)
    bad = CliRunner().invoke(main, ["doctor", str(logdir / "absent")])
    assert (bad.exit_code, "does not exist" in bad.output, "→" in bad.output) == (1, True, True)


@pytest.mark.parametrize("target", ["absent", "link"], ids=["dangling", "to itself"])
def test_a_link_that_leads_nowhere(target, tmp_path):
    (tmp_path / "link").symlink_to(target)
    (text,) = problems(tmp_path / "link")
    assert text.endswith("does not exist.")


def test_an_empty_folder(tmp_path):
    assert problems(tmp_path) == ["There is no event file."]


def test_a_file_instead_of_a_folder(tmp_path):
    path = tmp_path / "x"
    path.write_text("")
    (problem,) = problems(path)
    assert "is a file" in problem


def test_other_peoples_event_files_only(tmp_path):
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"")
    assert "only 1 event file with other data" in problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("snapshot 1.pickle", "look like memory snapshots"),
        ("memory.raw.json.gz", "look like memory timelines"),
        ("host_1.2.pt.trace.json", "are profiler traces"),
        ("trace.json.gz", "are profiler traces"),
    ],
)
def test_files_that_are_not_imported(tmp_path, name, what):
    (tmp_path / name).write_text("{}")
    (finding,) = findings(tmp_path)
    assert what in finding.text
    assert f"tb-memplugin import {shlex.quote(str(tmp_path / name))} --logdir {tmp_path}" in finding.fix


def test_a_file_to_import_instead_of_a_folder(tmp_path):
    (tmp_path / "snapshot.pickle").write_text("")
    (finding,) = findings(tmp_path / "snapshot.pickle")
    assert f"tb-memplugin import {tmp_path / 'snapshot.pickle'} --logdir LOGDIR" in finding.fix


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("plugins", "contains only side files"),
        ("plugins/tb_memplugin", "contains only side files"),
        ("plugins/tb_memplugin/window-000000.mem", "is a side file"),
    ],
)
def test_a_path_too_deep(logdir, path, what):
    (finding,) = findings(logdir / "run/rank0" / path)
    assert what in finding.text
    assert finding.fix == f"Use the run's folder: {logdir / 'run'}"


def test_event_files_that_were_not_copied_along(logdir):
    (path,) = (logdir / "run/rank0").glob("*tfevents*")
    path.unlink()
    (logdir / "run/rank0/plugins/tb_memplugin/claimed").write_text("someone")
    (finding,) = [finding for finding in findings(logdir) if finding.level is not Level.FINE]
    assert "There are side files" in finding.text
    assert finding.fix.endswith(f"doctor --repair {logdir}")


def test_an_event_that_tensorboard_cannot_read_is_a_problem_of_its_file(logdir):
    (path,) = (logdir / "run/rank0").glob("*tfevents*")
    size = path.stat().st_size
    event = Event(step=1, summary=Summary(value=[Summary.Value(tag="x", simple_value=1)]))
    with path.open("ab") as file:
        file.write(record(event.SerializeToString().replace(b"\n\x01x", b"\n\x01\xff")))
    (error,) = unreadable_files(str(logdir))
    assert f"damaged at byte {size}: it is not an event" in str(error)
    assert "doctor --repair" in str(error)


def test_side_files_that_were_not_copied_along(logdir):
    (logdir / "run/rank0/plugins/tb_memplugin/window-000000.mem").unlink()
    (problem,) = problems(logdir)
    assert "window-000000.mem is missing" in problem


def test_a_worker_whose_event_file_is_missing_beside_one_that_is_whole(logdir):
    for worker in ("rank1", "rank2"):
        RunWriter(str(logdir / "run"), worker).write(BASELINE)
        (path,) = (logdir / "run" / worker).glob("*tfevents*")
        path.unlink()
    (text,) = problems(logdir)
    where = f"{logdir / 'run/rank1'} and 1 more folder"
    assert text == f"There are side files, but not the event files that belong to them: {where}."
    assert "2 recorded steps of 1 worker" in findings(logdir)[1].text


def test_files_that_cannot_be_read(logdir):
    (logdir / "run/rank0/plugins/tb_memplugin/window-000000.mem").write_bytes(b"junk")
    (problem,) = problems(logdir)
    assert "not a tb_memplugin side file" in problem


def test_an_event_file_cut_short_to_nothing(logdir):
    (path,) = (logdir / "run/rank0").glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:60])
    found = problems(logdir)
    assert "contain no step that can be read" in found[0]
    assert "ends unexpectedly" in found[1]
    path.write_bytes(b"")
    assert "is empty" in problems(logdir)[1]
    path.write_bytes(bytes(200))  # as a crash of the machine may leave it
    assert any("begins with zeros only" in text for text in problems(logdir))


def test_a_side_file_that_is_damaged_in_its_middle(logdir):
    path = logdir / "run/rank0/plugins/tb_memplugin/window-000000.mem"
    content = path.read_bytes()
    path.write_bytes(content[:30] + bytes([content[30] ^ 1]) + content[31:])
    (problem,) = problems(logdir)
    assert "is damaged" in problem


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("name", ["*tfevents*", "plugins/tb_memplugin/window-000000.mem"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(logdir, name):
    (path,) = (logdir / "run/rank0").glob(name)
    path.unlink()
    os.mkfifo(path)
    problem = [finding for finding in findings(logdir) if finding.level is Level.PROBLEM][-1]
    assert "it is a pipe" in problem.text
    assert problem.fix == "Move it elsewhere: it is no file that can be read."


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no sockets with names here")
def test_a_socket_in_the_place_of_an_event_file(logdir, monkeypatch):
    (path,) = (logdir / "run/rank0").glob("*tfevents*")
    path.unlink()
    monkeypatch.chdir(path.parent)  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    problem = [finding for finding in findings(logdir) if finding.level is Level.PROBLEM][-1]
    assert problem.fix == "Move it elsewhere: it is no file that can be read."


def test_a_strangers_event_file_beside_ours(logdir):
    from tb_memplugin.store.records import record

    (logdir / "run/rank0/events.out.tfevents.9.x").write_bytes(record(b""))
    assert problems(logdir) == []
    assert any("another writer" in finding.text for finding in findings(logdir))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("closed", ["run/rank0", "run/rank0/plugins"])
def test_a_folder_that_cannot_be_read(logdir, closed):
    (logdir / closed).chmod(0)
    try:
        assert problems(logdir) == [f"This user cannot read the folder {logdir / closed}."]
    finally:
        (logdir / closed).chmod(0o700)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(logdir):
    logdir.chmod(0o500)
    try:
        assert any("cannot write to" in finding.text for finding in findings(logdir))
    finally:
        logdir.chmod(0o700)


@pytest.mark.parametrize(
    ("version", "level"),
    [(None, Level.PROBLEM), ("2.18.0", Level.PROBLEM), ("2.19.0", Level.FINE), ("3.0", Level.FINE)],
)
def test_tensorboards_version(version, level):
    assert doctor.check_tensorboard(version).level is level


@pytest.mark.parametrize(
    ("version", "level"),
    [
        (None, Level.PROBLEM),
        ("5.29.0", Level.PROBLEM),
        ("6.31.0", Level.PROBLEM),
        ("6.31.1", Level.FINE),
        ("7.35.0", Level.FINE),
        ("8.0.0", Level.PROBLEM),
    ],
)
def test_protobufs_version(version, level):
    assert doctor.check_protobuf(version).level is level


def entry_point(name, value):
    return metadata.EntryPoint(name, value, "tensorboard_plugins")


def test_a_plugin_that_is_not_registered():
    (finding,) = doctor.check_registration([])
    assert (finding.level, "not registered" in finding.text) == (Level.PROBLEM, True)


def test_another_plugin_that_cannot_be_imported_is_a_hint():
    ours = entry_point("tb_memplugin", "tb_memplugin.server.loader:MemoryPluginLoader")
    found = list(doctor.check_registration([ours, entry_point("broken", "no.such.module:Plugin")]))
    assert [finding.level for finding in found] == [Level.FINE, Level.HINT]


def test_this_environment_is_registered_and_loads():
    found = {
        finding.text: finding for finding in doctor.check_installation() if "frontend" not in finding.text
    }
    assert all(finding.level is not Level.PROBLEM for finding in found.values()), found


def test_accounts_are_told_by_worker_and_device_with_the_worst_window(tmp_path):
    writer = RunWriter(str(tmp_path), "rank0")
    for size in (500, 625, 500):
        reading = CounterReading(0, Moment.PEAK, Counter.ALLOCATED, size)
        writer.write(trace("alloc 500 a", counters=(reading,)))
    (told,) = problems(tmp_path)
    assert told == (
        f"{tmp_path / 'rank0'}, cpu, 1 of 3 windows: accounts for 80.00 % of the allocator's bytes: "
        "125 B missing at the peak"
    )


def test_the_fullest_window_tells_what_filled_the_whole_device(tmp_path):
    writer = RunWriter(str(tmp_path), "rank0")
    for free in (300, 100, 200):
        parts = ((DevicePart.ALLOCATED, 500), (DevicePart.UNKNOWN, 500 - free), (DevicePart.FREE, free))
        whole = WholeDevice(0, Moment.END, Moment.END, parts)
        writer.write(trace("alloc 500 a device=cuda:0", whole_devices=(whole,)))
    (told,) = [finding for finding in findings(tmp_path) if "whole device" in finding.text]
    assert "400 B not known: CUDA context, NCCL, CUDA graphs, other processes, 100 B free" in told.text
    assert told.level is Level.HINT
    assert "install nvidia-ml-py where you record" in told.fix


def test_an_account_that_was_not_recorded_is_no_problem(logdir):
    (told,) = [finding.text for finding in findings(logdir) if "window:" in finding.text]
    assert told.endswith(
        "1 of 1 window: not recorded: no counter was read, as in recordings of older versions"
    )


def test_a_folder_that_was_claimed_and_never_written_to(logdir):
    claim = logdir / "run/rank0.2/plugins/tb_memplugin/claimed"
    claim.parent.mkdir(parents=True)
    claim.write_text("someone")
    (hint,) = [finding for finding in findings(logdir) if finding.level is Level.HINT]
    assert hint.text == f"{logdir}/run/rank0.2 belongs to a process that has written no step."
    assert f"rm -r {logdir}/run/rank0.2" in hint.fix
