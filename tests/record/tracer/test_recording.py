"""The tracer's numbers equal torch.profiler's of the same run, to the byte, for all that tensors hold."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import MemoryTracer
from tb_memplugin.analysis.moments import moment
from tb_memplugin.record.lines import LineLedger
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.record.tracer.recording import StorageRecording
from tb_memplugin.record.tracer.results import ROOT
from tb_memplugin.trace import Category, Kind, Phase
from tests.record.agreement import UNTUNED
from tests.record.signals import free_after_signal, interrupts
from tests.record.tracer.truth import Both, both, profiled, train_step
from tests.training import MODELS

CPU = 0
ALL = {**MODELS, **UNTUNED}
WITHOUT_KERNEL_BUFFERS = ("transformer", "gru", "experts")


@pytest.fixture(scope="module", params=ALL)
def seen(request) -> Both:
    return both(ALL[request.param])


def test_every_block_is_one_of_the_profilers(seen):
    assert seen.missing == []


def test_peak_and_end_are_the_profilers_own_of_what_tensors_hold(seen):
    window = seen.trace.window(CPU)
    assert int(window.max()) == int(seen.curve.max())
    assert int(window[-1]) == int(seen.curve[-1])


def test_what_is_not_seen_is_given_back_within_the_run(seen):
    assert int(seen.bytes[~seen.held].sum()) == 0


def test_every_layers_peak_is_the_profilers_own(seen):
    trace, start = seen.trace, int(seen.trace.live(CPU)[0])
    curve = start + np.concatenate(([0], seen.curve))
    expected: dict[str, int] = {}
    for began, ended, row in zip(trace.calls.start_ns, trace.calls.end_ns, trace.calls.name, strict=True):
        low = int(np.searchsorted(seen.time_ns, began, side="left"))
        high = int(np.searchsorted(seen.time_ns, ended, side="right"))
        top = int(curve[low : high + 1].max())
        while row >= 0:
            key = trace.modules[row].key or ROOT
            expected[key] = max(expected.get(key, -1), top)
            row = trace.modules[row].parent
    assert seen.tracer.get_peak_memory_per_layer() == expected


def test_the_trace_and_the_running_figures_say_the_same(seen):
    live = seen.trace.live(CPU)
    assert int(live.max()) == seen.tracer.result.peak_allocated
    assert len(seen.trace.allocations.unmatched_frees) == 0
    assert seen.trace.allocations.unseen_frees == 0


def test_parts_sum_to_the_whole_at_the_peak(seen):
    at = moment(seen.trace, CPU, int(np.argmax(seen.trace.live(CPU))) - 1)
    for by in ("category", "module", "operator", "phase"):
        assert sum(part.bytes for part in at.parts(by)) == seen.tracer.result.peak_allocated


@pytest.mark.parametrize("name", WITHOUT_KERNEL_BUFFERS)
def test_where_kernels_take_no_buffers_at_the_peak_it_is_the_profilers_whole_peak(name):
    found = both(ALL[name])
    assert int(found.trace.window(CPU).max()) == found.peak


def test_parameters_gradients_and_states_are_told_by_identity(monkeypatch):
    monkeypatch.setattr(StorageRecording, "names_others", False)  # what other tests of this process left
    found = both(MODELS["transformer"])
    model = MODELS["transformer"]()
    size = sum(parameter.nbytes for parameter in model.parameters())
    steps = 4 * len(list(model.parameters()))
    first, last = (
        {part.key: part.bytes for part in moment(found.trace, CPU, event).parts("category")}
        for event in (-1, len(found.trace.events) - 1)
    )
    assert last.pop("unknown", 0) <= first.get("unknown", 0)  # what other tests of this process left alive
    assert last == {"parameter": size, "gradient": size, "optimizer_state": 2 * size + steps}


def test_a_backward_belongs_to_layers_but_for_the_losss():
    trace = both(MODELS["cnn"]).trace
    mine = trace.allocations.phase == Phase.BACKWARD
    keys = {trace.modules[row].key for row in trace.allocations.module[mine]}
    outside = {key for key in keys if key.startswith("outside:")}
    assert outside == {"outside:nll_loss_backward", "outside:_log_softmax_backward_data"}
    assert keys - outside == {
        "features.0",
        "features.1",
        "features.2",
        "features.3",
        "features.4",
        "features.5",
        "head",
    }


@pytest.mark.parametrize("name", ALL)
def test_every_byte_has_the_layer_that_the_handler_gives_it(name):
    torch.manual_seed(0)
    model = ALL[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    recorder, tracer = WindowRecorder({"": model}, [optimizer]), MemoryTracer()
    watch(recorder)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof,
        tracer.trace(model, optimizer),
    ):
        train_step(model, optimizer)
    window = recorder.take()
    assert window is not None
    theirs, mine = owners(trace_from_profile(prof, window)), tracer.trace_result()
    blocks = mine.allocations  # the owners of an optimizer's temporaries are the handler's to work out
    passing = (blocks.phase == Phase.OPTIMIZER) & (blocks.category == Category.TEMPORARY)
    ours = owners(mine, but=passing)
    known = {address: sorted(born) for address, born in theirs.items()}
    for address, born in ours.items():
        for time, owner in born:
            assert max(one for one in known[address] if one[0] <= time)[1] == owner


def owners(trace, but=False):
    """Address -> (time of birth, FQN of the owner, `outside` for none) of the blocks born in a trace."""
    found: dict[int, list[tuple[int, str]]] = {}
    blocks = trace.allocations
    for row in np.flatnonzero((blocks.born >= 0) & ~np.asarray(but)).tolist():
        key = trace.modules[blocks.module[row]].key
        born = int(trace.events.time_ns[blocks.born[row]]), "outside" if key.startswith("outside:") else key
        found.setdefault(int(blocks.address[row]), []).append(born)
    return found


def test_checkpointed_layers_are_recomputed_in_their_own_name():
    trace = both(MODELS["checkpointed"]).trace
    again = trace.allocations.category == Category.RECOMPUTED
    names = {trace.modules[row].key for row in trace.allocations.module[again]}
    assert "blocks.0.mlp.0" in names


def traced(run, model=None, **options):
    tracer = MemoryTracer(**options)
    with tracer.trace(model if model is not None else nn.Identity()):
        run()
    events = tracer.trace_result().events
    held = events.address >= 1 << 16  # below are numbers of ours, for buffers that are in no tensor
    kinds = np.where(events.kind == Kind.ALLOC, "alloc", "free")
    return list(zip(kinds[held].tolist(), events.bytes[held].tolist(), strict=True))


def test_views_and_aliases_count_once():
    def run():
        whole = torch.ones(10)
        part = whole.view(2, 5)[1:]
        same = part.t().detach()
        del whole, part
        same.add_(1)

    assert traced(run) == [("alloc", 40), ("free", 40)]


def test_what_only_autograd_holds_stays_alive_until_it_lets_go():
    events = []

    def run():
        leaf = torch.ones(25, requires_grad=True)
        middle = leaf * 2
        loss = (middle * middle).sum()
        del middle
        events.append("backward")
        loss.backward()

    order = traced(run)
    assert order.count(("alloc", 100)) == order.count(("free", 100))
    first_free = order.index(("free", 100))
    assert order[:first_free].count(("alloc", 100)) >= 3


def test_out_and_resize_are_an_alloc_and_a_free():
    def run():
        out = torch.empty(0)
        torch.add(torch.ones(10), torch.ones(10), out=out)
        out.resize_(100)

    assert traced(run) == [
        ("alloc", 40), ("alloc", 40), ("alloc", 40), ("free", 40), ("free", 40), ("alloc", 400), ("free", 40),
        ("free", 400),
    ]  # fmt: skip


def test_what_was_alive_before_is_the_start_and_its_end_counts():
    kept = [torch.ones(1000)]
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        kept.clear()
    trace = tracer.trace_result()
    assert [one.event_type for one in tracer.events] == ["snapshot", "free", "snapshot"]
    assert int(trace.live(CPU)[0]) - int(trace.live(CPU)[-1]) == 4000


def test_past_max_events_the_oldest_go_and_the_figures_stay_right():
    torch.manual_seed(0)
    model = MODELS["transformer"]()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    small, large = MemoryTracer(max_events=50), MemoryTracer()
    with large.trace(model, optimizer), small.trace(model, optimizer):
        for _ in range(3):
            train_step(model, optimizer)
    assert len(small.events) == 50
    assert small.dropped_events == large.result.total - 50
    assert f"{small.dropped_events:,} of {large.result.total:,} events were dropped" in " ".join(
        small.trace_result().notes
    )
    assert small.result.peak_allocated == large.result.peak_allocated
    assert small.get_peak_memory_per_layer() == large.get_peak_memory_per_layer()
    for name, one in small.get_layer_stats().items():
        other = large.get_layer_stats()[name]
        assert one.total_allocations == other.total_allocations
        assert one.total_deallocations == other.total_deallocations
    kept = len(small.trace_result().events)
    assert small.trace_result().live(CPU).tolist() == large.trace_result().live(CPU)[-kept - 1 :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_to_the_bit(name):
    def parameters(*, with_tracer):
        torch.manual_seed(0)
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if with_tracer:
            with MemoryTracer().trace(model, optimizer):
                for _ in range(3):
                    train_step(model, optimizer)
        else:
            for _ in range(3):
                train_step(model, optimizer)
        return [parameter.detach().clone() for parameter in model.parameters()]

    pairs = zip(parameters(with_tracer=True), parameters(with_tracer=False), strict=True)
    assert all(torch.equal(with_it, without) for with_it, without in pairs)


def test_sparse_tensors_and_function_transforms_are_followed():
    table = nn.Embedding(10, 4, sparse=True)

    def run():
        table(torch.tensor([1, 2])).sum().backward()
        torch.vmap(torch.sin)(torch.ones(4, 4))
        F.dropout(torch.ones(3), 0.5)

    order = traced(run, table)
    assert ("alloc", 64) in order
    assert order.count(("alloc", 64)) >= 2


def test_fake_and_meta_tensors_hold_nothing(recwarn):
    def run():
        with FakeTensorMode():
            torch.ones(10) * 2
        torch.ones(10, device="meta") * 2

    assert traced(run) == []
    assert not [warning for warning in recwarn if "data pointer" in str(warning.message)]


@pytest.mark.parametrize(
    "share", [torch.Tensor.share_memory_, lambda tensor: torch.multiprocessing.SimpleQueue().put(tensor)]
)
def test_memory_that_is_shared_moves_to_a_device_of_its_own(share):
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        shared = torch.ones(4)
        share(shared)
        shared.add_(1)
    trace = tracer.trace_result()
    start = np.bincount(trace.start.device, trace.start.bytes, len(trace.devices))
    growth = {device.name: trace.live(row)[-1] - start[row] for row, device in enumerate(trace.devices)}
    assert growth == {"cpu": 0, "shared": 16}


def test_a_branch_of_cond_runs_and_what_it_allocates_counts():
    """A product of 64 x 64 floats, and its relu, which is the result."""
    matrix, is_true, tracer = torch.randn(64, 64), torch.tensor(True), MemoryTracer()
    with tracer.trace(nn.Identity()), torch.no_grad():
        result = torch.cond(is_true, lambda x: (x @ x).relu(), lambda x: x, (matrix,))
    trace = tracer.trace_result()
    live = trace.live(trace.device_rows("cpu")[0]) - sum(trace.start.bytes.tolist())
    assert (live.max(), live[-1]) == (2 * 16_384, 16_384)
    assert torch.equal(result, (matrix @ matrix).relu())


def test_a_branch_whose_weights_would_get_no_gradient_uncompiled_is_refused():
    layer, is_true, rows = nn.Linear(4, 4), torch.tensor(True), torch.ones(2, 4)
    with MemoryTracer().trace(layer), pytest.raises(NotImplementedError, match="cond"):
        torch.cond(is_true, lambda x: (layer(x),), lambda x: (x + 1,), (rows,))


def test_lbfgs_equals_a_profiler_that_is_on_from_its_first_step():
    """One that starts later misses the frees of what the first step left, so its curve ends above 0."""
    mark = 12_345

    def second_step(tracer: MemoryTracer | None = None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
        x = torch.randn(16, 8)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        optimizer.step(loss)
        torch.empty(mark, dtype=torch.uint8)
        with nullcontext() if tracer is None else tracer.trace(model, optimizer):
            optimizer.step(loss)
        torch.empty(mark, dtype=torch.uint8)

    sizes = np.diff(profiled(second_step))
    first, last = np.flatnonzero(np.abs(sizes) == mark)[1:3]
    alone = np.cumsum([0, *sizes[first + 1 : last]])
    tracer = MemoryTracer()
    second_step(tracer)
    window = tracer.trace_result().window(0)
    assert (window.max(), window[-1]) == (alone.max(), alone[-1])
    assert tracer.trace_result().notes == ()


def test_what_is_freed_between_the_search_and_the_beginning_is_not_counted():
    ledger = LineLedger(10, "cpu")
    kept, garbage = torch.ones(100), torch.ones(1000)
    ledger.blocks_of([kept.untyped_storage(), garbage.untyped_storage()])
    assert ledger.peak == 4 * 1100
    del garbage
    ledger.begin()
    assert (ledger.level, ledger.peak, ledger.peaks, len(ledger.entries), ledger.dropped) == (
        400,
        400,
        {0: 400},
        1,
        0,
    )


@pytest.mark.parametrize("is_buffer", [False, True], ids=["storage", "buffer"])
def test_what_is_freed_as_a_signal_comes_is_counted_and_the_signal_reaches_the_program(is_buffer):
    ledger, storages = LineLedger(10, "cpu"), [torch.ones(100).untyped_storage()]
    if is_buffer:
        ledger.expect(400, Category.UNKNOWN, "", -1)
        assert ledger.expected(storages[0]) is not None
    else:
        ledger.blocks_of(storages)
    assert ledger.level == 400
    with interrupts(), pytest.raises(KeyboardInterrupt):
        free_after_signal(storages)
    assert (ledger.settle(-1, Phase.OTHER), ledger.level) == (1, 0)
