"""Figures of steps come back from an event file as they were, small, and refused where damaged."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tensorboard.compat.proto.event_pb2 import Event

from tb_memplugin.commands import main
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto import recording_pb2 as pb
from tb_memplugin.store import step_records
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.records import records
from tb_memplugin.store.step_records import SeriesReader, pack_figures, read_figures, read_series
from tb_memplugin.store.writer import SCALARS_EACH, RunWriter, StepsWriter
from tb_memplugin.trace.step_figures import joined
from tests.cli import CliRunner
from tests.step_figures import figures, same_figures
from tests.traces import trace


def values_of(path):
    """Step and value of every value in an event file, by tag."""
    data = Path(path).read_bytes()
    found: dict[str, list] = {}
    for record, _, _ in records(lambda offset, count: data[offset : offset + count], len(data)):
        event = Event.FromString(record)
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value))
    return found


def points(found, tag):
    return [(step, value.tensor.float_val[0]) for step, value in found[tag]]


def test_every_column_comes_back():
    there = figures([5, 9, 2], first=40, phases={"forward": [5, 0, 2], "x" * 500: [0, 1, 0]}, notes=["told"])
    back = read_figures(pack_figures(there))
    assert same_figures(back, there)
    assert [(note.code, note.level) for note in back.notes] == [("steps_missing", "warning")]


def test_a_note_of_an_older_version_is_its_text():
    record = pb.StepRecord.FromString(pack_figures(figures([5], notes=["told"])))
    message = pb.StepFigures.FromString(zstandard.ZstdDecompressor().decompress(record.figures))
    del message.note_codes[:]
    raw = message.SerializeToString()
    record.raw_size, record.figures = len(raw), zstandard.compress(raw)
    (note,) = read_figures(record.SerializeToString()).notes
    assert (note, note.code, note.level) == ("told", "other", "warning")


def test_a_process_has_no_reserve_afterwards_either():
    there = figures([5], device="process")
    back = read_figures(pack_figures(there))
    assert same_figures(back, there)
    assert back.devices[0].fragmentation is None


def test_records_that_unpack_to_far_more_than_they_have_are_refused(monkeypatch):
    data = pack_figures(figures(np.zeros(10_000)))
    unpacked = pb.StepRecord.FromString(data).raw_size
    assert unpacked > 40 * len(data)
    monkeypatch.setattr(step_records, "FIGURES_OF_ANY_SERIES", 2 * unpacked)
    series = SeriesReader("a")
    assert [len(series.read(data)) for _ in range(2)] == [10_000, 10_000]
    with pytest.raises(UnreadableFileError, match="far more than they have"):
        [series.read(data) for _ in range(8)]


def test_parts_join_and_a_phase_that_a_part_lacks_did_not_run_there():
    whole = joined(
        [figures([5, 9], phases={"forward": [5, 9]}), figures([7], first=2, phases={"validation": [7]})]
    )
    assert whole.steps.tolist() == [0, 1, 2]
    assert whole.devices[0].peak.tolist() == [5, 9, 7]
    assert [(phase.name, phase.counts.tolist()) for phase in whole.phases] == [
        ("forward", [1, 1, 0]),
        ("validation", [0, 0, 1]),
    ]
    assert whole.devices[0].fragmentation is not None
    assert whole.devices[0].fragmentation.tolist() == [1 - 2 / 10, 1 - 4 / 18, 1 - 3 / 14]


def test_steps_that_were_written_twice_count_once_and_that_is_told():
    parts = [figures([5, 9], notes=["told"]), figures([9, 2, 3], first=1, phases={"forward": [9, 2, 3]})]
    whole = joined([*parts, figures([3], first=3), figures([4], first=4)])
    assert whole.steps.tolist() == [0, 1, 2, 3, 4]
    assert whole.devices[0].peak.tolist() == [5, 9, 2, 3, 4]
    assert [phase.counts.tolist() for phase in whole.phases] == [[0, 0, 1, 1, 0]]
    assert whole.notes == (
        "told",
        "2 steps were written twice, after an error of the file system. One copy counts.",
    )


def test_records_that_a_copy_put_in_another_order_are_put_in_that_of_their_steps():
    whole = joined([figures([7, 8], first=4), figures([5, 6], first=2), figures([9, 4])])
    assert whole.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.devices[0].peak.tolist() == [9, 4, 5, 6, 7, 8]
    assert whole.notes == ()


@pytest.mark.parametrize(
    "parts",
    [
        [replace(figures([1, 2]), steps=np.array([3, 2]))],
        [figures([1]), figures([1], first=1, device="cuda:1")],
    ],
)
def test_parts_that_do_not_belong_together_are_refused(parts):
    with pytest.raises(ValueError, match=r"rise|devices"):
        joined(parts)


def test_what_is_damaged_or_newer_is_refused():
    whole = pack_figures(figures([1, 2, 3], phases={"forward": [1, 2, 3]}))
    for cut in range(0, len(whole), 3):
        with pytest.raises(UnreadableFileError):
            read_figures(whole[:cut] if cut else b"\xff")
    with pytest.raises(UnreadableFileError, match="version 99"):
        read_figures(pb.StepRecord(version=99).SerializeToString())
    with pytest.raises(UnreadableFileError, match="impossible size"):
        read_figures(pb.StepRecord(version=1, raw_size=1 << 40).SerializeToString())
    with pytest.raises(UnreadableFileError):
        read_series(b"\xff\xff")


def test_columns_of_different_lengths_are_refused():
    record = pb.StepRecord.FromString(pack_figures(figures([1, 2])))
    inner = pb.StepFigures.FromString(zstandard.ZstdDecompressor().decompress(record.figures))
    inner.durations_ns.append(1)
    raw = inner.SerializeToString()
    record.raw_size, record.figures = len(raw), zstandard.ZstdCompressor().compress(raw)
    with pytest.raises(UnreadableFileError, match="3 values for 2 steps"):
        read_figures(record.SerializeToString())


def test_the_writer_streams_records_and_scalars_into_a_folder_beside_the_workers(tmp_path):
    writer = StepsWriter(str(tmp_path), "rank0", 1_000_000_000, "2.13.0")
    path = writer.write(figures([5, 9]))
    assert writer.write(figures([4], first=2)) == path
    assert Path(path).parent == tmp_path / "rank0.steps"
    found = values_of(path)
    assert [step for step, _ in found["memory/steps"]] == [1, 2]
    assert points(found, "memory/peak_allocated") == [(0, 5), (1, 9), (2, 4)]
    assert points(found, "memory/peak_reserved") == [(0, 10), (1, 18), (2, 8)]
    _, value = found["memory/steps"][0]
    series = read_series(value.metadata.plugin_data.content)
    assert (series.worker, series.torch, series.epoch_ns) == ("rank0", "2.13.0", 1_000_000_000)


def test_after_a_thousand_steps_a_record_has_one_point_the_highest(tmp_path):
    writer = StepsWriter(str(tmp_path), "rank0", 0)
    writer.write(figures([1] * (SCALARS_EACH - 1)))
    path = writer.write(figures([2, 3, 9, 4], first=SCALARS_EACH - 1))
    last = points(values_of(path), "memory/peak_allocated")[-2:]
    assert last == [(SCALARS_EACH - 1, 2), (SCALARS_EACH + 1, 9)]


def test_a_second_training_in_the_same_folder_leaves_the_first_alone(tmp_path, caplog):
    StepsWriter(str(tmp_path), "rank0", 0).write(figures([1]))
    path = StepsWriter(str(tmp_path), "rank0", 0).write(figures([2]))
    assert Path(path).parent == tmp_path / "rank0.2.steps"
    assert "rank0.2.steps" in caplog.text


def test_what_is_said_of_the_folders_of_a_worker_is_said_once_for_its_windows_and_its_steps(tmp_path, caplog):
    window = trace("step 6", "alloc 30 a", "free a")
    RunWriter(str(tmp_path), "rank0").write(window)
    StepsWriter(str(tmp_path), "rank0", 0).write(figures([1]))
    writer, steps = RunWriter(str(tmp_path), "rank0"), StepsWriter(str(tmp_path), "rank0", 0)
    writer.write(window)
    steps.write(figures([1]))
    assert [text.partition("rank0 ")[2].split()[:2] for text in caplog.messages] == [["already", "contains"]]
    caplog.clear()
    shutil.rmtree(tmp_path)
    writer.write(window)
    steps.write(figures([2], first=1))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["rank0", "rank0.steps"]
    assert [text.partition("rank0.2 ")[2].split()[:3] for text in caplog.messages] == [["is", "no", "longer"]]


def test_a_folder_that_is_deleted_meanwhile_is_made_again(tmp_path, caplog):
    writer = StepsWriter(str(tmp_path), "rank0", 0)
    writer.write(figures([1]))
    shutil.rmtree(tmp_path / "rank0.steps")
    path = writer.write(figures([2], first=1))
    assert points(values_of(path), "memory/peak_allocated") == [(1, 2)]
    assert "later recordings go into a new folder" in caplog.text
    assert "already contains" not in caplog.text


def test_a_hundred_thousand_steps_take_some_forty_bytes_each(tmp_path):
    random = np.random.default_rng(0)
    writer, path = StepsWriter(str(tmp_path), "rank0", 0), ""
    for record in range(50):
        peaks = (40 << 30) + random.integers(0, 200, 100) * (1 << 19)
        path = writer.write(figures(peaks, first=100 * record, phases={"forward": peaks, "backward": peaks}))
    later = Path(path).stat().st_size
    for record in range(50, 100):
        peaks = (40 << 30) + random.integers(0, 200, 100) * (1 << 19)
        writer.write(figures(peaks, first=100 * record, phases={"forward": peaks, "backward": peaks}))
    assert (Path(path).stat().st_size - later) / 5_000 < 40


def test_figures_are_read_back_from_a_folder_whole(tmp_path):
    writer = StepsWriter(str(tmp_path / "run"), "rank0", 0)
    writer.write(figures([5, 9]))
    writer.write(figures([4], first=2))
    found = read_recordings(str(tmp_path))
    assert (found.steps, found.problems) == ((), ())
    (watched,) = found.watched
    assert (watched.worker, watched.folder) == ("rank0", str(tmp_path / "run" / "rank0.steps"))
    assert watched.figures.devices[0].peak.tolist() == [5, 9, 4]


def test_commands_tell_that_there_are_only_figures(tmp_path):
    StepsWriter(str(tmp_path), "rank0", 0).write(figures([5, 9]))
    refused = CliRunner().invoke(main, ["peak", str(tmp_path)])
    assert refused.exit_code != 0
    assert "only MemoryMonitor figures, of 2 steps" in refused.output
    told = CliRunner().invoke(main, ["doctor", str(tmp_path)]).output
    assert "MemoryMonitor watched 2 steps of 1 worker" in told
    assert "contain no step that can be read" not in told


def test_a_file_with_steps_that_were_written_twice_is_read(tmp_path):
    writer = StepsWriter(str(tmp_path), "rank0", 0)
    writer.write(figures([5, 9]))
    writer.write(figures([9, 2, 3], first=1))
    found = read_recordings(str(tmp_path))
    assert found.problems == ()
    (watched,) = found.watched
    assert watched.figures.devices[0].peak.tolist() == [5, 9, 2, 3]
    assert watched.figures.notes == (
        "1 step was written twice, after an error of the file system. One copy counts.",
    )


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_steps_before_the_first_that_contradicts_them_are_read(tmp_path, count):
    writer = StepsWriter(str(tmp_path), "rank0", 0)
    for number in range(count):
        writer.write(figures([100 + number], first=number))
    for number in range(count, 9):
        writer.write(figures([5], first=number, device="cuda:1"))
    found = read_recordings(str(tmp_path))
    (watched,), (problem,) = found.watched, found.problems
    assert watched.figures.devices[0].peak.tolist() == [100 + number for number in range(count)]
    assert "records have different devices" in problem.what
    assert problem.fix.startswith("Keep the file")
