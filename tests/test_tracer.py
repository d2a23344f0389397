"""`MemoryTracer` as people use it: what it hands out, and that it is gone when its block ends."""

from __future__ import annotations

import gc
import io
import json
import logging
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils import _python_dispatch as dispatch

from tb_memplugin import LineTracer, MemoryTracer, MemPluginError
from tb_memplugin.record.tracer import mode
from tb_memplugin.store.reader import load_window
from tests.exports.test_speedscope import check
from tests.watched import is_watched


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def step(model: nn.Module) -> None:
    model(torch.ones(16, 64)).sum().backward()


def is_clean(*models: nn.Module) -> bool:
    """No hook on them or on all modules, no dispatch mode, none of torch's flags that there is one."""
    return (
        not is_watched(*models)
        and dispatch._get_current_dispatch_mode() is None
        and not dispatch.is_in_torch_dispatch_mode()
        and not getattr(dispatch, "is_in_any_mode_without_ignore_compile_internals", bool)()  # not in 2.6
    )


@pytest.fixture
def tracer():
    model = mlp()
    made = MemoryTracer()
    with made.trace(model), made.track_phase("[all]"):
        step(model)
    assert is_clean(model)
    return made


def test_layers_have_figures_that_a_person_can_work_out(tracer):
    stats = tracer.get_layer_stats()
    assert list(stats) == ["(root)", "0", "1", "2"]
    first = stats["0"]
    assert first.calls == 1
    # forward: 16 x 128 floats; backward: the weight's and the bias's gradients
    assert first.allocated_bytes == 4 * (16 * 128 + 128 * 64 + 128)
    assert first.total_allocations == 3
    assert stats["1"].allocated_bytes == 2 * 4 * 16 * 128
    assert stats["(root)"].total_allocations == sum(stats[name].total_allocations for name in "012")
    assert stats["(root)"].peak_allocated == max(one.peak_allocated for one in stats.values())
    assert first.duration_ms == pytest.approx(first.forward_ms + first.backward_ms)


def test_fragmentation_is_none_where_no_reserve_is_kept(tracer):
    assert set(tracer.get_fragmentation_stats().values()) == {0.0}
    assert all(one.peak_reserved == one.peak_allocated for one in tracer.get_layer_stats().values())


def test_events_are_in_order_and_carry_the_levels(tracer):
    events = tracer.events
    assert [events[0].event_type, events[-1].event_type] == ["snapshot", "snapshot"]
    assert [one.timestamp for one in events] == sorted(one.timestamp for one in events)
    level = events[0].allocated_bytes
    for one in events:
        level += {"alloc": one.size_bytes, "free": -one.size_bytes}.get(one.event_type, 0)
        assert one.allocated_bytes == level
    entered = [one.layer_name for one in events if one.event_type == "layer_enter"]
    assert entered == ["(root)", "0", "1", "2", "2", "1", "0"]  # forward, then backward
    assert max(one.allocated_bytes for one in events) == tracer.result.peak_allocated


def test_named_phases_tell_before_after_and_peak(tracer):
    (phase,) = tracer.get_phase_stats()
    assert phase.name == "[all]"
    assert phase.delta_bytes == sum(parameter.nbytes for parameter in mlp().parameters())  # the gradients
    assert phase.peak_bytes == tracer.result.peak_allocated
    trace = tracer.trace_result()
    assert [trace.annotation_names[row] for row in trace.annotations.name] == ["[all]", "[all]"]


def test_the_summary_goes_through_a_console(tracer):
    text = io.StringIO()
    tracer.print_summary(Console(file=text, width=120))
    assert "Peak allocated" in text.getvalue()
    assert "(root)" in text.getvalue()
    assert "phase [all]" in text.getvalue()


def test_the_flame_graph_is_speedscopes(tracer, tmp_path):
    tracer.export_flame_graph(tmp_path / "flame.json")
    document = json.loads((tmp_path / "flame.json").read_text())
    check(document)
    assert document["profiles"][0]["endValue"] == tracer.result.peak_allocated


def test_the_timeline_holds_events_layers_and_a_summary(tracer, tmp_path):
    tracer.export_timeline(tmp_path / "timeline.json")
    data = json.loads((tmp_path / "timeline.json").read_text())
    assert set(data) == {"events", "layer_stats", "summary"}
    assert len(data["events"]) == len(tracer.events) == data["summary"]["total_events"]
    assert data["layer_stats"]["0"]["peak_allocated"] == tracer.get_peak_memory_per_layer()["0"]
    assert data["summary"]["peak_allocated"] == tracer.result.peak_allocated


def test_it_is_saved_for_the_tab(tracer, tmp_path):
    tracer.save(tmp_path, "w")
    (side_file,) = tmp_path.rglob("*.mem")
    read = load_window(str(side_file))
    assert read.live(0).tolist() == tracer.trace_result().live(0).tolist()
    assert read.notes == tracer.trace_result().notes


def test_the_last_block_is_what_it_tells():
    model, tracer = mlp(), MemoryTracer()
    for calls in (3, 1):
        with tracer.trace(model):
            for _ in range(calls):
                model(torch.ones(2, 64))
    assert tracer.get_layer_stats()["0"].calls == 1


def test_wrong_use_is_told():
    tracer: Any = MemoryTracer()
    model = mlp()
    with pytest.raises(MemPluginError, match="Nothing has been traced yet"):
        tracer.get_layer_stats()
    with pytest.raises(MemPluginError, match="outside a traced block"), tracer.track_phase("forward"):
        pass
    with pytest.raises(MemPluginError, match="max_events is 0"):
        MemoryTracer(max_events=0)
    with pytest.raises(TypeError, match=r"model is a function; give a torch\.nn\.Module"):
        tracer.trace(step)
    with pytest.raises(TypeError, match="optimizer is a str"):
        tracer.trace(model, ["adam"])
    with tracer.trace(model), pytest.raises(MemPluginError, match="already tracing"), tracer.trace(model):
        pass
    assert is_clean(model)


def test_a_device_that_is_not_here_is_told():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    model = mlp()
    with (
        pytest.raises(MemPluginError, match="no device 'cuda:0'"),
        MemoryTracer(device="cuda:0").trace(model),
    ):
        pass
    assert is_clean(model)


def test_an_exception_in_the_block_goes_on_and_leaves_nothing_behind():
    model, tracer = mlp(), MemoryTracer()

    def run():
        with tracer.trace(model):
            model(torch.ones(2, 64))
            model(torch.ones(2, 63))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run()
    assert is_clean(model)
    assert tracer.get_layer_stats()["0"].calls == 2
    assert tracer.get_layer_stats()["1"].calls == 1


def test_nested_tracers_each_see_their_part():
    model, outer, inner = mlp(), MemoryTracer(), MemoryTracer()
    with outer.trace(model):
        model(torch.ones(16, 64))
        with inner.trace(model[0]):
            model(torch.ones(16, 64))
    assert is_clean(model)
    assert outer.get_layer_stats()["0"].calls == 2
    assert inner.get_layer_stats()["(root)"].calls == 1
    assert inner.get_layer_stats()["(root)"].allocated_bytes == 4 * 16 * 128


def test_a_generator_may_end_its_block_out_of_turn():
    model, outer, inner = mlp(), MemoryTracer(), MemoryTracer()

    def loop():
        with outer.trace(model):
            while True:
                yield model(torch.ones(2, 64))

    turns = loop()
    next(turns)
    with inner.trace(model):
        next(turns)
        turns.close()
        model(torch.ones(2, 64))
    assert is_clean(model)
    assert outer.get_layer_stats()["0"].calls == 2
    assert inner.get_layer_stats()["0"].calls == 2


def test_a_block_that_ends_on_another_thread_says_so():
    model, tracer = mlp(), MemoryTracer()

    def begin_and_end_elsewhere():
        block = tracer.trace(model)
        block.__enter__()
        model(torch.ones(2, 64))
        other = threading.Thread(target=block.__exit__, args=(None, None, None))
        other.start()
        other.join()

    thread = threading.Thread(target=begin_and_end_elsewhere)
    thread.start()
    thread.join()
    assert is_clean(model)
    assert tracer.get_layer_stats()["0"].calls == 1
    assert any("ended on another thread" in note for note in tracer.trace_result().notes)


def in_threads(target, count=10):
    threads = [threading.Thread(target=target) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ten_threads_in_one_block_lose_no_call_and_no_byte_of_a_layer():
    model, tracer = mlp(), MemoryTracer()
    gc.collect()  # what earlier tests left
    with tracer.trace(model):
        in_threads(lambda: [model(torch.ones(16, 64)) for _ in range(5)])
    assert is_clean(model)
    first = tracer.get_layer_stats()["0"]
    assert first.calls == first.total_allocations == 50
    assert first.allocated_bytes == 50 * 4 * 16 * 128
    trace = tracer.trace_result()
    blocks = trace.allocations
    assert all(blocks.freed[blocks.born >= 0] < len(trace.events))  # all is given back
    assert any("called on other threads, 50 times" in note for note in trace.notes)


def test_gradients_made_on_other_threads_count_when_they_are_noticed():
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        in_threads(lambda: step(model), count=1)
    trace, size = tracer.trace_result(), sum(parameter.nbytes for parameter in model.parameters())
    assert int(trace.live(0)[-1]) - int(trace.live(0)[0]) == size
    (note,) = (note for note in trace.notes if note.code == "noticed_late")
    assert f", {size:,} bytes." in note


def test_what_a_thread_holds_that_still_runs_at_the_end_is_told():
    kept: list[torch.Tensor] = []
    end: list[bool] = []

    def work() -> None:
        kept.append(torch.ones(123_457))
        while not end:
            pass  # in this file: code of the standard library allocates no tensor

    tracer = MemoryTracer()
    with tracer.trace(mlp()):
        thread = threading.Thread(target=work)
        thread.start()
        while not kept:
            pass
    end.append(True)
    thread.join()
    (note,) = [note for note in tracer.trace_result().notes if note.code == "other_threads"]
    assert note.bytes == 4 * 123_457


def test_ten_tracers_on_ten_threads_keep_apart():
    found = []

    def own():
        model, tracer = mlp(), MemoryTracer()
        with tracer.trace(model):
            for _ in range(5):
                step(model)
        found.append((tracer.get_layer_stats()["0"].calls, tracer.get_layer_stats()["0"].total_allocations))

    in_threads(own)
    # 5 outputs; 5 gradients of the weight and of the bias: the first are kept, the others added to them
    assert found == [(5, 15)] * 10
    assert is_clean()


def test_a_model_that_goes_inside_the_block_is_freed_there():
    model, tracer = mlp(), MemoryTracer()
    gone, size = weakref.ref(model), sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()  # what earlier tests left
    with tracer.trace(model):
        model(torch.ones(2, 64))
        del model
        gc.collect()
        assert gone() is None
    live = tracer.trace_result().live(0)
    assert int(live[0]) - int(live[-1]) == size


def test_a_model_that_changes_inside_the_block_is_traced_on():
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        model.append(nn.Linear(8, 2))
        removed = model[0]
        del model[0]
        model(torch.ones(2, 128))
    assert is_clean(model, removed)
    stats = tracer.get_layer_stats()
    assert set(stats) == {"(root)", "1", "2"}
    # what the new layer makes belongs to the layer that calls it
    assert stats["(root)"].allocated_bytes == 4 * 2 * (128 + 8 + 2)


def test_data_parallel_is_traced():
    model, tracer = nn.DataParallel(mlp()), MemoryTracer()
    with tracer.trace(model):
        model(torch.ones(2, 64))
    assert is_clean(model)
    assert tracer.get_layer_stats()["module.0"].calls == 1


def test_a_compiled_model_is_refused():
    wrapped: Any = torch.compile(mlp(), backend="eager")
    in_place = mlp()
    in_place.compile(backend="eager")
    for model in (wrapped, in_place):
        with pytest.raises(MemPluginError, match="The model is compiled"), MemoryTracer().trace(model):
            pass
        assert is_clean(model)


def test_a_compiled_function_inside_the_block_runs_uncompiled_and_right():
    compiled = torch.compile(lambda x: (x * 2).sin(), backend="eager")
    expected = compiled(torch.ones(10))
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        found = compiled(torch.ones(10))
    assert torch.equal(found, expected)
    made = [one.size_bytes for one in tracer.events if one.event_type == "alloc"]
    assert made.count(40) == 3  # the ones, the product, the sine; beside them the number 2 as a tensor
    assert torch.equal(compiled(torch.ones(10)), expected)


@pytest.mark.parametrize("recorder", [lambda: MemoryTracer().trace(mlp()), LineTracer])
def test_a_function_that_must_be_one_graph_runs_uncompiled_inside_and_compiled_after(recorder):
    counts = CompileCounter()
    first = torch.compile(lambda x: x.sin() + 1, backend=counts, fullgraph=True)
    second = torch.compile(lambda x: x.cos() + 1, backend=counts, fullgraph=True)
    ones = torch.ones(10)
    assert torch.equal(first(ones), ones.sin() + 1)
    before = torch._dynamo.eval_frame._stance
    with recorder() as tracer:
        assert torch.equal(first(ones), ones.sin() + 1)
        assert torch.equal(second(ones), ones.cos() + 1)
    trace = tracer.trace_result()
    (note,) = [note for note in trace.notes if note.code == "ran_uncompiled"]
    assert note.startswith("2 calls of compiled functions ran uncompiled")
    assert note.bytes == trace.live(0).max()
    assert counts.frame_count == 1
    assert torch._dynamo.eval_frame._stance is before
    assert torch.equal(second(ones), ones.cos() + 1)
    assert torch.equal(first(ones), ones.sin() + 1)
    assert counts.frame_count == 2


def test_a_stance_that_the_program_leaves_after_the_block_is_not_the_tracers():
    counts = CompileCounter()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=counts)
    with ExitStack() as stances, MemoryTracer().trace(mlp()):
        torch.ones(2)
        stances.enter_context(torch.compiler.set_stance("force_eager"))
    compiled(torch.ones(2))
    assert counts.frame_count == 1


def test_dynamo_that_is_loaded_inside_a_block_compiles_nothing_there(monkeypatch):
    counts = CompileCounter()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=counts, fullgraph=True)
    monkeypatch.setattr(mode, "is_loaded", lambda: False)
    with MemoryTracer().trace(mlp()):
        torch.ones(2)
        monkeypatch.undo()
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + 1)
    compiled(torch.ones(2))
    assert counts.frame_count == 1


def test_compiled_code_works_again_after_a_block():
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        model(torch.ones(2, 64))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 64)), model(torch.ones(2, 64)))
    assert is_clean(model)


def test_what_goes_wrong_on_our_side_is_a_note_and_the_training_goes_on(monkeypatch, caplog):
    from tb_memplugin.record.storage_lifetimes import Ledger

    caplog.set_level(logging.DEBUG, logger="tb_memplugin")
    monkeypatch.setattr(Ledger, "allocate", lambda *_, **__: 1 // 0)
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        assert model(torch.ones(2, 64)).shape == (2, 8)
    assert is_clean(model)
    assert any("Tracing stopped early (ZeroDivisionError" in note for note in tracer.trace_result().notes)


def test_an_end_that_fails_is_a_warning_and_the_training_goes_on(monkeypatch, caplog):
    from tb_memplugin.record.tracer import recording as source

    monkeypatch.setattr(source, "trace_from_ledger", lambda _: 1 // 0)
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        model(torch.ones(2, 64))
    assert is_clean(model)
    assert "could not be read (ZeroDivisionError" in caplog.text
    with pytest.raises(MemPluginError, match="Nothing has been traced"):
        tracer.get_layer_stats()
