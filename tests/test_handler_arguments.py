"""Tests for arguments of `memory_trace_handler` that cannot be meant."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import profile

from tb_memplugin import memory_trace_handler
from tb_memplugin.record.torch_private.profiler import ExperimentalConfig
from tb_memplugin.store.disk_sync import DiskSync


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"model": "net"}, "model is a str; give a torch.nn.Module"),
        ({"model": {"a": 1}}, "model 'a' is a int; give a torch.nn.Module"),
        ({"optimizer": "adam"}, "torch"),
        ({"optimizer": [1]}, "torch"),
        ({"worker_name": nn.Linear(1, 1)}, "A torch.nn.Module is given as model="),  # as second argument
    ],
)
def test_a_wrong_argument_is_refused_at_once(tmp_path, bad, told):
    with pytest.raises(TypeError, match=told):
        memory_trace_handler(tmp_path, **bad)


def test_a_handler_that_was_not_called_ends_no_training_and_says_so(caplog):
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler):
        torch.ones(8)
    (told,) = caplog.messages
    assert "on_trace_ready=memory_trace_handler(DIR)" in told


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_handler_waits_until_the_disk_has_the_window(tmp_path, monkeypatch, durable):
    waits = []
    monkeypatch.setattr(DiskSync, "wait", lambda _, seconds=1.0: waits.append(seconds))
    handler = memory_trace_handler(tmp_path, durable=durable)
    with profile(profile_memory=True, on_trace_ready=handler):
        torch.ones(8)
    assert waits == [None] * durable


def test_a_handler_that_has_written_is_freed_at_once(tmp_path):
    handler = memory_trace_handler(tmp_path)
    with profile(profile_memory=True, on_trace_ready=handler) as prof:
        torch.ones(8)
    known, prof.on_trace_ready = weakref.ref(handler), None  # a profiler is part of a cycle
    gc.disable()  # so that only references count
    try:
        del handler
        assert known() is None
    finally:
        gc.enable()


def test_a_profile_that_moves_the_times_of_its_events_is_refused(tmp_path, caplog):
    handler = memory_trace_handler(tmp_path)
    written = []
    for settings in ({"adjust_timestamps": True}, {"verbose": True}, {"adjust_timestamps": True}):
        config = ExperimentalConfig(**settings)
        with profile(profile_memory=True, on_trace_ready=handler, experimental_config=config):
            torch.ones(8)
        written.append(len(list(tmp_path.rglob("*.mem"))))
    assert written == [0, 1, 1]
    assert "Leave adjust_timestamps out of experimental_config" in caplog.text
