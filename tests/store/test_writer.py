import errno
import logging
import multiprocessing
import os
import resource
import shutil
import stat
import sys
import time
import uuid
from pathlib import Path

import fsspec
import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files
from tb_memplugin.store.reader import load_window, read_recordings
from tb_memplugin.store.writer import RunWriter
from tests.traces import same, trace

STEP = trace("start 400 w category=parameter", "step 5", "alloc 100 a", "free a")
NEXT = trace("step 6", "alloc 30 a", "free a", "step 7", "alloc 40 a")
HOSTILE = [
    "<script>alert(1)</script>",
    "../../escape",
    "nul\0byte",
    "line\nbreak",
    "w" * 10_000,
    "",
    "\ud800",
]


def steps_in(path):
    return [step.metadata.step for step in read_recordings(str(path)).steps]


def files_in(path):
    return sorted(str(found.relative_to(path)) for found in Path(path).rglob("*") if found.is_file())


def test_a_window_becomes_a_side_file_and_one_summary_a_step(tmp_path):
    written = RunWriter(str(tmp_path), "rank0").write(NEXT)
    assert written.folder == str(tmp_path / "rank0")
    assert written.steps == (6, 7)
    assert written.side_file.endswith("rank0/plugins/tb_memplugin/window-000000.mem")
    assert same(load_window(written.side_file), NEXT)
    assert steps_in(tmp_path) == [6, 7]
    assert max(written.summary_bytes) < 100_000
    assert Path(written.side_file).stat().st_size == written.side_file_bytes


def test_windows_of_one_writer_share_an_event_file(tmp_path):
    writer = RunWriter(str(tmp_path), "rank0")
    first, second = writer.write(STEP), writer.write(NEXT)
    assert first.event_file == second.event_file
    assert (first.window, second.window) == (0, 1)
    assert steps_in(tmp_path) == [5, 6, 7]
    assert [Path(step.side_file or "").name for step in read_recordings(str(tmp_path)).steps] == [
        "window-000000.mem",
        "window-000001.mem",
        "window-000001.mem",
    ]


def test_nothing_is_touched_before_the_first_write(tmp_path):
    RunWriter(str(tmp_path / "new"), "rank0")
    assert not (tmp_path / "new").exists()


def test_a_second_writer_takes_the_next_folder_and_says_so_once(tmp_path, caplog):
    first, second, third = (RunWriter(str(tmp_path), "rank0") for _ in range(3))
    with caplog.at_level(logging.WARNING, "tb_memplugin"):
        assert first.write(STEP).worker == "rank0"
        assert second.write(STEP).worker == "rank0.2"
        second.write(NEXT)
        assert third.write(STEP).worker == "rank0.3"
        first.write(NEXT)
    assert len(caplog.records) == 2
    assert "rank0.2" in caplog.text
    assert [step.metadata.worker for step in read_recordings(str(tmp_path)).steps] == [
        *["rank0"] * 3,
        *["rank0.2"] * 3,
        "rank0.3",
    ]


def test_a_folder_that_is_deleted_meanwhile_is_made_again(tmp_path, caplog):
    writer = RunWriter(str(tmp_path), "w")
    writer.write(STEP)
    shutil.rmtree(tmp_path / "w")
    writer.write(STEP)
    writer.write(NEXT)
    assert steps_in(tmp_path) == [5, 6, 7]
    (told,) = caplog.messages
    assert "is no longer the folder that was written to" in told


def test_each_writer_says_that_its_folder_was_deleted(tmp_path, caplog):
    for _ in range(2):
        writer = RunWriter(str(tmp_path), "w")
        for _ in range(3):
            writer.write(STEP)
            shutil.rmtree(tmp_path / "w")
    assert ["is no longer the folder" in text for text in caplog.messages] == [True, True]


def test_a_folder_that_comes_back_is_gone_on_with_and_nothing_is_said_to_be_deleted(tmp_path, caplog):
    logdir = tmp_path / "logdir"
    writer = RunWriter(str(logdir), "w")
    writer.write(STEP)
    logdir.rename(tmp_path / "away")
    logdir.write_text("a file in its place")
    with pytest.raises(MemPluginError, match="could not be written"):
        writer.write(STEP)
    logdir.unlink()
    (tmp_path / "away").rename(logdir)
    assert writer.write(NEXT).worker == "w"
    assert steps_in(logdir) == [5, 6, 7]
    assert caplog.messages == []


def test_a_folder_that_comes_back_after_another_took_its_name_is_gone_on_with(tmp_path, caplog):
    logdir, unmounted, below = tmp_path / "logdir", tmp_path / "unmounted", tmp_path / "below"
    writer = RunWriter(str(logdir), "w")
    writer.write(STEP)
    logdir.rename(unmounted)
    assert writer.write(STEP).worker == "w"
    logdir.rename(below)
    unmounted.rename(logdir)
    assert writer.write(NEXT).worker == "w"
    assert [steps_in(logdir), steps_in(below)] == [[5, 6, 7], [5]]
    assert ["is no longer the folder" in text for text in caplog.messages] == [True]


def test_a_link_that_is_turned_to_the_folder_of_another_writer_leaves_that_alone(tmp_path, caplog):
    mine, other, link = tmp_path / "mine", tmp_path / "other", tmp_path / "link"
    mine.mkdir()
    link.symlink_to(mine)
    writer = RunWriter(str(link), "w")
    writer.write(STEP)
    RunWriter(str(other), "w").write(STEP)
    link.unlink()
    link.symlink_to(other)
    assert writer.write(NEXT).worker == "w.2"
    assert [len(list((other / "w").glob("events*"))), steps_in(mine), steps_in(other)] == [1, [5], [5, 6, 7]]
    assert "w.2" in "".join(caplog.messages)
    assert "deleted" not in "".join(caplog.messages)


def test_a_folder_with_a_strangers_event_file_is_left_alone(tmp_path):
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "events.out.tfevents.1.host").write_bytes(b"")
    assert RunWriter(str(tmp_path), "rank0").write(STEP).worker == "rank0.2"


def _write_many(logdir, barrier):
    barrier.wait()
    writer = RunWriter(logdir, "rank0")
    for _ in range(5):
        writer.write(STEP)


def test_processes_that_start_together_lose_and_double_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [context.Process(target=_write_many, args=(str(tmp_path), barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    recordings = read_recordings(str(tmp_path))
    assert not recordings.problems
    assert len(recordings.steps) == 15
    assert len({step.metadata.writer_id for step in recordings.steps}) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank0.2", "rank0.3"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_takes_a_folder_of_its_own(tmp_path):
    writer = RunWriter(str(tmp_path), "rank0")
    writer.write(STEP)
    child = os.fork()
    if child == 0:
        try:
            writer.write(NEXT)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    writer.write(NEXT)
    assert [(step.metadata.worker, step.metadata.step) for step in read_recordings(str(tmp_path)).steps] == [
        ("rank0", 5),
        ("rank0", 6),
        ("rank0", 7),
        ("rank0.2", 6),
        ("rank0.2", 7),
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_worker_names_stay_inside_the_logdir_and_keep_their_true_name(tmp_path, name):
    logdir = tmp_path / "logdir"
    written = RunWriter(str(logdir), name).write(STEP)
    assert Path(written.folder).resolve().parent == logdir.resolve()
    (step,) = read_recordings(str(logdir)).steps
    assert step.metadata.worker == name.replace("\ud800", "?")
    assert files_in(tmp_path) == [f"logdir/{path}" for path in files_in(logdir)]


def test_peaks_are_scalars_with_the_step_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorded = trace(
        "step 5", "alloc 100 a", "alloc 300 b device=cuda:0 reserved=2048", "free b reserved=2048"
    )
    folder = RunWriter(str(tmp_path), "rank0").write(recorded).folder
    accumulator = EventAccumulator(folder)
    accumulator.Reload()
    tags = accumulator.Tags()["tensors"]
    found = {tag: accumulator.Tensors(tag)[0] for tag in tags if "window" not in tag}
    assert {tag: (event.step, event.tensor_proto.float_val[0]) for tag, event in found.items()} == {
        "memory/cpu/peak_allocated": (5, 100),
        "memory/cuda:0/peak_allocated": (5, 300),
        "memory/cuda:0/peak_reserved": (5, 2048),
    }


def test_one_device_has_plain_scalar_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(RunWriter(str(tmp_path), "rank0").write(STEP).folder)
    accumulator.Reload()
    assert "memory/peak_allocated" in accumulator.Tags()["tensors"]


def test_a_folder_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(MemPluginError, match="could not be written") as caught:
        RunWriter(str(tmp_path / "taken"), "rank0").write(STEP)
    assert str(tmp_path / "taken") in caught.value.where


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_a_file_system_that_takes_nothing_is_refused_in_words():
    with pytest.raises(MemPluginError, match="could not be written"):
        RunWriter("/proc/self/runs", "rank0").write(STEP)


def test_a_folder_that_cannot_exist_is_refused_in_words(tmp_path):
    with pytest.raises(MemPluginError, match="NUL character"):
        RunWriter(f"{tmp_path}/a\0b", "rank0").write(trace("alloc 100 a"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused_in_words(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(MemPluginError, match="could not be written"):
            RunWriter(str(tmp_path), "rank0").write(STEP)
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def _write_on_a_full_disk(logdir, most_bytes, queue):
    import signal

    many_steps = trace(
        *(line for step in range(40) for line in (f"step {step}", f"alloc {step + 1} b{step}"))
    )
    writer = RunWriter(logdir, "rank0")
    writer.write(STEP)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    try:
        writer.write(many_steps)
        queue.put("written")
    except MemPluginError as error:
        queue.put(error.what)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.write(NEXT)


@pytest.mark.skipif(sys.platform == "win32", reason="limits on file sizes are POSIX")
@pytest.mark.parametrize("most_bytes", [100, 10_000], ids=["side file fails", "event file fails"])
def test_where_the_disk_is_full_earlier_and_later_steps_stay_whole(tmp_path, most_bytes):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_write_on_a_full_disk, args=(str(tmp_path), most_bytes, queue))
    process.start()
    assert "could not be written" in queue.get(timeout=60)
    process.join(60)
    recordings = read_recordings(str(tmp_path))
    assert [step.metadata.step for step in recordings.steps] == [5, 6, 7]
    assert not recordings.problems
    side_files = [path for path in files_in(tmp_path) if "plugins" in path and not path.endswith("claimed")]
    assert [Path(path).name for path in side_files] == ["window-000000.mem", "window-000002.mem"]


def test_an_event_file_that_cannot_grow_takes_the_side_file_back(tmp_path, monkeypatch):
    def full(descriptor, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = RunWriter(str(tmp_path), "rank0")
    writer.write(STEP)
    before = files_in(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("tb_memplugin.store.growing_file._write", full)
        with pytest.raises(MemPluginError, match="No space left on device"):
            writer.write(NEXT)
    assert files_in(tmp_path) == before
    assert writer.write(NEXT).window == 2  # no number is used again


@pytest.fixture
def memory_url():
    url = f"memory://{uuid.uuid4().hex}/runs"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


def test_remote_logdirs_take_one_event_file_a_window(memory_url):
    writer = RunWriter(memory_url, "rank0")
    written, after = writer.write(STEP), writer.write(NEXT)
    assert written.event_file != after.event_file
    assert written.event_file < after.event_file
    assert steps_in(memory_url) == [5, 6, 7]
    assert same(load_window(after.side_file), NEXT)
    assert RunWriter(memory_url, "rank0").write(STEP).worker == "rank0.2"


def test_a_path_whose_client_is_not_installed_is_refused_in_words():
    with pytest.raises(MemPluginError, match="not installed"):
        RunWriter("nosuchprotocol://bucket/x", "rank0").write(STEP)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "Free some disk space"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EROFS, "not read-only"),
        (errno.EBUSY, "the object store works"),  # so s3fs tells of 503
        (errno.EACCES, "that this process can write to"),
    ],
)
def test_the_error_of_a_window_says_what_to_do_about_its_cause(tmp_path, monkeypatch, number, fix):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tb_memplugin.store.files.write_new", fail)
    with pytest.raises(MemPluginError) as caught:
        RunWriter(str(tmp_path), "rank0").write(STEP)
    assert fix in caught.value.fix
    assert os.strerror(number) in caught.value.what


def test_a_durable_window_is_on_the_disk_when_write_returns(tmp_path, monkeypatch):
    flushed, flush_path = list[str](), files.flush_path

    def slowly(path):
        time.sleep(0.02)
        flush_path(path)
        flushed.append(path)

    monkeypatch.setattr(files, "flush_path", slowly)
    written = RunWriter(str(tmp_path), "rank0", durable=True).write(STEP)
    folders = {written.folder, str(Path(written.side_file).parent)}
    assert {written.side_file, written.event_file} | folders <= set(flushed)
