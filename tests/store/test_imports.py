import shutil

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.paths import generation, generation_folder, superseded
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.worker_folder import claim_folder
from tests.special_files import KINDS
from tests.traces import trace

OLD = trace("step 1", "alloc 5 a")
NEW = trace("step 2", "alloc 6 a", "step 3", "alloc 7 b")


def steps_in(path):
    return [(step.metadata.worker, step.metadata.step) for step in read_recordings(str(path)).steps]


def test_the_new_takes_the_place_of_the_old(tmp_path):
    first = write_import(str(tmp_path), "w", "/a/w.pickle", OLD)
    second = write_import(str(tmp_path), "w", "/a/w.pickle", NEW)
    assert (first.replaced, second.replaced) == (False, True)
    assert [path.name for path in tmp_path.iterdir()] == ["w.v2"]
    assert steps_in(tmp_path) == [("w", 2), ("w", 3)]


def test_an_import_that_fails_leaves_the_old_one_and_nothing_of_the_new(tmp_path, monkeypatch):
    write_import(str(tmp_path), "w", "/a/w.pickle", OLD)

    def interrupted(stream, *_):
        stream.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tb_memplugin.store.writer.write_window", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_import(str(tmp_path), "w", "/a/w.pickle", NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
    assert steps_in(tmp_path) == [("w", 1)]


def test_what_a_killed_import_left_is_cleared_away_by_the_next(tmp_path):
    write_import(str(tmp_path), "w", "/a/w.pickle", OLD)
    half = tmp_path / "w.v2/plugins/tb_memplugin"
    half.mkdir(parents=True)
    (half / "claimed").write_text("someone\n/a/w.pickle")
    (half / "window-000000.mem").write_bytes(b"half")
    assert steps_in(tmp_path) == [("w", 1)]
    write_import(str(tmp_path), "w", "/a/w.pickle", NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["w.v3"]


@pytest.mark.parametrize("claim", [b"someone\n/b/w.pickle", b""], ids=["claimed", "claim not written yet"])
def test_another_import_that_takes_the_name_meanwhile_keeps_it(tmp_path, monkeypatch, claim):
    side = tmp_path / "w/plugins/tb_memplugin"
    side.mkdir(parents=True)

    def late(folder, writer_id, origin, state):
        (side / "claimed").write_bytes(claim)
        return claim_folder(folder, writer_id, origin, state)

    def filled(seconds):
        (side / "claimed").write_bytes(b"someone\n/b/w.pickle")

    monkeypatch.setattr("tb_memplugin.store.imports.claim_folder", late)
    monkeypatch.setattr("tb_memplugin.store.imports.time.sleep", filled)
    assert write_import(str(tmp_path), "w", "/a/w.pickle", OLD).written.worker == "w.2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "w.2"]


def test_a_claim_that_a_killed_import_never_filled_belongs_to_nobody(tmp_path):
    write_import(str(tmp_path), "w", "/a/w.pickle", OLD)
    half = tmp_path / "w.v2/plugins/tb_memplugin"
    half.mkdir(parents=True)
    (half / "claimed").write_bytes(b"")
    done = write_import(str(tmp_path), "w", "/a/w.pickle", NEW)
    assert (done.written.worker, done.replaced) == ("w", True)
    assert [path.name for path in tmp_path.iterdir()] == ["w.v3"]
    assert steps_in(tmp_path) == [("w", 2), ("w", 3)]


def test_imports_of_one_file_under_two_names_become_one_again(tmp_path):
    write_import(str(tmp_path), "w", "/b/w.pickle", OLD)
    assert write_import(str(tmp_path), "w", "/a/w.pickle", OLD).written.worker == "w.2"
    shutil.rmtree(tmp_path / "w")
    done = write_import(str(tmp_path), "w", "/a/w.pickle", NEW)
    assert (done.written.worker, done.replaced) == ("w", True)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_what_others_put_beside_an_import_stays(tmp_path):
    write_import(str(tmp_path), "w", "/a/w.pickle", OLD)
    (tmp_path / "w" / "notes.txt").write_text("mine")
    write_import(str(tmp_path), "w", "/a/w.pickle", NEW)
    write_import(str(tmp_path), "w", "/a/w.pickle", OLD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "w.v3"]
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["notes.txt"]
    assert steps_in(tmp_path) == [("w", 1)]


def test_a_strangers_event_file_keeps_its_folder(tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "events.out.tfevents.1.host").write_bytes(b"")
    assert write_import(str(tmp_path), "w", "/a/w.pickle", OLD).written.worker == "w.2"


def test_remote_logdirs_too():
    import uuid

    import fsspec

    url = f"memory://{uuid.uuid4().hex}/run"
    write_import(url, "w", "/a/w.pickle", OLD)
    assert write_import(url, "w", "/a/w.pickle", NEW).replaced
    assert steps_in(url) == [("w", 2), ("w", 3)]
    fsspec.filesystem("memory").rm(url, recursive=True)


def test_a_run_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(MemPluginError, match="could not be written"):
        write_import(str(tmp_path / "run"), "w", "/a/w.pickle", OLD)


def test_folders_of_imports_by_their_number():
    assert [generation_folder("a.b", number) for number in (1, 2)] == ["a.b", "a.b.v2"]
    assert [generation(name, "a") for name in ("a", "a.v2", "a.v10", "a.v0", "a.vx", "ab", "a.2")] == [
        *(1, 2, 10),
        *(0, 0, 0, 0),
    ]


def test_the_newest_of_one_worker_in_one_run_counts():
    workers = {"r/w": "w", "r/w.v2": "w", "r/w.v10": "w", "s/w": "w", "r/copy": "w", "r/x.v2": "x", "w": "w"}
    assert superseded(workers) == {"r/w", "r/w.v2"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_whose_claim_is_no_file_belongs_to_another(tmp_path, kind):
    side = tmp_path / "w/plugins/tb_memplugin"
    side.mkdir(parents=True)
    KINDS[kind](side / "claimed")
    write_import(str(tmp_path), "w", "/a/w.pickle", OLD)
    write_import(str(tmp_path), "w", "/a/w.pickle", NEW)
    assert steps_in(tmp_path) == [("w.2", 2), ("w.2", 3)]
