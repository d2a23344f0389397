"""`IterationReport` as people use it: numbers that a person can work out, and nothing left behind."""

from __future__ import annotations

import gc
import io
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils import _python_dispatch as dispatch

from tb_memplugin import IterationReport
from tb_memplugin.record.iterations.figures import IterationWatch, iteration_memory
from tb_memplugin.record.steps.counters import Reading
from tb_memplugin.store.reader import load_window
from tests.watched import is_watched as calls_are_watched


def quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


def recorded(report: IterationReport) -> Any:
    """The figures of an iteration that is reported."""
    memory = report.record_stats()
    assert memory is not None
    return memory


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def step(model: nn.Module, rows: int = 2) -> None:
    model(torch.ones(rows, 4)).sum().backward()


def is_watched() -> bool:
    return dispatch.is_in_torch_dispatch_mode()


def is_hooked(model: nn.Module) -> bool:
    weights = any(weight._post_accumulate_grad_hooks is not None for weight in model.parameters())
    return weights or calls_are_watched(model)


@pytest.fixture
def linear():
    return nn.Linear(4, 3)


def test_a_batch_that_another_thread_made_is_an_input(linear):
    batches: list[torch.Tensor] = []
    with IterationReport(linear, console=quiet()) as report:
        thread = threading.Thread(target=lambda: batches.append(torch.ones(512, 4)))
        thread.start()
        thread.join()
        linear(batches[0]).sum().backward()
        memory = recorded(report)
    assert memory.traced.at_peak["inputs"] == 4 * 512 * 4


def test_a_layer_of_four_by_three_has_sixty_bytes(linear):
    batch = torch.ones(2, 4)
    with IterationReport(linear, console=quiet()) as report:
        linear(batch).sum().backward()
        memory = recorded(report)
    assert [(one.name, one.bytes, one.gradient_bytes) for one in memory.weights] == [
        ("weight", 48, 48),
        ("bias", 12, 12),
    ]
    assert (memory.weight_bytes, memory.gradient_bytes) == (60, 60)
    assert memory.feature_map_bytes == 4 * 2 * 3 + 4  # the layer's result and the loss
    assert memory.intermediate_gradient_bytes == 4  # the loss's own; the result's is a view of it
    assert memory.traced.at_peak["inputs"] == 4 * 2 * 4
    assert not memory.has_cache
    assert memory.peak_cached_bytes == memory.peak_allocated_bytes == memory.traced.peak_bytes
    assert sum(memory.traced.at_peak.values()) == memory.traced.peak_bytes


def test_feature_maps_and_intermediate_gradients_are_counted_when_most_are_alive():
    model = two_layers()
    with IterationReport(model, console=quiet()) as report:
        step(model, rows=5)
        memory = recorded(report)
    hidden = 4 * 5 * 8
    assert memory.feature_map_bytes == 2 * hidden  # before and after the ReLU; more than after + 40 + 4
    assert memory.intermediate_gradient_bytes == 2 * hidden + 4  # behind and before the ReLU; the loss's


def test_in_no_grad_there_are_feature_maps_and_no_gradients(linear):
    with IterationReport(linear, console=quiet()) as report, torch.no_grad():
        linear(torch.ones(2, 4))
        memory = recorded(report)
    assert memory.feature_map_bytes == 24
    assert memory.intermediate_gradient_bytes == memory.gradient_bytes == 0
    assert [one.gradient_bytes for one in memory.weights] == [0, 0]


def test_the_peak_is_above_the_start_by_what_was_made():
    keep = torch.ones(1000)
    model = nn.Identity()
    with IterationReport(model, console=quiet()) as report:
        before = recorded(report)
        passing = torch.ones(500)
        del passing
        after = recorded(report)
    assert after.peak_cached_bytes == before.cached_bytes + 2000
    assert after.cached_bytes == before.cached_bytes
    assert after.cached_bytes >= keep.nbytes


def test_the_optimizers_state_is_told_at_the_peak(linear):
    optimizer = torch.optim.Adam(linear.parameters(), foreach=False)
    with IterationReport(linear, console=quiet(), optimizer=optimizer) as report:
        for _ in range(2):
            step(linear)
            optimizer.step()
            report.record_stats()
    memory: Any = report.iterations[-1]
    assert memory.traced.at_peak["optimizer state"] == 2 * 60 + 2 * 4  # two moments, two counts of steps


def test_every_nth_iteration_is_reported_and_only_those_are_watched(linear):
    report = IterationReport(linear, print_period=3, console=quiet())
    seen = []
    for _ in range(7):
        seen.append((is_watched(), report.record_stats() is not None))
    assert seen == [(False, False), (False, False), (True, True)] * 2 + [(False, False)]
    assert [(one.step, one.iteration) for one in report.iterations] == [(3, 3), (6, 6)]
    report.close()


def test_epochs_count_their_own_iterations():
    model = two_layers()
    with IterationReport(model, print_period=2, console=quiet()) as report:
        for _ in range(2):
            for _ in range(3):
                step(model)
                report.record_stats()
            report.epoch_end()
            assert not is_watched()
            assert not is_hooked(model)
    assert [(one.step, one.epoch, one.iteration) for one in report.iterations] == [(2, 1, 2), (5, 2, 2)]


def test_after_an_epoch_only_the_first_call_of_the_model_begins_a_watch(linear):
    report = IterationReport(linear, console=quiet())
    assert is_watched()
    report.epoch_end()
    assert not is_watched()
    step(linear)
    assert is_watched()
    memory = recorded(report)
    report.close()
    assert not is_hooked(linear)
    assert not is_watched()
    assert memory.feature_map_bytes == 28
    assert memory.traced.at_peak["inputs"] == 32
    assert memory.gradient_bytes == 60


def test_an_iteration_in_which_nothing_ran_has_its_weights(linear):
    with IterationReport(linear, console=quiet()) as report:
        report.epoch_end()
        memory = recorded(report)
    assert (memory.weight_bytes, memory.gradient_bytes, memory.feature_map_bytes) == (60, 0, 0)


def test_a_gradient_that_is_gone_by_the_end_counts(linear):
    with IterationReport(linear, console=quiet()) as report:
        step(linear)
        linear.zero_grad()
        gone = recorded(report)
        none = recorded(report)
    assert gone.gradient_bytes == 60
    assert gone.intermediate_gradient_bytes == 4
    assert none.gradient_bytes == 0


def test_gradients_that_stay_are_counted_without_a_backward(linear):
    step(linear)
    with IterationReport(linear, console=quiet()) as report:
        assert recorded(report).gradient_bytes == 60


def test_a_report_that_is_dropped_leaves_nothing(linear):
    report = IterationReport(linear, console=quiet())
    assert is_watched()
    assert is_hooked(linear)
    del report
    gc.collect()
    assert not is_watched()
    assert not is_hooked(linear)


def test_an_exception_in_the_loop_passes_and_nothing_is_left(linear):
    report = IterationReport(linear, console=quiet())

    def loop() -> None:
        with report:
            linear(torch.ones(2, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not is_watched()
    assert not is_hooked(linear)


def test_the_loop_may_go_on_after_an_exception(linear):
    with IterationReport(linear, console=quiet()) as report:
        for rows in (4, 5, 4):
            try:
                linear(torch.ones(2, rows)).sum().backward()
            except RuntimeError:
                linear.zero_grad()
            report.record_stats()
    assert report.iterations[-1].gradient_bytes == 60
    assert len(report.iterations) == 3


def test_after_close_nothing_is_reported_and_it_is_told_once(linear, caplog):
    report = IterationReport(linear, console=quiet())
    report.close()
    report.close()
    with caplog.at_level(logging.WARNING, "tb_memplugin"):
        assert report.record_stats() is None
        assert report.record_stats() is None
        report.epoch_end()
    assert len(caplog.records) == 1
    assert "after close()" in caplog.text


def test_a_model_that_changes_has_the_weights_of_now():
    model = two_layers()
    with IterationReport(model, console=quiet()) as report:
        step(model)
        report.record_stats()
        model[2] = nn.Linear(8, 1, bias=False)
        step(model)
        memory = recorded(report)
    assert {one.name: one.bytes for one in memory.weights} == {"0.weight": 128, "0.bias": 32, "2.weight": 32}
    assert memory.gradient_bytes == 192


def test_a_model_that_is_gone_is_told():
    model = two_layers()
    dead = weakref.ref(model)
    with IterationReport(model, console=quiet()) as report:
        step(model)
        del model
        gc.collect()
        assert dead() is None
        first, second = recorded(report), recorded(report)
        report.epoch_end()
        third = recorded(report)
    for memory in (first, second, third):
        assert memory.weights == ()
        assert "The model no longer exists, so its weights are not reported." in memory.notes
    assert first.feature_map_bytes > 0
    assert second.peak_cached_bytes is None


def test_training_is_the_same_to_the_bit():
    def trained(*, reported: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters())
        report = IterationReport(model, console=quiet(), optimizer=optimizer) if reported else None
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            if report is not None:
                report.record_stats()
        if report is not None:
            report.close()
        return [weight.detach() for weight in model.parameters()]

    assert all(map(torch.equal, trained(reported=True), trained(reported=False)))


def test_a_compiled_model_keeps_running_compiled_and_what_is_not_known_is_said(linear):
    compiled: Any = torch.compile(linear, backend="eager")
    with IterationReport(compiled, console=quiet()) as report:
        for _ in range(2):
            step(compiled)
            assert not is_watched()
            report.record_stats()
            report.epoch_end()
    memory: Any = report.iterations[-1]
    assert (memory.weight_bytes, memory.gradient_bytes) == (60, 60)
    assert [one.name for one in memory.weights] == ["weight", "bias"]
    assert memory.feature_map_bytes is memory.peak_cached_bytes is None
    assert any("The model is compiled ((root))" in note for note in memory.notes)


class _IsWatched(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.tensor(float(dispatch._get_current_dispatch_mode() is not None))


def test_a_loaders_forked_workers_are_not_watched(linear):
    loader = torch.utils.data.DataLoader(_IsWatched(), num_workers=1, multiprocessing_context="fork")
    with IterationReport(linear, console=quiet()) as report:
        for seen in loader:
            assert is_watched()
            assert seen.item() == 0
            report.record_stats()
    assert len(report.iterations) == 2


class _Counted:
    """A stand-in for an allocator's counters: this machine has none. Each reading begins a peak anew."""

    name, kind, product, capacity = "cuda:0", "allocator", "", None

    def __init__(self) -> None:
        self.readings = [
            Reading(9, 99, reserved=90, peak_reserved=990),
            Reading(2, 7, reserved=20, peak_reserved=30),
        ]
        self.is_closed = False

    def read(self) -> Reading:
        return self.readings.pop(0)

    def close(self) -> None:
        self.is_closed = True


def test_where_an_allocator_counts_its_counters_are_the_cache(linear):
    counted: Any = _Counted()
    watch = IterationWatch(lambda _: [counted])
    watch.begin(linear, [])
    step(linear)
    memory: Any = iteration_memory(linear, watch.end(linear, []), step=1, epoch=1, iteration=1, seconds=0.0)
    assert (memory.peak_cached_bytes, memory.cached_bytes) == (30, 20)
    assert (memory.peak_allocated_bytes, memory.allocated_bytes) == (7, 2)
    assert memory.has_cache
    assert memory.untraced_peak_bytes == 7 - memory.traced.peak_bytes
    assert counted.is_closed


def test_it_is_saved_for_the_tab(linear, tmp_path):
    with IterationReport(linear, 2, console=quiet(), logdir=tmp_path, worker_name="w") as report:
        for _ in range(4):
            step(linear)
            report.record_stats()
    windows = [load_window(str(path)) for path in sorted(tmp_path.rglob("*.mem"))]
    assert [[one.number for one in window.steps] for window in windows] == [[2], [4]]
    assert [int(window.live(0).max()) for window in windows] == [
        one.traced.peak_bytes if one.traced else 0 for one in report.iterations
    ]
    assert windows[0].source == "IterationReport"
    assert windows[0].notes[0] == "Iteration 2 of epoch 1."


def test_a_logdir_that_cannot_be_written_ends_nothing(linear, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    caplog.set_level(logging.WARNING, "tb_memplugin")
    with IterationReport(linear, console=quiet(), logdir=tmp_path / "file") as report:
        for _ in range(3):
            step(linear)
            assert report.record_stats() is not None
    (record,) = caplog.records
    assert "could not be written: Not a directory.\n  where: " in record.getMessage()


class _Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_console_that_is_gone_ends_nothing(linear):
    with IterationReport(linear, console=Console(file=_Broken())) as report:
        step(linear)
        assert report.record_stats() is not None
        report.epoch_end()


def test_the_loop_of_the_readers_page_runs(linear, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report = IterationReport(linear, print_period=5, csv=True)
    for _ in range(2):
        for _ in range(6):
            step(linear)
            report.record_stats()
        report.epoch_end()
    report.close()
    shown = capsys.readouterr().out
    assert "Iteration 5 of epoch 2, cpu" in shown
    for field in ("cached", "feature maps", "weights", "weight gradients", "intermediate gradients", "bias"):
        assert field in shown
    assert len(list(Path("memory_csv_data").iterdir())) == 2
