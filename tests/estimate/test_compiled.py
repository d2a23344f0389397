"""`torch.compile` in an estimate: what Inductor allocates, in which module, and what cannot be compiled.

The peaks were counted by PyTorch's allocator on the stand-in for an A100 (docs/gpu.md), with 2.13.0+cu130.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.analysis.divisions import Divided
from tb_memplugin.analysis.moments import moment
from tb_memplugin.estimate.libraries.inductor import wrapper_code
from tb_memplugin.read.cublas import keeps_workspaces
from tests.estimate.fake_runs import KIB, MIB, allocations, estimated, sizes

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="seen with PyTorch 2.13")

A100 = "a100-40gb"


def chain(x: Tensor) -> Tensor:
    return x.sin().cos()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()


def train(model: nn.Module, loss: Callable[[Tensor], Tensor], rows: int) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        loss(torch.randn(rows, 1024, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_model() -> None:
    model = layers()
    compiled: Any = torch.compile(model)
    train(model, lambda x: compiled(x).square().mean(), 2048)


def compiled_loss() -> None:
    model = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.SiLU(), nn.Linear(4096, 1024)).cuda()

    @torch.compile
    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x)

    train(model, loss, 4096)


def uncompiled() -> None:
    model = layers()
    train(model, lambda x: model(x).square().mean(), 2048)


class Wrapped(nn.Module):
    """`Module.compile` compiles a module of one's own, but no nn.Sequential itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def compiled_in_place() -> None:
    model = Wrapped()
    model.compile()
    train(model, lambda x: model(x).square().mean(), 2048)


@pytest.mark.skipif(not keeps_workspaces(), reason="counted with workspaces that are kept")
@pytest.mark.parametrize(
    ("program", "counted"),
    [(compiled_model, 251_982_848), (compiled_in_place, 251_982_848), (compiled_loss, 319_153_152)],
)
def test_the_peak_is_that_of_the_allocator(program: Callable[[], None], counted: int) -> None:
    assert estimated(program, gpu=A100).estimate().peak_allocated_bytes == counted


def test_a_chain_of_pointwise_operators_allocates_its_result_only() -> None:
    def run() -> Tensor:
        compiled: Any = torch.compile(chain)
        out: Tensor = compiled(torch.zeros(MIB, device="cuda"))
        return out

    made = [one for one in allocations(estimated(run, gpu=A100)) if one[0] != "zeros"]
    assert [(name.startswith("triton_poi_fused"), size) for name, size, _ in made] == [(True, 4 * MIB)]


def test_kernels_belong_to_modules_and_parts_sum_to_the_whole() -> None:
    with MemoryEstimator(gpu=A100) as estimator:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
        compiled: Any = torch.compile(model)
        kept = compiled(torch.randn(256, 64, device="cuda"))
        kept.sum().backward()
    trace = estimator.trace_result()
    gelu = next(one for one in estimator.get_module_stats() if one.name == "1")
    assert (gelu.allocated_bytes, gelu.allocations) == (256 * KIB, 1)
    whole = moment(trace, 0, int(trace.live(0).argmax()))
    by: tuple[Divided, ...] = ("category", "module", "phase")
    for dimension in by:
        assert sum(part.bytes for part in whole.parts(dimension)) == whole.bytes
    assert sizes(estimator, "addmm")[0] == 256 * KIB


def test_cuda_graphs_are_said_not_to_be_modelled() -> None:
    def run() -> Any:
        compiled: Any = torch.compile(chain, mode="reduce-overhead")
        return compiled(torch.zeros(MIB, device="cuda"))

    done = estimated(run, gpu=A100)
    assert sum(size for name, size, _ in allocations(done) if name.startswith("triton")) == 4 * MIB
    assert any("CUDA graphs" in note for note in done.estimate().notes)


def test_what_dynamo_refuses_is_estimated_uncompiled_and_named() -> None:
    def asks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin().cos()

    def run() -> Any:
        compiled: Any = torch.compile(asks, fullgraph=True)
        return compiled(torch.zeros(MIB, device="cuda"))

    done = estimated(run, gpu=A100)
    assert sizes(done, "sin") == sizes(done, "cos") == [4 * MIB]
    assert any("asks (test_compiled.py" in note for note in done.estimate().notes)


@pytest.mark.parametrize("part", ["_reinterpret", "_sample"])
def test_code_that_cannot_run_is_estimated_uncompiled(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The code is tried before it is recorded, backward too: nothing of it is in the estimate."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(wrapper_code, part, fails)
    done = estimated(compiled_model, gpu=A100)
    expected = estimated(uncompiled, gpu=A100).estimate().peak_allocated_bytes
    assert done.estimate().peak_allocated_bytes == expected
    assert any("could not be compiled" in one and "no such kernel" in one for one in done.estimate().notes)


def fail_at_call(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the compiled code of one call fail: 1 is the first forward, 2 the first backward."""
    run, calls = wrapper_code.FakeModule._placed, count(1)

    def placed(module: Any, args: Any) -> Any:
        if next(calls) == number:
            module._call = lambda _: 1 / 0
        return run(module, args)

    monkeypatch.setattr(wrapper_code.FakeModule, "_placed", placed)


def test_a_forward_that_fails_after_its_trial_is_estimated_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_at_call(1, monkeypatch)
    done = estimated(compiled_model, gpu=A100)
    expected = estimated(uncompiled, gpu=A100).estimate().peak_allocated_bytes
    assert done.estimate().peak_allocated_bytes == expected
    assert any("division by zero" in one and "estimated uncompiled" in one for one in done.estimate().notes)


def test_a_backward_that_fails_after_its_trial_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_at_call(2, monkeypatch)
    with pytest.raises(MemPluginError, match=r"(?s)compiled code failed.*disable=True"):
        estimated(compiled_model, gpu=A100)


def test_it_compiles_once_for_all_steps_and_again_in_the_next_estimate() -> None:
    for size in (1, 2):
        seen: list[int] = []

        def run(graphs: list[int] = seen, size: int = size) -> None:
            norm = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
            compiled: Any = torch.compile(norm)
            for _ in range(3):
                compiled(torch.zeros(size, 3, 8, 8, device="cuda")).sum().backward()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

        torch._dynamo.utils.counters.clear()
        estimated(run, gpu=A100)
        assert seen == [1]


def test_a_compiled_step_creates_the_optimizers_state() -> None:
    def run() -> None:
        model = nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        step: Any = torch.compile(optimizer.step)
        model(torch.zeros(1, 1024, device="cuda")).sum().backward()
        step()

    done = estimated(run, gpu=A100)
    assert [size for _, size, _ in allocations(done)].count(4 * MIB) == 4  # weight, gradient, two averages
    assert not any("could not be compiled" in note for note in done.estimate().notes)


def test_constants_on_the_gpu_are_compiled() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * torch.tensor(2.0).to("cuda")

    def run() -> Any:
        compiled: Any = torch.compile(scaled)
        return compiled(torch.zeros(MIB, device="cuda"))

    done = estimated(run, gpu=A100)
    assert not any("could not be compiled" in note for note in done.estimate().notes)


def test_attention_of_any_length_is_compiled() -> None:
    def run() -> None:
        attend: Any = torch.compile(F.scaled_dot_product_attention, dynamic=True)
        heads = torch.ones(2, 4, 48, 32, device="cuda", dtype=torch.float16)
        attend(heads, heads, heads, is_causal=True)

    assert not any("could not be compiled" in note for note in estimated(run).estimate().notes)


def test_other_backends_are_estimated_uncompiled() -> None:
    def run() -> Any:
        compiled: Any = torch.compile(chain, backend="aot_eager")
        return compiled(torch.zeros(MIB, device="cuda"))

    done = estimated(run, gpu=A100)
    assert sizes(done, "sin") == [4 * MIB]
    assert any("the uncompiled program" in note for note in done.estimate().notes)


def test_a_real_model_compiles_as_before_after_an_estimate() -> None:
    settings = torch._inductor.config.get_config_copy()
    estimated(compiled_model, gpu=A100)
    assert torch._inductor.config.get_config_copy() == settings
    real: Any = torch.compile(nn.Linear(4, 3), backend="eager")
    assert type(real(torch.ones(2, 4))) is Tensor
    assert not torch.cuda.is_available()


def test_optimizers_are_as_before_after_an_estimate() -> None:
    estimated(compiled_model, gpu=A100)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert type(optimizer.state[model.weight]["exp_avg"]) is torch.Tensor


def test_torch_forgets_which_kernels_an_estimate_registered() -> None:
    """What torch remembers decides whether a model that is compiled later has attention's gradients."""

    def train() -> None:
        attend = torch.compile(lambda one: F.scaled_dot_product_attention(one, one, one))
        attend(torch.empty(1, 2, 16, 8, device="cuda", requires_grad=True)).sum().backward()

    estimated(train, gpu=A100)
    assert torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache == {}
