"""What a tracer does not see is told with the bytes that are known of it."""

from __future__ import annotations

import re
import threading
import time

import torch
from torch import nn

from tb_memplugin import MemoryTracer


def notes_of(tracer: MemoryTracer, words: str) -> list[str]:
    return [note for note in tracer.trace_result().notes if words in note]


def test_what_a_thread_keeps_that_still_runs_is_told_with_its_bytes():
    """Outside of layers, the thread makes 4,000 bytes, and is in the middle of a function at the end."""
    layer, tracer = nn.Identity(), MemoryTracer()
    made, ended = threading.Event(), threading.Event()

    def elsewhere() -> None:
        layer(torch.ones(1))
        kept = torch.ones(1000)
        made.set()
        while not ended.is_set():
            time.sleep(0.001)
        del kept

    thread = threading.Thread(target=elsewhere)
    try:
        with tracer.trace(layer):
            thread.start()
            made.wait()
    finally:
        ended.set()
        thread.join()
    (note,) = notes_of(tracer, "on other threads")
    assert "at the end, at least 4,0" in note  # with the single float that went into the layer, or without


def test_events_that_were_dropped_are_told_with_how_far_the_others_reach():
    """All that the block made, at most 4,000 bytes, is gone in the last two entries."""
    tracer = MemoryTracer(max_events=2)
    layer = nn.Identity()
    with tracer.trace(layer):
        layer(torch.ones(1000))
        layer(torch.ones(1))
    (note,) = notes_of(tracer, "were dropped")
    kept, peak = map(int, re.findall(r"reaches ([\d,]+) of ([\d,]+) bytes", note.replace(",", ""))[0])
    assert peak - kept == 4000


def test_after_an_error_of_ours_what_is_alive_at_the_end_is_told(monkeypatch):
    """The 2,000 bytes are made after the error, and still alive at the end."""
    from tb_memplugin.record.storage_lifetimes import Ledger

    monkeypatch.setattr(Ledger, "allocate", lambda *_, **__: 1 // 0)
    layer, tracer = nn.Identity(), MemoryTracer()
    with tracer.trace(layer):
        first = torch.ones(1)
        kept = torch.ones(500)
    del first, kept
    (note,) = notes_of(tracer, "stopped early")
    assert note.endswith("later events are missing, at the end at least 2,004 bytes.")
