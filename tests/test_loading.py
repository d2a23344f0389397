"""`tb_memplugin.load`: one call for whatever wrote the file."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tracemalloc
import zipfile

import pytest
import torch
from torch.cuda import _memory_viz as memory_viz

from tb_memplugin import MemPluginError, load
from tb_memplugin.analysis.moments import peak
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.snapshot.trace import as_pickled
from tb_memplugin.store.writer import RunWriter
from tests.mutations.kinds import kineto
from tests.snapshots import block, entries, segment, snapshot
from tests.traces import trace


def test_a_recorded_window_and_a_snapshot_load_the_same_way(tmp_path):
    written = RunWriter(str(tmp_path), "w").write(trace("alloc 100 a", "alloc 50 b", "free a"))
    assert peak(load(written.side_file)).bytes == 150


def test_what_is_neither_is_refused_by_name(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a pickle")
    with pytest.raises(MemPluginError, match=r"notes\.txt"):
        load(path)


def test_a_snapshot_file(tmp_path):
    path = tmp_path / "snapshot.pickle"
    content = snapshot(
        [segment(block(1000, 300))], entries("alloc 1000 300", "alloc 1512 90", "free_completed 1512 90")
    )
    path.write_bytes(pickle.dumps(content))
    assert peak(load(path), "cuda:0").bytes == 390


CONTENT = snapshot([segment(block(1000, 300))], entries("alloc 1000 300", "alloc 1512 90"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["json", "pickle"])
def test_the_content_decides_not_the_name(tmp_path, kind, packed):
    data = json.dumps(CONTENT).encode() if kind == "json" else pickle.dumps(CONTENT)
    path = tmp_path / "anything.txt"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert peak(load(path, device_type="xpu"), "xpu:0").bytes == 390


def test_a_snapshot_in_memory():
    assert peak(load(CONTENT), "cuda:0").bytes == 390


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_json_in_another_encoding(tmp_path, encoding):
    path = tmp_path / "snapshot.json"
    path.write_bytes(json.dumps(CONTENT).encode(encoding))
    assert peak(load(path)).bytes == 390


@pytest.mark.parametrize("kind", ["json", "pickle", "in memory"])
@pytest.mark.parametrize("content", [[], [[]], [[], []], [[], [], []]], ids=len)
def test_traces_alone_without_the_snapshot_around_them(tmp_path, content, kind):
    """The entries of one device, or one list for each of 1 to 3 devices, of which the last has them."""
    one = entries(*(f"alloc {1000 * place} 90" for place in range(1, 5)))
    content = one if content == [] else [*content[:-1], one]
    path = tmp_path / "traces"
    path.write_bytes(pickle.dumps(content) if kind == "pickle" else json.dumps(content).encode())
    trace = load(content if kind == "in memory" else path)
    assert trace.live(0).tolist() == [0, 90, 180, 270, 360]
    assert "the snapshot has no segments" in trace.notes[0]


def test_pools_are_tuples_again():
    made = json.loads(json.dumps(CONTENT))
    made["device_traces"][0][0]["pool_id"] = made["segments"][0]["segment_pool_id"] = [0, 1]
    as_pickled(made, "x", 1000)
    assert made["device_traces"][0][0]["pool_id"] == (0, 1)


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as written:
        for name, data in members.items():
            written.writestr(name, data)
    return buffer.getvalue()


def saved(content: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "wrap",
    [lambda content: content, lambda content: {"step": 3, "snapshot": content}, lambda content: (content, 3)],
)
@pytest.mark.parametrize(
    "data_of",
    [
        saved,
        lambda content: archive({"notes.txt": b"x", "snapshot.pickle": pickle.dumps(content)}),
        lambda content: archive({"snapshot.json": json.dumps(content).encode()}),
        lambda content: gzip.compress(pickle.dumps(content)),
    ],
)
def test_a_snapshot_in_an_archive_or_a_container(tmp_path, data_of, wrap):
    path = tmp_path / "file"
    path.write_bytes(data_of(wrap(CONTENT)))
    assert (peak(load(path)).bytes, load(path).notes) == (390, load(CONTENT).notes)


@pytest.mark.parametrize("name", [*"abcdefg"])
@pytest.mark.parametrize("plot", [memory_viz.trace_plot, memory_viz.segment_plot])
def test_the_snapshot_in_a_page_of_memory_viz(tmp_path, plot, name):
    """Of any length: base64 writes three bytes as four, and memory_viz fills up with zeros."""
    content = {**CONTENT, "external_annotations": [], "name": name * ord(name)}
    path = tmp_path / "page.html"
    path.write_text(plot(content))
    assert (peak(load(path)).bytes, load(path).notes) == (390, load(CONTENT).notes)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "empty"),
        (b"PK\x03\x04rest", "zip archive is damaged"),
        (archive({"a": b"", "b": b""}), "zip archive has 0 pickles"),
        (archive({"a.pkl": pickle.dumps(CONTENT), "b.pkl": b"N."}), "zip archive has 2 pickles"),
        (archive({"a.pkl": b"N."}, zipfile.ZIP_DEFLATED), "file in the zip archive is compressed"),
        (pickle.dumps(7), "contains an object of type int"),
        (saved(torch.nn.Linear(2, 2).state_dict()), "tensors or objects, as a checkpoint"),
        (saved(CONTENT, _use_new_zipfile_serialization=False), "written by torch.save in its old form"),
        (pickle.dumps({"rank0": CONTENT, "rank1": CONTENT}), "2 snapshots: rank0, rank1"),
        (b"\n<!DOCTYPE html><p>Not found", "a page or XML"),
        (memory_viz.trace_plot(CONTENT).encode()[:-400], "snapshot in the page is damaged"),
        (b"BZh91AY", "compressed with bzip2"),
        (b"version https://git-lfs.github.com/spec/v1", "pointer of Git LFS"),
        (b"\x18\0\0\0\0\0\0\0abcd\x09\0\0\0\0\0\0\0\0\x1a\x0dbrain.Event:2", "event file"),
        (b"\x7fELF", "kind of this file is not known"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "kind of this file is not known"),
        (b"Peak of the run\n12 MiB\n", "kind of this file is not known"),
        (b"class Net:\n    pass\n", "kind of this file is not known"),
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"PNG\n.", "persistent id 'NG'"),
        (b'{"a": 1}', "keys 'a'"),
        (b'{"traceEvents": [', "truncated"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1" + b"0" * 5000 + b"]", "JSON"),
        (b"[[1, 2], [[1], [2]]]", "already summed over time"),
        (gzip.compress(b"{}" * 90, mtime=0)[:-9], "truncated"),  # the names of tests hold no time of day
        (gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "compressed twice"),
        (b"\x1f\x8b\x08garbage", "gzip"),
        (pickle.dumps(CONTENT)[:-20], "truncated|damaged|claims"),
    ],
)
def test_a_foreign_file_is_told_apart(tmp_path, data, told):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(UnreadableFileError, match=told) as caught:
        load(path)
    assert caught.value.where == str(path)
    assert caught.value.fix


def test_a_runs_folder_is_its_window_with_the_highest_peak(tmp_path):
    writer = RunWriter(str(tmp_path), "w")
    writer.write(trace("alloc 100 a", "free a"))
    assert (peak(load(tmp_path)).bytes, load(tmp_path).notes) == (100, ())
    highest = writer.write(trace("alloc 300 a", "free a")).side_file
    writer.write(trace("alloc 200 a", "free a"))
    assert peak(load(tmp_path)).bytes == 300
    assert load(tmp_path).notes == (f"{highest} has the highest peak of 3 windows.",)


def test_a_folder_without_a_recording_is_refused_with_the_command_to_use(tmp_path):
    with pytest.raises(UnreadableFileError, match="tb-memplugin doctor"):
        load(tmp_path)


@pytest.mark.parametrize("opening", [b"{", b"\x80\x04]"])
def test_a_gzip_bomb_stops_at_the_limit(tmp_path, opening, monkeypatch):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(opening + (b" " if opening == b"{" else b"N0") * 5_000_000))
    with pytest.raises(UnreadableFileError, match="larger than the limit of 1,000,000 bytes"):
        load(path, limit_bytes=1_000_000)
    monkeypatch.setenv("TB_MEMPLUGIN_LIMIT_BYTES", "1000000")
    with pytest.raises(UnreadableFileError, match="TB_MEMPLUGIN_LIMIT_BYTES"):
        load(path)


def test_a_wrong_limit_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("TB_MEMPLUGIN_LIMIT_BYTES", "lots")
    with pytest.raises(MemPluginError, match="'lots'"):
        load(tmp_path / "x")


def test_progress_ends_at_the_files_size(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(CONTENT))
    told = []
    load(path, progress=lambda done, total: told.append((done, total)))
    size = path.stat().st_size
    assert told[-1] == (size, size)


def test_infinities_of_cpp_are_put_up_with(tmp_path):
    path = tmp_path / "trace.json"
    event = (
        '{"ph":"i","name":"[memory]","ts":1,"args":{"Bytes":5,"Addr":9,"Total Allocated":5,"Device Type":0}}'
    )
    path.write_text(f'{{"traceEvents": [{event}, {{"x": inf, "y": -nan}}]}}')
    trace = load(path)
    assert trace.live(0).tolist() == [0, 5]
    assert "2 infinities" in trace.notes[0]


def test_a_key_that_stands_twice_is_told(tmp_path):
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(CONTENT).replace('"size": 300', '"size": 7, "size": 300', 1))
    trace = load(path)
    assert peak(trace).bytes == 390
    assert trace.notes[0] == (
        "1 keys appear more than once in their object, the first 'size': the last value of each is used."
    )


def test_work_on_devices_in_a_kineto_trace_takes_no_memory(tmp_path):
    path, content = tmp_path / "k.json", kineto()
    path.write_text(json.dumps(content))
    expected = peak(load(path))
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 1, "args": {"grid": [1, 1, 1]}}
    path.write_text(json.dumps([kernel] * 60_000 + content["traceEvents"]))
    tracemalloc.start()
    found = peak(load(path))
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.bytes, found.parts("category")) == (expected.bytes, expected.parts("category"))
    assert taken < path.stat().st_size  # it is never in memory as a whole


def test_entries_that_stand_for_many_are_refused(tmp_path):
    """Two bytes an entry, from the memo: a small file that would fill the memory with columns."""
    path = tmp_path / "snapshot.pickle"
    entry = entries("alloc 1000 1")[0]
    path.write_bytes(pickle.dumps(snapshot([], [entry] * 500_000)))
    with pytest.raises(UnreadableFileError, match="they are shared"):
        load(path)


def test_a_gzip_file_of_empty_members_is_refused(tmp_path):
    path = tmp_path / "snapshot.gz"
    path.write_bytes(gzip.compress(b"") * 20_000 + gzip.compress(pickle.dumps(CONTENT)))
    with pytest.raises(UnreadableFileError, match="10,001 members"):
        load(path)


def test_a_list_of_traces_is_no_damaged_snapshot(tmp_path):
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps([{"traceEvents": []}, {"traceEvents": []}]))
    with pytest.raises(UnreadableFileError, match=r"a list that begins with a dict .*traceEvents"):
        load(path)


def test_a_pickle_of_anything_else_is_refused(tmp_path):
    path = tmp_path / "trace.pickle"
    path.write_bytes(pickle.dumps({"traceEvents": []}))
    with pytest.raises(UnreadableFileError, match="not a memory snapshot"):
        load(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_that_goes_on_after_its_snapshot_says_so(tmp_path, pack):
    path = tmp_path / "snapshot.pickle"
    data = pickle.dumps(CONTENT)
    path.write_bytes(pack(data))
    assert not any("goes on" in note for note in load(path).notes)
    path.write_bytes(pack(data + data))
    trace = load(path)
    assert peak(trace).bytes == 390
    assert trace.notes[0] == (
        f"The file goes on after its first {len(data):,} bytes, which are a whole pickle; the rest is not "
        "read."
    )


@pytest.mark.parametrize("write", [pickle.dumps, lambda content: json.dumps(content).encode()])
def test_a_snapshot_that_was_stripped_of_its_segments_loads(tmp_path, write):
    path = tmp_path / "snapshot"
    path.write_bytes(write({"device_traces": CONTENT["device_traces"]}))
    assert load(path).live(0).tolist() == [0, 300, 390]
