"""Tests for training steps as on a GPU: optimizers, gradient sums, mixed precision, converted modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tb_memplugin import MemPluginError
from tb_memplugin.estimate.answer.hints import EVERY_STEP
from tests.estimate.fake_runs import MIB, allocations, estimated, sizes


def linear(**options: Any) -> nn.Linear:
    """Return a layer of 1024 x 1024 float32: 4 MiB."""
    return nn.Linear(1024, 1024, bias=False, device="cuda", **options)


def trained(optimizer: Any, layers: int = 4, **options: Any) -> None:
    model = nn.Sequential(*(linear() for _ in range(layers)))
    steps = optimizer(model.parameters(), lr=0.1, **options)
    model(torch.randn(1, 1024, device="cuda")).sum().backward()
    steps.step()


def test_adamw_takes_foreach_kernels_by_default() -> None:
    """Foreach kernels hold the square roots of all parameters at once: 16 MiB where single tensors need 4."""
    done = estimated(lambda: trained(torch.optim.AdamW), gpu="a100")
    assert sizes(done, "_foreach_sqrt") == [4 * MIB] * 4
    plain = estimated(lambda: trained(torch.optim.AdamW), gpu="a100", corrected=False)
    assert sizes(plain, "_foreach_sqrt") == []


def test_foreach_can_be_switched_off_by_the_program() -> None:
    done = estimated(lambda: trained(torch.optim.AdamW, foreach=False), gpu="a100")
    assert sizes(done, "_foreach_sqrt") == []


@pytest.mark.parametrize(
    ("optimizer", "options", "states"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adam, {}, 2),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.Adagrad, {}, 1),
    ],
)
def test_fused_optimizers_hold_their_state_and_nothing_else(
    optimizer: Any, options: dict[str, Any], states: int
) -> None:
    done = estimated(lambda: trained(optimizer, fused=True, **options), gpu="a100")
    large = [kind for _, size, kind in allocations(done) if size == 4 * MIB]
    assert large.count("optimizer_state") == 4 * states
    assert "temporary" not in large


def shared() -> None:
    layer = linear()
    layer(layer(layer(torch.randn(1, 1024, device="cuda")))).sum().backward()


def test_gradients_of_a_shared_weight_are_summed_in_place_after_the_first_sum() -> None:
    """Three gradients of the weight need two sums. The first gradient is a view, so it is not added into."""
    assert sizes(estimated(shared), "add") == [4 * MIB]
    assert sizes(estimated(shared, corrected=False), "add") == [4 * MIB] * 2


def branches(*, create_graph: bool = False) -> None:
    tensor = torch.randn(MIB, device="cuda", requires_grad=True)
    summed = torch.stack([tensor.sin().sum(), tensor.cos().sum(), tensor.exp().sum()]).sum()
    torch.autograd.grad(summed, tensor, create_graph=create_graph)


def test_gradients_of_a_shared_tensor_are_summed_in_place() -> None:
    assert sizes(estimated(branches), "add") == []
    assert sizes(estimated(branches, corrected=False), "add") == [4 * MIB] * 2
    assert sizes(estimated(lambda: branches(create_graph=True)), "add") == [4 * MIB] * 2


def test_a_sum_in_the_users_own_backward_is_out_of_place() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            first = gradients[0] * 2
            first = first + gradients[0]
            return first

    def run() -> None:
        tensor = torch.randn(MIB, device="cuda", requires_grad=True)
        Twice.apply(tensor).sum().backward()

    assert sizes(estimated(run), "add") == [4 * MIB]


def test_a_gradient_that_is_kept_is_not_summed_into() -> None:
    def run() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        tensor = torch.randn(MIB, device="cuda", requires_grad=True)
        double = tensor * 2
        double.register_hook(lambda gradient: kept.append(gradient))
        (double.sin() + double.cos()).sum().backward()
        return kept

    done = estimated(run)
    assert sizes(done, "add")  # that of the forward


def test_derivatives_fill_zeros_in_place() -> None:
    """The gradient of indexing is written into zeros of the table's size."""

    def run() -> None:
        table = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        table[torch.zeros(4, dtype=torch.long, device="cuda")].sum().backward()

    assert 4 * MIB not in sizes(estimated(run), "index_put")
    assert sizes(estimated(run, corrected=False), "index_put") == [4 * MIB]


def table() -> torch.Tensor:
    return torch.randn(1024, 1024, device="cuda", requires_grad=True)


def places(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long, device="cuda")


@pytest.mark.parametrize(
    ("program", "operator"),
    [
        (lambda: table().index_select(0, places(4)), "index_add"),
        (lambda: table().gather(0, places(4, 1024)), "scatter_add"),
        (lambda: table().max(dim=0)[0], "scatter"),
        (lambda: table().topk(3)[0], "scatter"),
    ],
)
def test_derivatives_of_what_selects_fill_zeros_in_place(program: Any, operator: str) -> None:
    def run() -> None:
        program().sum().backward()

    assert sizes(estimated(run), operator) == []
    assert sizes(estimated(run, corrected=False), operator) == [4 * MIB]


def test_the_derivative_of_masked_select_fills_zeros_in_place() -> None:
    def run() -> None:
        chosen = table()
        chosen.masked_select(chosen > 0).sum().backward()

    assert sizes(estimated(run), "masked_scatter") == [8 * MIB]  # a buffer of 8 bytes an element


@pytest.mark.parametrize(
    ("program", "operator"),
    [
        (lambda: table().scatter(0, places(4, 1024), 1.0), "scatter"),
        (lambda: table().index_put((places(4),), torch.ones(4, 1024, device="cuda")), "index_put"),
    ],
)
def test_a_gradient_with_holes_is_a_new_one(program: Any, operator: str) -> None:
    """As in a real run on the CPU, a gradient from the next operator is not written into."""

    def run() -> None:
        (program() * 2).sum().backward()

    assert sizes(estimated(run), operator) == [4 * MIB, 4 * MIB]  # one in forward, one in backward


def test_autocast_casts() -> None:
    """Weight and input are cast to float16, half of 4 MiB each."""

    def run() -> torch.Tensor:
        layer, batch = linear(), torch.randn(1024, 1024, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            return layer(batch)

    done = estimated(run)
    assert sizes(done, "_to_copy") == [2 * MIB, 2 * MIB]
    assert sizes(done, "mm") == [2 * MIB, 33_554_432]


def scaled(takes_steps: bool = True) -> Any:
    layer, batch = linear(), torch.randn(256, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(layer(batch).sum()).backward()
        if takes_steps:
            scaler.step(optimizer)
            scaler.update()
    return optimizer.state_dict(), scaler.get_scale()


def test_a_grad_scaler_takes_every_step_and_a_note_has_the_bytes_without() -> None:
    """The state that its steps make, 4 MiB of momentum, is alive at the peak of the second."""
    done, without = estimated(scaled), estimated(lambda: scaled(takes_steps=False))
    assert [kind for _, size, kind in allocations(done) if size == 4 * MIB].count("optimizer_state") == 1
    (note,) = (note for note in done.estimate().notes if note.startswith(EVERY_STEP))
    assert note.endswith("the peak is 4,194,304 bytes lower.")
    assert done.estimate().peak_allocated_bytes - without.estimate().peak_allocated_bytes == 4_194_304


def test_modules_move_and_change_their_type() -> None:
    """A layer built on the CPU is moved and then halved: 4 MiB, then 2 MiB while the 4 MiB are still live."""

    def run() -> nn.Module:
        layer = nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.SGD(layer.parameters())
        moved = layer.to("cuda").half()
        assert moved.weight.dtype is torch.float16
        assert moved.weight is optimizer.param_groups[0]["params"][0]
        return moved

    done = estimated(run)
    assert [size for _, size, _ in allocations(done)] == [4 * MIB, 2 * MIB]
    assert done.get_max_memory_allocated() == (6 * MIB,)
    assert done.get_current_memory_allocated() == (2 * MIB,)


def test_tied_weights_stay_tied_when_moved() -> None:
    def run() -> nn.Module:
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
        model[1].weight = model[0].weight
        model.cuda()
        assert model[1].weight is model[0].weight
        return model

    assert sizes(estimated(run), "_to_copy") == [4 * MIB]


def test_trunc_normal_ends() -> None:
    done = estimated(lambda: nn.init.trunc_normal_(torch.empty(MIB, device="cuda")))
    assert done.get_max_memory_allocated()[0] >= 8 * MIB


def test_clipping_the_norm_of_gradients() -> None:
    """1024 x 1024 numbers have 16 parts of 65,536, whose norms are kept for a moment."""

    def run() -> None:
        layer = linear()
        layer(torch.randn(1, 1024, device="cuda")).sum().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)

    assert sizes(estimated(run), "_foreach_norm") == [4, 16 * 4]


def test_compiled_models_say_so() -> None:
    def run() -> torch.Tensor:
        return torch.compile(linear())(torch.randn(1, 1024, device="cuda"))

    assert any("torch.compile" in note for note in estimated(run).estimate().notes)


def test_what_was_compiled_before_runs_uncompiled() -> None:
    compiled = torch.compile(lambda tensor: tensor.sin().cos())
    assert sizes(estimated(lambda: compiled(torch.randn(MIB, device="cuda"))), "sin") == [4 * MIB]


def test_a_real_model_is_refused_and_stays_real() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(MemPluginError, match="built before"):
        estimated(lambda: model.to("cuda"))
    assert type(model.weight) is nn.Parameter


def test_a_moved_constant_keeps_its_device_in_operators() -> None:
    def run() -> torch.device:
        model = nn.Module()
        model.register_parameter("scale", nn.Parameter(torch.zeros(4)))
        return (model.to("cuda").get_parameter("scale") * 1).device

    seen: list[torch.device] = []
    estimated(lambda: seen.append(run()))
    assert seen[0].type == "cuda"


def test_data_loaders_load_real_data() -> None:
    data = TensorDataset(torch.randn(8, 1024))

    def run() -> list[tuple[int, ...]]:
        layer, shapes = linear(), []
        for (batch,) in DataLoader(data, batch_size=4, shuffle=True):
            shapes.append(tuple(layer(batch.to("cuda")).shape))
        return shapes

    done = estimated(run)
    assert sizes(done, "mm")[0] == 4 * 1024 * 4


def test_a_model_on_meta_gets_its_memory_with_to_empty() -> None:
    def run() -> nn.Module:
        with torch.device("meta"):
            layer = nn.Linear(1024, 1024, bias=False)
        assert torch.cuda.memory_allocated() == 0
        return layer.to_empty(device="cuda")

    assert estimated(run).get_max_memory_allocated() == (4 * MIB,)


def test_copies_of_modules_have_memory_of_their_own() -> None:
    def run() -> list[nn.Module]:
        layer = linear()
        return [layer, copy.deepcopy(layer)]

    assert estimated(run).get_max_memory_allocated() == (8 * MIB,)


def test_lazy_modules_get_their_sizes_in_the_first_forward() -> None:
    lengths: list[tuple[str, int]] = []
    kept: list[nn.Module] = []

    def run() -> None:
        lazy = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))
        copied = copy.deepcopy(lazy.cuda())
        lazy(torch.randn(2, 3, 18, 18, device="cuda"))
        copied.load_state_dict(lazy.state_dict())
        kept.append(lazy)
        for model in (lazy, copied):
            lengths.extend((str(tensor.device), tensor.numel()) for tensor in model.state_dict().values())

    done = estimated(run)
    convolution, normalization, last = (8 * 3 * 9, 8), (8, 8, 8, 8, 1), (4 * 8 * 16 * 16, 4)
    assert lengths == [("cuda:0", length) for length in (*convolution, *normalization, *last)] * 2
    assert next(kind for _, size, kind in allocations(done) if size == 4 * last[0]) == "parameter"
    assert isinstance(nn.LazyLinear(4).weight, nn.UninitializedParameter)  # afterwards it is torch's own
    with pytest.raises(RuntimeError, match="uninitialized parameter"):
        _ = nn.LazyLinear(4).weight.shape
