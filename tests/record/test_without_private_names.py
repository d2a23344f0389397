"""Each private name of torch is taken away in turn: training goes on, with the losses that it has alone."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from tb_memplugin.record.torch_private.__main__ import whole_table
from tests.record.training_without import train_without


@pytest.fixture(scope="module")
def fresh() -> Any:
    """Processes that are forked from one which has imported torch, and of ours the table alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.record.training_without"])
    return context


@pytest.mark.parametrize("path", [row.path for row in whole_table()])
def test_training_goes_on_without_it(fresh, path):
    ours, theirs = fresh.Pipe()
    process = fresh.Process(target=train_without, args=(path, theirs))
    process.start()
    assert ours.poll(120)
    answer = ours.recv()
    process.join(60)
    assert isinstance(answer, list), answer
    alone, with_handler, with_tracer = answer
    assert alone == with_handler == with_tracer
