"""What the tracers are given is checked with one wording, before anything is watched."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin import LineTracer, MemoryTracer, MemPluginError
from tb_memplugin.record.arguments import checked_optimizers

BOTH = pytest.mark.parametrize("tracer", [MemoryTracer, LineTracer])


@BOTH
@pytest.mark.parametrize("wrong", ["5", 1.5, True, None])
def test_a_number_of_events_is_a_whole_number(tracer: Callable[..., Any], wrong: object) -> None:
    with pytest.raises(TypeError, match="max_events is a"):
        tracer(max_events=wrong)


@BOTH
@pytest.mark.parametrize("wrong", [{"max_events": 0}, {"device": "nope"}, {"device": ["cpu"]}])
def test_values_that_nothing_can_be_done_with_are_refused(tracer: Any, wrong: dict[str, object]) -> None:
    with pytest.raises(MemPluginError) as refused:
        tracer(**wrong)
    assert tracer.__name__ in str(refused.value)


def test_a_model_is_a_module_and_no_proxy_of_one() -> None:
    model = nn.Linear(4, 3)
    wrong: Any
    for wrong in (None, nn.Linear, weakref.proxy(model)):
        with pytest.raises(TypeError, match=r"give a torch\.nn\.Module"):
            MemoryTracer().trace(wrong)


def test_optimizers_come_one_by_one_or_as_anything_that_can_be_gone_through() -> None:
    one = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    assert checked_optimizers(None) == []
    assert checked_optimizers(one) == checked_optimizers(each for each in [one]) == [one]
    assert checked_optimizers({"model": one}) == [one]
    for wrong in ("adam", 3, [3], {"model": "adam"}):
        with pytest.raises(TypeError, match="or a list or dict of them"):
            checked_optimizers(wrong)
