"""Threads that cannot begin."""

from __future__ import annotations

import threading

import pytest

from tb_memplugin import MemoryMonitor, threads
from tb_memplugin.store import disk_sync, files
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.writer import RunWriter
from tests.traces import trace


@pytest.fixture
def no_memory(monkeypatch):
    """No thread has memory for its first call, as Python does not tell the starter (cpython#140746)."""

    def bootstrap(_):
        raise SystemExit  # which Python ignores there without a word

    monkeypatch.setattr(threads.DaemonThread, "_bootstrap", bootstrap)
    monkeypatch.setattr(threads, "_LONGEST_START_SECONDS", 0.05)
    monkeypatch.setattr(threading, "_limbo", {})  # where Python keeps those that have not begun


@pytest.mark.parametrize("durable", [False, True])
def test_where_no_thread_can_begin_a_window_is_flushed_without_one(tmp_path, no_memory, monkeypatch, durable):
    flushed = list[str]()
    monkeypatch.setattr(files, "flush_path", flushed.append)
    writer = RunWriter(str(tmp_path), "w", durable=durable)
    for step in range(2):
        written = writer.write(trace(f"step {step}", "alloc 7 a"))
        assert written.side_file in flushed


def test_where_no_thread_can_begin_a_monitor_writes_from_the_loop(tmp_path, no_memory, caplog):
    monitor = MemoryMonitor(str(tmp_path), "w")
    for _ in range(2):
        monitor.step()
    monitor.close()
    (watched,) = read_recordings(str(tmp_path)).watched
    assert len(watched.figures) == 2
    assert caplog.messages == []


def test_ctrl_c_where_a_thread_is_started_ends_the_write_and_the_next_one_is_flushed(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    writer = RunWriter(str(tmp_path), "w", durable=True)
    begin = disk_sync.in_background
    monkeypatch.setattr(disk_sync, "in_background", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.write(trace("step 0", "alloc 7 a"))
    flushed = list[str]()
    monkeypatch.setattr(files, "flush_path", flushed.append)
    monkeypatch.setattr(disk_sync, "in_background", begin)
    assert writer.write(trace("step 1", "alloc 7 a")).side_file in flushed
    assert len(read_recordings(str(tmp_path)).steps) == 2


def test_a_flush_that_cannot_be_awaited_at_the_end_of_the_process_is_told_and_the_others_are_awaited(
    tmp_path, monkeypatch
):
    errors, awaited = list[Exception](), list[disk_sync.DiskSync]()
    broken, whole = (disk_sync.DiskSync(str(tmp_path), errors.append) for _ in range(2))

    def wait(sync, _):
        if sync is broken:
            raise MemoryError
        awaited.append(sync)

    monkeypatch.setattr(disk_sync, "_open", [broken, whole])
    monkeypatch.setattr(disk_sync.DiskSync, "wait", wait)
    disk_sync._end()
    assert [type(error) for error in errors] == [MemoryError]
    assert awaited == [whole]
