"""Recordings in an object store: a folder loads as a local one does, and patterns match as in a shell."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import fsspec
import pytest

from tb_memplugin import MemPluginError, load
from tb_memplugin.analysis.moments import peak
from tb_memplugin.store import files
from tb_memplugin.store.writer import RunWriter
from tests.commands.files import refused, step_snapshot, told
from tests.faults.failing_s3 import serving
from tests.traces import trace


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two snapshots, whose peaks are 390 and 1,090 bytes, and a run whose windows have 100 and 150."""
    with serving(monkeypatch) as store:
        root = f"{store.root}urls"
        system = fsspec.filesystem("s3")
        for rank, kept in enumerate((300, 1000)):
            system.pipe_file(f"logs/urls/rank{rank}.pickle", pickle.dumps(step_snapshot(kept)))
        writer = RunWriter(f"{root}/run", "w")
        for last in ("a", "b"):
            writer.write(trace("alloc 100 a", *([] if last == "a" else ["alloc 50 b"]), "free a"))
        yield root


@pytest.mark.parametrize("untrusted", [False, True])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_runs_folder_is_its_highest_window(bucket, end, untrusted):
    assert peak(load(f"{bucket}/run{end}", untrusted=untrusted)).bytes == 150


def test_a_folder_without_recordings_says_so(bucket):
    fsspec.filesystem("s3").pipe_file("logs/urls/notes/read.me", b"none here")
    with pytest.raises(MemPluginError, match="no memory recording"):
        load(f"{bucket}/notes")


def test_a_pattern_imports_every_match(bucket, tmp_path):
    done = told("import", f"{bucket}/rank*.pickle", "--logdir", tmp_path, "--run", "job")
    assert [
        (each["file"], each["worker"], each["devices"][0]["peak_bytes"]) for each in done["imported"]
    ] == [
        (f"{bucket}/rank0.pickle", "rank0", 390),
        (f"{bucket}/rank1.pickle", "rank1", 1090),
    ]


def test_a_pattern_with_one_match_is_that_file(bucket):
    assert told("peak", f"{bucket}/*1.pickle")["devices"][0]["peak_bytes"] == 1090
    assert peak(load(f"{bucket}/*1.pickle")).bytes == 1090


def test_a_pattern_with_several_matches_is_too_many_for_one_file(bucket):
    assert f"Give one of them: {bucket}/rank0.pickle, {bucket}/rank1.pickle" in refused(
        "peak", f"{bucket}/rank?.pickle"
    )
    with pytest.raises(MemPluginError, match="2 files match this pattern"):
        load(f"{bucket}/rank?.pickle")


def test_a_pattern_without_a_match_is_the_name_of_a_file(bucket):
    assert "does not exist" in refused("peak", f"{bucket}/rank[7-9].pickle")


@pytest.mark.parametrize("url", ["memory://none/x.pickle", "memory://none/*.pickle"])
def test_a_file_that_does_not_exist_is_named_by_its_url(url):
    with pytest.raises(FileNotFoundError, match=re.escape(f"No such file or directory: '{url}'")):
        load(url)


def test_an_address_on_the_web_is_no_pattern_and_asked_for_its_content_alone():
    asked: list[str] = []

    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            content = pickle.dumps(step_snapshot())
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content if self.command == "GET" else b"")

        do_HEAD = do_GET  # noqa: N815  # the name that http.server calls

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    pytest.importorskip("aiohttp")
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/snapshot.pickle?version=*"
        assert files.matching(address) == [address]
        assert peak(load(address)).bytes == 390
        server.shutdown()
    assert [request for request in asked if request.startswith("GET")] == ["GET /snapshot.pickle?version=*"]
