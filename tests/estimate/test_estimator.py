"""Tests for `MemoryEstimator`: the trace of a model on fake tensors, and the results read from it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tb_memplugin import MemoryEstimator, MemPluginError, load
from tb_memplugin.estimate.answer.estimation import RESERVED_OFF, Estimate, margin_bounds
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.trace import Category, MemoryTrace, Phase

KIB, MIB = 1 << 10, 1 << 20


def rows(trace: MemoryTrace) -> Iterator[tuple[str, int, str, str]]:
    """Yield (operator, bytes, category, module) of every allocation."""
    blocks = trace.allocations
    for row in range(len(blocks)):
        yield (
            trace.operators[blocks.operator[row]],
            int(blocks.bytes[row]),
            Category(int(blocks.category[row])).key,
            trace.modules[blocks.module[row]].key,
        )


def of_category(estimator: MemoryEstimator, category: str) -> int:
    return sum(size for _, size, kind, _ in rows(estimator.trace_result()) if kind == category)


@pytest.fixture(scope="module")
def trained() -> MemoryEstimator:
    """Train two linear layers of 1024 x 1024 without bias for two steps, on 512 rows of 1024 float32."""
    with MemoryEstimator(gpu="a100") as estimator:
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        estimator.watch(model, optimizer)
        batch = estimator.create_fake_tensor(512, 1024)
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            estimator.step()
    return estimator


def test_parameters_gradients_and_optimizer_state_are_exact(trained: MemoryEstimator) -> None:
    assert of_category(trained, "parameter") == 2 * 4 * MIB
    assert of_category(trained, "optimizer_state") == 2 * 4 * MIB
    assert of_category(trained, "gradient") == 2 * 2 * 4 * MIB  # freed after each of two steps
    assert of_category(trained, "input") == 2 * MIB


def test_every_allocation_has_its_module_and_operator(trained: MemoryEstimator) -> None:
    found = list(rows(trained.trace_result()))
    assert ("aten::_to_copy", 4 * MIB, "parameter", "0") in found
    assert ("aten::mm", 2 * MIB, "activation", "1") in found
    assert ("aten::mm", 4 * MIB, "gradient", "1") in found


def test_the_peak_is_where_it_can_be_worked_out(trained: MemoryEstimator) -> None:
    """The peak is in the second backward: parameters, momentum, input, both gradients, the gradient of the
    first layer's result, the loss and its gradient in a block each, and two cuBLAS workspaces of 8,519,680
    bytes.
    """
    whole = 2 * 4 * MIB + 2 * 4 * MIB + 2 * MIB + 2 * 4 * MIB + 2 * MIB + 2 * 512 + 2 * 8_519_680
    assert trained.get_max_memory_allocated() == (whole,)
    answer = trained.estimate()
    assert answer.peak_allocated_bytes >= trained.get_max_memory_allocated()[0]
    assert sum(size for _, size in answer.breakdown) == answer.peak_allocated_bytes


def test_the_trace_has_steps_and_phases(trained: MemoryEstimator) -> None:
    trace = trained.trace_result()
    assert len(trace.steps) == 2
    assert {Phase(int(phase)) for phase in trace.phases.phase} == {
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    }
    assert trace.source == "MemoryEstimator"
    assert trace.devices[0].name == "cuda:0"


def test_the_answer_says_whether_it_fits(trained: MemoryEstimator) -> None:
    answer = trained.estimate()
    assert answer.fits
    assert answer.margin_bytes is not None
    assert answer.margin_bytes > 79 << 30
    assert answer.peak_reserved_bytes >= answer.peak_allocated_bytes
    assert answer.workspace_bytes == 2 * 8_519_680


def test_a_model_that_cannot_fit_is_said_not_to() -> None:
    with MemoryEstimator(gpu="t4") as estimator:
        keep = [torch.empty(1 << 30, device="cuda") for _ in range(5)]  # 4 GiB each
    assert len(keep) == 5
    answer = estimator.estimate()
    assert answer.fits is False
    assert answer.margin_bytes is not None
    assert answer.margin_bytes < 0


def test_a_known_context_is_no_room_of_the_allocators_and_is_said() -> None:
    with MemoryEstimator(gpu="l4") as estimator:
        keep = torch.empty(5 << 20, device="cuda")  # 20 MiB
    assert len(keep) == 5 << 20
    answer = estimator.estimate()
    assert answer.margin_bytes == (22_558 - 236 - 20) * MIB
    assert any("236 MiB of the GPU's memory are set aside" in note for note in answer.notes)


def test_the_margin_lies_between_bounds() -> None:
    """1 GiB is reserved of 22,558 MiB, of which a context takes 236 MiB, or up to 712 MiB."""
    with MemoryEstimator(gpu="l4") as estimator:
        keep = torch.empty(1 << 28, device="cuda")
    assert len(keep) == 1 << 28
    answer = estimator.estimate()
    assert answer.verdict == "fits"
    below, above = RESERVED_OFF
    least = 22_558 * MIB - 712 * MIB - round((1 << 30) / (1 + below))
    most = 22_558 * MIB - 236 * MIB - round((1 << 30) / (1 + above))
    assert answer.margin_bounds_bytes == (least, most)
    assert answer.margin_text == "with 20.25 to 20.85 GiB to spare"


@pytest.mark.parametrize(
    ("margin", "not_counted", "verdict", "text"),
    [
        (0, 0, "may fit", "with between 7.42 GiB too little and 3.62 GiB to spare"),
        (9 << 30, 0, "fits", "with 2.35 to 12.20 GiB to spare"),
        (9 << 30, 4 << 30, "may fit", "with between 1.65 GiB too little and 12.20 GiB to spare"),
        (-(9 << 30), 0, "does not fit", "with 4.96 to 17.18 GiB too little"),
    ],
)
def test_a_step_may_fit_where_the_bounds_include_the_capacity(margin, not_counted, verdict, text) -> None:
    """An H100 has 79.11 GiB; its context is not known, so both bounds leave room for one: 100 or 712 MiB."""
    bounds = margin_bounds(GpuSpec.named("h100"), margin, not_counted)
    answer = Estimate(0, 0, 0, None, margin, bounds, (), (), 0.0, "h100")
    assert (answer.verdict, answer.margin_text) == (verdict, text)


def test_a_program_that_allocates_nothing_on_the_device_is_told_so() -> None:
    with MemoryEstimator(gpu="h100") as estimator:
        keep = torch.empty(4)
    assert keep.device.type == "cpu"
    assert any("Nothing was allocated on cuda" in note for note in estimator.estimate().notes)


def test_without_a_gpu_nothing_is_said_of_fitting() -> None:
    with MemoryEstimator(gpu=None) as estimator:
        estimator.create_fake_tensor(16)
    answer = estimator.estimate()
    assert (answer.fits, answer.margin_bytes, answer.verdict) == (None, None, None)


def test_the_cpu_is_estimated_too() -> None:
    with MemoryEstimator(device="cpu") as estimator:
        model = nn.Linear(256, 256)
        loss = model(estimator.create_fake_tensor(256, 256)).sum()
    assert loss.shape == ()
    assert estimator.get_max_memory_allocated() == (256 * 1024 + 1024 + 256 * 1024 + 256 * 1024 + 4,)
    assert estimator.estimate().peak_reserved_bytes == estimator.estimate().peak_allocated_bytes


def test_a_phase_counts_what_blocks_get_beyond_their_requests() -> None:
    """11 MiB and a byte take a whole segment of 12 MiB, since the rest is too small to be a block."""
    with MemoryEstimator(gpu="a100") as estimator, estimator.track_phase("all"):
        keep = torch.empty((11 << 20) + 1, dtype=torch.uint8, device="cuda")
    del keep
    answer = estimator.estimate()
    assert answer.phases == (("all", 12 * MIB),)
    assert answer.peak_allocated_bytes == 12 * MIB


def test_phases_of_the_users_own() -> None:
    with MemoryEstimator() as estimator:
        with estimator.track_phase("build"):
            keep = torch.empty(MIB, device="cuda")  # 4 MiB
        with estimator.track_phase("peak"):
            torch.empty(2 * MIB, device="cuda")
        assert estimator.get_current_memory_allocated() == (4 * MIB,)
    assert keep.shape == (MIB,)
    assert estimator.estimate().phases == (("build", 4 * MIB), ("peak", 12 * MIB))


class Outer(torch.optim.SGD):
    """Its step allocates 4 MiB, and steps another optimizer."""

    def step(self, closure=None):
        torch.empty(MIB, device="cuda")
        torch.optim.SGD(self.param_groups, lr=0.1).step()


def test_a_step_within_a_step_does_not_move_its_start() -> None:
    with MemoryEstimator() as estimator:
        Outer([torch.nn.Parameter(torch.empty(16, device="cuda"))]).step()
    trace = estimator.trace_result()
    (event,) = trace.allocations.born[trace.allocations.bytes == 4 * MIB]
    assert trace.events.phase[event] == Phase.OPTIMIZER


def test_what_follows_a_backward_that_made_nodes_is_no_forward() -> None:
    """Of functorch and of create_graph=True: the 4 MiB after it are of no phase."""
    with MemoryEstimator() as estimator:
        weight = torch.empty(16, device="cuda", requires_grad=True)
        torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
        torch.empty(MIB, device="cuda")
        weight.pow(2).sum().backward()
    trace = estimator.trace_result()
    (event,) = trace.allocations.born[trace.allocations.bytes == 4 * MIB]
    assert trace.events.phase[event] == Phase.OTHER


def test_the_trace_is_saved_like_any_other(trained: MemoryEstimator, tmp_path: Path) -> None:
    trained.save(tmp_path)
    (window,) = tmp_path.rglob("window-*.mem")
    again = load(window)
    assert len(again.allocations) == len(trained.trace_result().allocations)


def test_nothing_is_left_behind(trained: MemoryEstimator) -> None:
    assert torch.cuda.is_available() == (torch.version.cuda is not None and torch.cuda.device_count() > 0)
    assert type(torch.empty(1)) is torch.Tensor
    assert nn.Linear(2, 2).half().weight.dtype is torch.float16


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.bfloat16), torch.get_default_dtype),
    "device": (lambda: torch.set_default_device("cuda"), torch.get_default_device),
    "gradients": (lambda: torch.set_grad_enabled(mode=False), torch.is_grad_enabled),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(mode=True), torch.is_anomaly_enabled),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(mode=True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "autocast": (lambda: torch.set_autocast_enabled("cuda", True), lambda: torch.is_autocast_enabled("cuda")),
    "attention": (lambda: torch.backends.cuda.enable_flash_sdp(False), torch.backends.cuda.flash_sdp_enabled),
    "cudnn": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "products": (lambda: torch.set_float32_matmul_precision("high"), torch.get_float32_matmul_precision),
    "convolutions": (
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
        lambda: torch.backends.cudnn.allow_tf32,
    ),
    "random numbers": (lambda: torch.manual_seed(7), lambda: torch.get_rng_state().sum().item()),
    "hooks": (
        lambda: register_module_forward_hook(lambda *_: None),
        lambda: len(torch.nn.modules.module._global_forward_hooks),
    ),
    "synchronization": (
        lambda: torch.cuda.set_sync_debug_mode("warn"),
        lambda: measured(torch.cuda.get_sync_debug_mode),
    ),
}


def measured(read: Callable[[], object]) -> object:
    with MemoryEstimator():
        return read()


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_program_sets_for_its_process_ends_with_the_estimate(name: str) -> None:
    change, read = SETTINGS[name]
    before = read()
    with MemoryEstimator():
        change()
    assert read() == before


def test_nothing_keeps_an_estimate_alive() -> None:
    with MemoryEstimator() as estimator:
        weight: Any = nn.Linear(2, 2, device="cuda").weight
        mode = weakref.ref(weight.fake_mode)
    assert mode() is not None
    del estimator, weight
    gc.collect()
    assert mode() is None


def test_an_estimator_runs_once() -> None:
    estimator = MemoryEstimator(device="cpu")
    with pytest.raises(MemPluginError, match="has not run"):
        estimator.get_max_memory_allocated()
    with estimator, pytest.raises(MemPluginError, match="no result yet"):
        estimator.estimate()
    with pytest.raises(MemPluginError, match="outside"):
        estimator.create_fake_tensor(1)
    with pytest.raises(MemPluginError, match="already run"):
        estimator.__enter__()


@pytest.mark.parametrize("device", ["xpu", "tpu:0"])  # torch knows the first, not the second
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(MemPluginError, match=f"cannot estimate for the device '{device}'"):
        MemoryEstimator(device=device)


class Counted:
    """A plugin that only counts how often it is applied."""

    name = "counted"

    def __init__(self) -> None:
        self.times = 0

    def applies(self) -> bool:
        return True

    @contextmanager
    def patch(self) -> Iterator[None]:
        self.times += 1
        yield


def collective() -> None:
    torch.distributed.all_reduce(torch.ones(4, device="cuda"))


def test_an_estimate_may_have_plugins_of_its_own() -> None:
    mine = Counted()
    with MemoryEstimator(plugins=[mine]), MemoryEstimator(plugins=["torch.distributed", mine]):
        pass
    assert mine.times == 2
    with MemoryEstimator():
        pass
    assert mine.times == 2


def test_plugins_can_be_left_out_or_chosen_by_name() -> None:
    with MemoryEstimator(plugins=["torch.distributed"]):
        collective()
    with MemoryEstimator(plugins=()), pytest.raises(ValueError, match="process group"):
        collective()


@pytest.mark.parametrize("wanted", [["horovod"], "horovod", [3]])
def test_an_unknown_plugin_is_refused_with_those_that_are_known(wanted: Any) -> None:
    with pytest.raises(MemPluginError, match=r"(?s)no plugin.*torch.distributed, "):
        MemoryEstimator(plugins=wanted)
