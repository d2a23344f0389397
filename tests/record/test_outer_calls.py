"""What enters outermost calls is seen, and which of it a call wrote to."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tb_memplugin.record.modules import ModuleNames, ModuleRecorder
from tb_memplugin.record.provenance import written_in_calls
from tb_memplugin.record.storages import OuterCalls, Sighting
from tb_memplugin.trace import Category


class Writes(nn.Module):
    """Adds to what it is given, within a module inside."""

    def __init__(self, *written):
        super().__init__()
        self.inner, self.written = Inner(), written

    def forward(self, **given):
        for name in self.written:
            self.inner(given[name])


class Inner(nn.Module):
    def forward(self, one):
        one.add_(1)


class Watch:
    """Records a module's outermost calls, and numbers the storages that it sees."""

    def __init__(self, module):
        self.seen: list[Sighting] = []
        self.matched: list[int] = []
        self.kept: list[torch.UntypedStorage] = []
        self.errors: list[BaseException] = []
        names = ModuleNames.of({"": module})
        self.recorder = ModuleRecorder()
        outer_calls = OuterCalls(names, self._see)
        self.recorder.start(
            {"": module}, names, outer_calls, failed=lambda _, error: self.errors.append(error)
        )

    def _see(self, seen, kept):
        self.seen += seen
        for one in kept:
            if one._cdata not in [known._cdata for known in self.kept]:
                self.kept.append(one)
            self.matched.append([known._cdata for known in self.kept].index(one._cdata))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.recorder.stop()
        assert self.errors == []

    def written(self):
        """The sizes of what is a cache of one size."""

        return [self.kept[row].nbytes() for row in written_in_calls(self.seen, np.array(self.matched))]


def test_what_a_call_wrote_to_is_seen_at_its_end():
    module, state, batch = Writes("state"), torch.zeros(2), torch.zeros(3)
    with Watch(module) as watch:
        module(state=state, batch=[batch])
    assert [(one.bytes, one.version, one.ends_call) for one in watch.seen] == [
        (8, 0, False),
        (12, 0, False),
        (8, 1, True),
    ]
    assert {(one.category, one.label) for one in watch.seen} == {(Category.INPUT, "input of (root)")}


def test_a_call_that_fails_is_told_too():
    module, state = Writes("state", "absent"), torch.zeros(2)
    with Watch(module) as watch, pytest.raises(KeyError):
        module(state=state)
    assert [one.ends_call for one in watch.seen] == [False, True]


def test_tensors_are_not_held_while_a_call_runs():
    gone = []

    class Drops(nn.Module):
        def forward(self, given):
            reference = weakref.ref(given[0])
            given.clear()
            gone.append(reference() is None)

    module = Drops()
    with Watch(module) as watch:
        given = [torch.zeros(2)]
        module(given)
        assert len(watch.seen) == 1
    assert gone == [True]


def loop(module, calls=4, *, state=None, batch=None, between=None):
    """Call a module with the same state each time, and with a new batch if none is given."""
    state = torch.zeros(2) if state is None else state
    with Watch(module) as watch:
        for _ in range(calls):
            module(state=state, batch=torch.zeros(3) if batch is None else batch)
            if between is not None:
                between(state)
    return watch.written()


def test_what_every_call_writes_to_and_nothing_else_is_a_cache():
    assert loop(Writes("state")) == [8]


def test_a_view_of_a_larger_tensor_is_one_too():
    assert loop(Writes("state"), state=torch.zeros(5, 2)[1]) == [40]


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Writes(), {}),  # only read
        (Writes("state"), {"calls": 2}),
        (Writes("batch"), {}),  # a new one in each call
        (Writes("state"), {"batch": torch.zeros(3)}),  # the same batch again and again
        (Writes("state"), {"between": lambda state: state.copy_(torch.ones(2))}),  # filled anew for each call
        (Writes(), {"between": lambda state: state.add_(1)}),  # the program writes to it
    ],
    ids=["read", "two calls", "new", "same batch", "filled anew", "written outside"],
)
def test_what_looks_like_it_is_none(module, options):
    assert loop(module, **options) == []


def test_a_batch_that_is_filled_anew_is_something_new():
    static = torch.zeros(3)
    assert loop(Writes("state"), batch=static, between=lambda _: static.add_(1)) == [8]


def test_tensors_of_inference_mode_do_not_count_writes():
    with torch.inference_mode():
        assert loop(Writes("state")) == []


def test_calls_of_other_modules_in_between_do_not_count():
    both = nn.ModuleDict({"writes": Writes("state"), "other": Writes()})
    state = torch.zeros(2)
    with Watch(both) as watch:
        for _ in range(4):
            both["writes"](state=state, batch=torch.zeros(3))
            both["other"](batch=torch.zeros(3))
    assert watch.written() == [8]
