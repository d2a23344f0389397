"""Optimizers that wrap another: as accelerate does, and as mixed precision with master weights does."""

import pytest
import torch
from torch.profiler import profile

from tb_memplugin import memory_trace_handler
from tb_memplugin.store.reader import load_window, read_recordings
from tb_memplugin.trace import Category, Phase

WEIGHT = 3 * 100 * 4
"""Bytes of the only parameter."""


class Passing(torch.optim.Optimizer):
    """What it is asked for is the inner optimizer's."""

    def __init__(self, inner):
        self.optimizer = inner

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Keeping(Passing):
    """Has parameters of the model and an empty state; what it wraps has the true ones."""

    param_groups = property(lambda self: [{"params": self.optimizer.param_groups[0]["params"]}])
    state = property(lambda _: {})


@pytest.mark.parametrize("wrapper", [Passing, Keeping, lambda inner: Passing(Keeping(inner))])
def test_the_wrapped_optimizers_state_is_in_the_first_window_and_nothing_is_warned_of(
    tmp_path, caplog, wrapper
):
    model = torch.nn.Linear(100, 3, bias=False)
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step():
        model(torch.ones(5, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    handler = memory_trace_handler(tmp_path, model=model, optimizer=optimizer, start="given")
    with profile(profile_memory=True, on_trace_ready=handler):
        step()
    assert caplog.messages == []
    (recorded,) = read_recordings(str(tmp_path)).steps
    assert recorded.side_file is not None
    trace = load_window(recorded.side_file)
    assert dict(zip(trace.start.category.tolist(), trace.start.bytes.tolist(), strict=True)) == {
        Category.PARAMETER: WEIGHT,
        Category.OPTIMIZER_STATE: WEIGHT,
    }
    assert Phase.OPTIMIZER in trace.phases.phase


@pytest.mark.parametrize(("start", "missing"), [("all", []), ("given", [WEIGHT])])
def test_an_optimizer_in_the_given_ones_place_is_told_where_bytes_of_it_are_missing(
    tmp_path, caplog, start, missing
):
    model = torch.nn.Linear(100, 3, bias=False)
    given, other = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    handler = memory_trace_handler(tmp_path, model=model, optimizer=given, start=start)
    model(torch.ones(5, 100)).sum().backward()
    other.step()
    with profile(profile_memory=True, on_trace_ready=handler):
        other.step()
    (recorded,) = read_recordings(str(tmp_path)).steps
    assert recorded.side_file is not None
    notes = load_window(recorded.side_file).notes
    assert [note.bytes for note in notes if note.code == "optimizer_not_given"] == missing
    assert len(caplog.messages) == len(missing)
