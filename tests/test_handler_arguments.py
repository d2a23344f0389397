"""Tests for arguments of `memory_trace_handler` that cannot be meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import profile

from tb_memplugin import memory_trace_handler


@pytest.mark.parametrize(
    "bad",
    [
        {"model": "net"},
        {"model": {"a": 1}},
        {"optimizer": "adam"},
        {"optimizer": [1]},
        {"worker_name": nn.Linear(1, 1)},  # a model as the second argument
    ],
)
def test_a_wrong_argument_is_refused_at_once(tmp_path, bad):
    with pytest.raises(TypeError, match="torch"):
        memory_trace_handler(tmp_path, **bad)


def test_a_handler_that_was_not_called_ends_no_training_and_says_so(caplog):
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler):
        torch.ones(8)
    (told,) = caplog.messages
    assert "on_trace_ready=memory_trace_handler(DIR)" in told
