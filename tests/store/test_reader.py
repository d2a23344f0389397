"""Event files with records that are damaged, foreign, or there twice."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_BLOB_SEQUENCE, Summary

from tb_memplugin import load
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.store import reader
from tb_memplugin.store.event_file import blob_value
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.reader import load_window, read_recordings, walk_logdir
from tb_memplugin.store.records import record, records
from tb_memplugin.store.repair import repair
from tb_memplugin.store.windows import write_window
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.step_figures import figures
from tests.traces import EPOCH, same, trace


@pytest.fixture
def event_file(tmp_path):
    """The event file of windows with steps 0, 1, 2 and 3."""
    writer = RunWriter(str(tmp_path), "w")
    written = [writer.write(trace(f"step {step}", f"alloc {step + 1} a")) for step in range(4)]
    return Path(written[0].event_file)


def parts(path):
    """The records of a file as bytes: the first, which names the format, and one for each step."""
    content = path.read_bytes()
    found = records(lambda offset, count: content[offset : offset + count], len(content))
    return [content[begin:end] for _, begin, end in found]


def read(path):
    """The peaks that are read, and what is said of the file."""
    found = read_recordings(str(path.parent.parent))
    steps = {step.metadata.step: step.summary().devices[0].stats.peak_bytes for step in found.steps}
    return steps, [problem.what for problem in found.problems]


def test_side_files_that_were_swapped_between_runs_without_a_clock_are_refused(tmp_path):
    sizes = {"a": 512, "b": 2048}
    for run, size in sizes.items():
        source = {
            "segments": [],
            "device_traces": [
                [{"action": "alloc", "addr": 1 << 20, "size": size, "stream": 0, "frames": []}]
            ],
        }
        path = tmp_path / f"{run}.pickle"
        path.write_bytes(pickle.dumps(source))
        write_import(str(tmp_path / "runs"), run, str(path), load(path))
    steps = {step.metadata.worker: step for step in read_recordings(str(tmp_path / "runs")).steps}
    assert steps["a"].metadata.epoch_ns == steps["b"].metadata.epoch_ns
    for run, size in sizes.items():
        assert load_window(steps[run].side_file or "", steps[run].metadata).events.bytes.tolist() == [size]
    first, second = (Path(steps[run].side_file or "") for run in sizes)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    for step in steps.values():
        with pytest.raises(UnreadableFileError, match="belongs to another window"):
            load_window(step.side_file or "", step.metadata)


def test_a_side_file_of_an_older_version_that_names_no_writer_is_read(event_file):
    (step, *_) = read_recordings(str(event_file.parent)).steps
    with Path(step.side_file or "").open("wb") as stream:
        write_window(stream, trace("step 0", "alloc 1 a"))
    assert same(load_window(step.side_file or "", step.metadata), trace("step 0", "alloc 1 a"))


def test_records_that_were_written_twice_are_there_once(event_file):
    first, *steps = parts(event_file)
    event_file.write_bytes(first + b"".join(step * 2 for step in steps) + b"".join(reversed(steps)))
    assert len(read_recordings(str(event_file.parent)).steps) == 4
    assert read(event_file) == ({0: 1, 1: 2, 2: 3, 3: 4}, [])


def test_a_window_that_is_in_two_event_files_of_its_writer_is_there_once(event_file):
    event_file.with_name(event_file.name.replace(".000000.", ".000001.")).write_bytes(event_file.read_bytes())
    assert read(event_file) == ({0: 1, 1: 2, 2: 3, 3: 4}, [])


@pytest.mark.parametrize("at", [2, 100], ids=["head", "data"])
def test_after_a_damaged_record_the_others_are_read_and_the_place_is_named(event_file, at):
    found = parts(event_file)
    begin = len(found[0] + found[1])
    damaged = bytearray(event_file.read_bytes())
    damaged[begin + at] ^= 1
    event_file.write_bytes(damaged)
    where = f"at byte {begin}, up to {begin + len(found[2])}"
    assert read(event_file) == (
        {0: 1, 2: 3, 3: 4},
        [f"The event file is damaged {where}. The records around that are read."],
    )


def test_a_torn_and_a_foreign_record_are_left_out_and_counted(event_file):
    first, *steps = parts(event_file)
    event_file.write_bytes(first + steps[0][:-9] + steps[1] + b"foreign" + steps[2] + steps[3])
    begin = len(first)
    where = f"at byte {begin}, up to {begin + len(steps[0]) - 9}, and 7 bytes further on"
    assert read(event_file) == (
        {1: 2, 2: 3, 3: 4},
        [f"The event file is damaged {where}. The records around that are read."],
    )


def test_a_record_that_is_no_event_is_named_and_the_others_are_read(event_file):
    first, *steps = parts(event_file)
    event_file.write_bytes(first + record(b"\xff") + b"".join(steps))
    assert read(event_file) == ({0: 1, 1: 2, 2: 3, 3: 4}, ["A record is not an event."])


def test_records_of_a_monitor_that_were_written_twice_or_damaged_cost_no_others(tmp_path):
    writer = StepsWriter(str(tmp_path), "w", EPOCH)
    path = Path([writer.write(figures([10 + step], first=step)) for step in range(4)][-1])
    first, *found = parts(path)
    series, scalars = found[::2], found[1::2]
    assert len(series) == len(scalars) == 4
    path.write_bytes(first + series[0] + series[0] + series[1][:-1] + b"\0" + series[2] + series[3])
    recordings = read_recordings(str(tmp_path))
    assert recordings.watched[0].figures.steps.tolist() == [0, 2, 3]
    assert recordings.watched[0].figures.devices[0].peak.tolist() == [10, 12, 13]
    assert [problem.what[:25] for problem in recordings.problems] == ["The event file is damaged"]


def test_of_many_folders_without_a_recording_no_more_are_looked_into(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MOST_FOREIGN_FOLDERS", 5)
    for name in "abcd":  # with the folder itself these are five
        (tmp_path / name).mkdir()
    assert read_recordings(str(tmp_path)).steps == ()
    (tmp_path / "e").mkdir()
    for search in (read_recordings, lambda path: list(repair(path)), lambda path: list(walk_logdir(path))):
        with pytest.raises(MemPluginError, match="None of the first 5 folders in it has a recording"):
            search(str(tmp_path))
    RunWriter(str(tmp_path / "a"), "w").write(trace("alloc 1 a"))
    (tmp_path / "f").mkdir()
    assert len(read_recordings(str(tmp_path)).steps) == 1


def test_a_record_of_our_name_without_content_is_no_step(tmp_path):
    """As of another program that took the name: by default, all fields of a message are zero."""
    writer = RunWriter(str(tmp_path), "w")
    path = Path(writer.write(trace("step 5", "alloc 100 a")).event_file)
    with path.open("ab") as stream:
        value = blob_value("memory/x", b"", b"x", DATA_CLASS_BLOB_SEQUENCE)
        stream.write(record(Event(step=7, summary=Summary(value=[value])).SerializeToString()))
    recordings = read_recordings(str(tmp_path))
    assert [step.metadata.step for step in recordings.steps] == [5]
    (problem,) = recordings.problems
    assert (problem.where, problem.what) == (
        str(path),
        "The description of a step is damaged (it has no version).",
    )
