"""Blocks that threads of the communication free are not counted after their free.

`TB_MEMPLUGIN_FSDP_RUNS=20` trains as often: which thread frees a block differs from run to run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tb_memplugin.record.profiler.trace import with_communication_frees
from tb_memplugin.trace import Kind, StartState, events
from tb_memplugin.trace.replay import pair
from tests.record.profiler.test_loops_with_a_past import ORACLE

RUNS = int(os.environ.get("TB_MEMPLUGIN_FSDP_RUNS", "1"))
BOUND = re.compile(r"up to ([\d,]+) bytes may be missing")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The windows of both ranks of trainings with FSDP2."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("ranks")
    library = folder / "oracle.so"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", str(ORACLE), "-o", str(library), "-ldl", "-lpthread"], check=True
    )
    command = [sys.executable, "-m", "tests.record.profiler.sharded_loop", str(folder)]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    processes = [
        subprocess.Popen([*command, str(rank), str(RUNS)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=300 * RUNS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    lines = (line for text in printed for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_no_freed_block_is_counted_and_what_is_missing_is_within_the_bound_that_is_told(ranks):
    assert len(ranks) == 4 * RUNS
    for window in ranks:
        bounds = [BOUND.search(note) for note in window["notes"]]
        told = sum(int(bound[1].replace(",", "")) for bound in bounds if bound is not None)
        start, peak, end = (
            true - mine for true, mine in zip(window["true"], window["recorded"], strict=True)
        )
        assert start == 0
        assert 0 <= peak <= told
        assert 0 <= end <= told


A, B, C = 0x1000, 0x2000, 0x3000


def trace_of(*lines: tuple[int, Kind, int, int]) -> Any:
    times, kinds, addresses, sizes = zip(*lines, strict=True)
    return events(np.array(times, np.int64), kind=kinds, address=np.array(addresses, np.uint64), bytes=sizes)


def ended(bare: Any, *, communicating: list[bool], operator_end_ns: list[int], alive: list[int]) -> Any:
    found: Any = SimpleNamespace(
        communicating=np.array(communicating), operator_end_ns=np.array(operator_end_ns, np.int64)
    )
    blocks = pair(bare, StartState())
    return with_communication_frees(bare, blocks, found, 0, np.array(alive, np.uint64))


def test_a_block_counts_until_its_operator_ends_and_before_its_address_is_used_again():
    """B is used again at 90 without a free: it may have ended at 55, when its operator did."""
    bare = trace_of(
        (10, Kind.ALLOC, A, 100),
        (40, Kind.FREE_COMPLETED, A, 100),
        (50, Kind.ALLOC, B, 100),
        (90, Kind.ALLOC, B, 7),
    )
    full, note = ended(bare, communicating=[True, True, False], operator_end_ns=[11, 55, 91], alive=[B])
    assert list(zip(full.time_ns, full.kind, strict=True)) == [
        (10, Kind.ALLOC),
        (40, Kind.FREE_COMPLETED),
        (50, Kind.ALLOC),
        (55, Kind.FREE_COMPLETED),
        (90, Kind.ALLOC),
    ]
    assert "1 block." in note
    assert "up to 100 bytes" in note


def test_what_python_has_at_the_end_is_alive():
    bare = trace_of((10, Kind.ALLOC, A, 100), (90, Kind.ALLOC, B, 7))
    full, note = ended(bare, communicating=[True, False], operator_end_ns=[25, 91], alive=[A, B])
    assert full is bare
    assert note is None


def test_what_only_the_graph_has_is_not_ended():
    """Python does not have it, and no communication allocates blocks of its size."""
    bare = trace_of((10, Kind.ALLOC, A, 100), (20, Kind.ALLOC, C, 50), (90, Kind.FREE_COMPLETED, A, 100))
    full, note = ended(bare, communicating=[True, False], operator_end_ns=[25, 21], alive=[])
    assert full is bare
    assert note is None
