"""A file may take so much memory and time, and no more; what takes more is refused in words."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tb_memplugin import MemPluginError, budget, load
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.content import _json_decoder, _parsed_bytes, content_limit
from tb_memplugin.read.snapshot.safe_pickle import RefusedPickleError
from tb_memplugin.store.writer import RunWriter
from tests.bombs import BOMBS, MB, measured
from tests.commands.files import DATA, PROGRAM, real, step_snapshot, write
from tests.commands.test_apart import ENDLESS
from tests.step_figures import same_figures
from tests.traces import trace

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's private memory")

GREEDY = b"\x80\x04](" + b"N" * 40 * MB + b"e."
"""40 MB of one list: 16 bytes a byte while it is built, which no count of ours sees."""


def test_the_budget_is_a_gigabyte_or_ten_times_the_file_and_a_minute():
    assert budget.memory_budget(0) == budget.memory_budget(100 * MB) == 1000 * MB
    assert budget.memory_budget(200 * MB) == 2000 * MB
    assert budget.seconds_budget() == 60


def test_what_a_file_has_packed_counts_as_what_the_file_has(monkeypatch):
    monkeypatch.setattr(budget, "_process", budget._Confined(lambda _path, _seconds: None, file_bytes=MB))
    assert budget.memory_budget(100 * MB) == budget.memory_budget(1000 * MB) == 1000 * MB


def test_a_gzip_file_may_unpack_to_a_hundred_times_its_size_unless_a_limit_is_set(monkeypatch):
    assert content_limit(None, 100) == 64 << 20
    assert content_limit(None, MB) == 100 * MB
    assert content_limit(5, MB) == 5
    monkeypatch.setenv("TB_MEMPLUGIN_LIMIT_BYTES", "7")
    assert content_limit(None, MB) == 7


@pytest.mark.parametrize("variable", [budget.MEMORY_VARIABLE, budget.SECONDS_VARIABLE])
def test_the_environment_sets_another_budget(variable, monkeypatch):
    rules = {
        budget.MEMORY_VARIABLE: lambda: budget.memory_budget(1 << 40),
        budget.SECONDS_VARIABLE: budget.seconds_budget,
    }
    monkeypatch.setenv(variable, "77")
    assert rules[variable]() == 77
    monkeypatch.setenv(variable, "lots")
    with pytest.raises(MemPluginError, match=f"{variable} is 'lots', which is not a number"):
        rules[variable]()


@pytest.mark.parametrize(
    "pattern",
    [
        *(b"[],", b"{},", b'{"":0},', b'{"":[]},', b'{"":{"":{"":0}}},', b"[0],", b"[[]],"),
        *(b"1234567,", b"999,", b'"ab",', b'"\\u0100\\n",', b'"\xc3\xa90",', b'"\xf0\x9f\x98\x80",'),
    ],
)
def test_what_json_will_take_is_known_before_it_is_parsed(pattern):
    raw = b"[" + pattern * 20_000 + b"1]"
    text = raw.decode()
    tracemalloc.start()
    _json_decoder([]).decode(text)
    taken = tracemalloc.get_traced_memory()[1] + len(raw)
    tracemalloc.stop()
    assert 0.7 * taken < _parsed_bytes(raw) < 2.5 * taken


QUICK = {
    "gzip of objects": "larger than the limit",
    "gzip of blanks": "larger than the limit",
    "objects": "The JSON takes more memory than a file of this size may: 1,000,000,000 bytes",
    "pickle of shared pinned entries": "more traces than 2,803,295 bytes can hold: they are shared",
    "pickle of copied pinned segments": "more segments than 2,391,002 bytes can hold: they are shared",
    "pickle of shared blocks": "they are shared",
    "pickle of shared annotations": "they are shared",
    "side file of constant columns": "read",
    "side file of more rows": "claims 4194304 rows",
}


@linux
@pytest.mark.parametrize("name", QUICK)
def test_a_bomb_is_refused_before_it_takes_what_it_may(name, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[name]())
    grown, used, told = measured(path)
    assert f" {QUICK[name]}" in f" {told}"
    assert grown < 600 * MB
    assert used < 20


@linux
@pytest.mark.parametrize("size", ["100000000", ""], ids=["set", "by rule"])
def test_a_child_that_takes_more_memory_than_its_budget_is_refused_by_name(size, monkeypatch, tmp_path):
    path = tmp_path / "greedy.pickle"
    path.write_bytes(GREEDY if size else b"\x80\x04](" + b"}" * 100)
    monkeypatch.setenv(budget.MEMORY_VARIABLE, size)
    with pytest.raises(UnreadableFileError) as caught:
        load(path, untrusted=True)
    assert caught.value.where == str(path)
    if size:
        assert "takes more memory than a file of this size may: 100,000,000 bytes" in caught.value.what
        assert budget.MEMORY_VARIABLE in caught.value.fix
    else:
        assert "truncated" in caught.value.what


@linux
def test_a_command_that_takes_more_memory_than_its_budget_is_refused_by_name(tmp_path):
    path = tmp_path / "greedy.pickle"
    path.write_bytes(GREEDY)
    done = subprocess.run(
        [*PROGRAM, "peak", str(path)],
        env={**os.environ, budget.MEMORY_VARIABLE: "100000000"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "more memory than a file of this size may: 100,000,000 bytes" in done.stderr
    assert str(path) in done.stderr


def test_a_file_without_end_is_refused_by_name(monkeypatch, tmp_path):
    path = tmp_path / "endless.pickle"
    path.write_bytes(ENDLESS)
    monkeypatch.setenv(budget.SECONDS_VARIABLE, "1")
    with pytest.raises(UnreadableFileError, match="not done after 1 seconds") as caught:
        load(path, untrusted=True)
    assert (caught.value.where, budget.SECONDS_VARIABLE in caught.value.fix) == (str(path), True)


def test_a_trace_comes_back_from_its_process_as_it_is(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(step_snapshot()).encode()))
    assert same_figures(load(path, untrusted=True, device_type="xpu"), load(path, device_type="xpu"))
    written = RunWriter(str(tmp_path / "run"), "w").write(trace("alloc 100 a", "free a"))
    assert same_figures(load(tmp_path / "run", untrusted=True), load(written.side_file))


def test_errors_come_back_from_their_process_as_they_are(tmp_path):
    path = write(tmp_path / "a.pickle", {"a": os.getcwd})
    with pytest.raises(RefusedPickleError, match="asks for the global"):
        load(path, untrusted=True)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent", untrusted=True)
    path.write_bytes(pickle.dumps(step_snapshot()))
    with pytest.raises(UnreadableFileError, match="larger than the limit of 10 bytes"):
        load(path, untrusted=True, limit_bytes=10)


AS_ON_WINDOWS = """
import asyncio, click, ctypes, mmap, os, signal, subprocess, sys, tempfile  # as this system has them
sys.platform, sys.modules["resource"] = "win32", None
del os.fork
from tb_memplugin import MemPluginError, load
from tb_memplugin.commands.apart import fork_guarded
good, endless = sys.argv[1:]
assert len(load(good).events) == len(load(good, untrusted=True).events) > 0
os.environ["TB_MEMPLUGIN_LIMIT_SECONDS"] = "2"
try:
    load(endless, untrusted=True)
except MemPluginError as error:
    print(error.what)
fork_guarded()  # returns in this process
print("read here")
"""


def test_without_the_systems_limits_files_are_read_and_a_clock_ends_untrusted_ones(tmp_path):
    good, endless = write(tmp_path / "a.pickle", step_snapshot()), tmp_path / "endless.pickle"
    endless.write_bytes(ENDLESS)
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS, str(good), str(endless)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert "not done after 2 seconds" in first
    assert second == "read here"


@real
def test_a_strangers_file_is_the_same_under_the_limit():
    path = Path(next(DATA.glob("snapshots/20*")))
    assert same_figures(load(path, untrusted=True), load(path))
