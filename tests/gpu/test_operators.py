"""Operators take on the GPU what the estimator says: within forward and backward, and kept after each.

The same lines run on fake tensors and on the GPU, and read PyTorch's own counters. Convolutions, attention on
Hopper and Fourier transforms are left out: cuDNN and cuFFT choose how much they take.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]

TOKENS, ROWS, IMAGES, TABLE = (4, 512, 768), (2048, 768), (8, 64, 32, 32), (5000, 64)
Function = Callable[..., torch.Tensor]


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="cuda")


def on_host(x: torch.Tensor) -> torch.Tensor:
    """Copy into rows in one piece on the host."""
    return torch.empty(x.shape).copy_(x)


def passed(x: torch.Tensor, *, blocking: bool) -> torch.Tensor:
    host = x.to("cpu", torch.float16, non_blocking=not blocking)
    return host.to("cuda", torch.float32, non_blocking=not blocking)


OPERATORS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "sum": (lambda x: x.sum(), (TOKENS,)),
    "sum of columns": (lambda x: x.sum((0, 1)), (TOKENS,)),
    "sum of transposed rows": (lambda x: x.transpose(0, 2).sum(0), (TOKENS,)),
    "mean of rows": (lambda x: x.mean(-1), (TOKENS,)),
    "variance": (lambda x: x.var(), (TOKENS,)),
    "variance of columns": (lambda x: x.std(0), (ROWS,)),
    "norm": (lambda x: torch.linalg.vector_norm(x), (TOKENS,)),
    "largest of columns": (lambda x: x.max(0)[0], (ROWS,)),
    "largest by columns": (lambda x: x.amax((0, 1)), (TOKENS,)),
    "number that is not zero": (lambda x: x * x.count_nonzero(), (TOKENS,)),
    "running sum": (lambda x: x.transpose(1, 2).cumsum(-1), (TOKENS,)),
    "bias": (lambda x, bias: x + bias, (TOKENS, (768,))),
    "scale": (lambda x, scale: x * scale, (TOKENS, (768,))),
    "to the host": (lambda x: x.cpu().cuda(), (TOKENS,)),
    "to the host, transposed": (lambda x: x.transpose(1, 2).cpu().cuda(), (TOKENS,)),
    "to the host, in one piece": (lambda x: on_host(x.transpose(1, 2)).cuda(), (TOKENS,)),
    "to the host, expanded": (lambda x: on_host(x[:1].expand(4, -1, -1)).cuda(), (TOKENS,)),
    "to the host, every other row": (lambda x: x[:, ::2].cpu().cuda(), (TOKENS,)),
    "to the host and back, in half": (lambda x: passed(x, blocking=True), (TOKENS,)),
    "to the host and back, in half, transposed": (
        lambda x: passed(x.transpose(1, 2), blocking=True),
        (TOKENS,),
    ),
    "to the host and back, in half, without waiting": (lambda x: passed(x, blocking=False), (TOKENS,)),
    "to the host and back, in half, without waiting, transposed": (
        lambda x: passed(x.transpose(1, 2), blocking=False),
        (TOKENS,),
    ),
    "softmax": (lambda x: x.softmax(-1), (TOKENS,)),
    "log_softmax": (lambda x: x.log_softmax(-1), (TOKENS,)),
    "softmax in float32": (lambda x: x.softmax(-1, dtype=torch.float32), (TOKENS,)),
    "gelu": (functional.gelu, (TOKENS,)),
    "silu and product": (lambda x: functional.silu(x) * x, (TOKENS,)),
    "dropout": (functional.dropout, (TOKENS,)),
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (768,), w, b), (TOKENS, (768,), (768,))),
    "rms norm": (lambda x, w: functional.rms_norm(x, (768,), w), (TOKENS, (768,))),
    "linear": (lambda x, w, bias: functional.linear(x, w, bias), (TOKENS, (1024, 768), (1024,))),
    "linear without bias": (lambda x, w: functional.linear(x, w), (TOKENS, (1024, 768))),
    "product": (lambda x, y: x @ y, (ROWS, (768, 512))),
    "product of stacks": (lambda x, y: x @ y.transpose(1, 2), (TOKENS, TOKENS)),
    "einsum": (lambda x, y: torch.einsum("btd,dhk->bthk", x, y), (TOKENS, (768, 12, 64))),
    "cross entropy": (lambda x: functional.cross_entropy(x, rows(2048)), (ROWS,)),
    "smoothed cross entropy": (
        lambda x: functional.cross_entropy(x, rows(2048), label_smoothing=0.1),
        (ROWS,),
    ),
    "mse": (lambda x: functional.mse_loss(x, x.detach()), (TOKENS,)),
    "huber": (lambda x: functional.huber_loss(x, x.detach()), (TOKENS,)),
    "smooth l1": (lambda x: functional.smooth_l1_loss(x, x.detach()), (TOKENS,)),
    "cross entropy of logits": (
        lambda x: functional.binary_cross_entropy_with_logits(x, x.detach()),
        (TOKENS,),
    ),
    "binary cross entropy": (lambda x: functional.binary_cross_entropy(x.sigmoid(), x.detach()), (TOKENS,)),
    "divergence": (lambda x: functional.kl_div(x, x.detach(), reduction="batchmean"), (TOKENS,)),
    "small embedding": (lambda x: functional.embedding(rows(4, 512), x), (TABLE,)),
    "gather": (lambda x: x.gather(1, rows(4, 64, 768)), (TOKENS,)),
    "scatter": (lambda x: torch.zeros_like(x).scatter_add(1, rows(4, 512, 768), x), (TOKENS,)),
    "selected rows": (lambda x: x.index_select(1, rows(64)), (TOKENS,)),
    "indexed rows": (lambda x: x[rows(1000)], (TABLE,)),
    "concatenation": (lambda x: torch.cat([x, x], 1), (TOKENS,)),
    "roll": (lambda x: x.roll((2, 2), (0, 1)), (TOKENS,)),
    "padding": (lambda x: functional.pad(x, (2, 2), mode="reflect"), (TOKENS,)),
    "padding of rows that lie apart": (
        lambda x: functional.pad(x.transpose(1, 2), (2, 2), mode="reflect"),
        (TOKENS,),
    ),
    "padding of images": (lambda x: functional.pad(x, (2, 2, 2, 2), mode="reflect"), (IMAGES,)),
    "padding of transposed images": (
        lambda x: functional.pad(x.transpose(2, 3), (2, 2, 2, 2), mode="reflect"),
        (IMAGES,),
    ),
    "one_hot": (lambda x: x * functional.one_hot(rows(4, 512), 768), (TOKENS,)),
    "pooling": (lambda x: functional.max_pool2d(x, 2), (IMAGES,)),
    "average pooling": (lambda x: functional.adaptive_avg_pool2d(x, 1), (IMAGES,)),
    "softmax of images": (lambda x: x.softmax(1), (IMAGES,)),
    "log_softmax of images": (lambda x: x.log_softmax(1), (IMAGES,)),
    "glu of images": (lambda x: functional.glu(x, 1), (IMAGES,)),
    "rrelu of images": (lambda x: functional.rrelu(x, training=True), (IMAGES,)),
    "fractional pooling": (
        lambda x: functional.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5)),
        (IMAGES,),
    ),
    "fractional pooling of volumes": (
        lambda x: functional.fractional_max_pool3d(x, 2, output_ratio=(0.5, 0.5, 0.5)),
        ((2, 16, 16, 16, 16),),
    ),
    "batch norm of images": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        (IMAGES, (64,), (64,)),
    ),
    "frozen batch norm of images": (
        lambda x, w, b: functional.batch_norm(x, w.detach(), b.detach(), w, b),
        (IMAGES, (64,), (64,)),
    ),
    "margins": (lambda x: functional.multi_margin_loss(x, rows(len(x))), (ROWS,)),
    "margins of several": (lambda x: functional.multilabel_margin_loss(x, rows(*x.shape)), (ROWS,)),
    "bilinear": (lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGES,)),
    "bilinear of two channels": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        ((8, 2, 32, 32),),
    ),
    "nearest": (lambda x: functional.interpolate(x, scale_factor=2), (IMAGES,)),
    "nearest of two channels": (lambda x: functional.interpolate(x, scale_factor=2), ((8, 2, 32, 32),)),
    "pooling of areas": (lambda x: functional.interpolate(x, scale_factor=0.5, mode="area"), (IMAGES,)),
    "half": (lambda x: x.to(torch.float16).float(), (TOKENS,)),
    "masked": (lambda x: x.masked_fill(x > 0, 0.0), (TOKENS,)),
    "where": (lambda x: torch.where(x > 0, x, x * 2), (TOKENS,)),
    "sorted rows": (lambda x: x.sort(-1)[0], (TOKENS,)),
    "sorted columns": (lambda x: x.sort(0)[0], ((8000, 16),)),
    "sorted long rows": (lambda x: x.flatten(1).sort(-1)[0], (TOKENS,)),
    "many sorted rows": (lambda x: x.flatten(1).sort(-1)[0], ((128, 8000),)),
    "sorted whole": (lambda x: x.flatten().sort()[0], (ROWS,)),
    "order of experts": (lambda x: x * rows(16384).argsort(stable=True)[:768], (ROWS,)),
    "largest": (lambda x: x.topk(8)[0], (ROWS,)),
    "largest of long rows": (lambda x: x.flatten(1).topk(50)[0], (TOKENS,)),
    "sorted largest of long rows": (lambda x: x.flatten(1).topk(5000)[0], (TOKENS,)),
    "permutation": (lambda x: x[torch.randperm(2048, device="cuda")], (ROWS,)),
    "clamped": (lambda x: x.clamp(torch.zeros(768, device="cuda"), rows(768) + 1.0), (TOKENS,)),
    "largest of all": (lambda x: x.max(), (TOKENS,)),
    "taken": (lambda x: x.take(rows(1000)), (TOKENS,)),
    "unfold": (lambda x: functional.unfold(x, 3, padding=1), (IMAGES,)),
    "unfold of transposed images": (lambda x: functional.unfold(x.transpose(2, 3), 3), (IMAGES,)),
    "fold": (lambda x: functional.fold(x, (32, 32), 4, stride=4), ((8, 1024, 64),)),
    "group norm": (lambda x, w, b: functional.group_norm(x, 8, w, b), (IMAGES, (64,), (64,))),
    "group norm of rows": (lambda x, w, b: functional.group_norm(x, 8, w, b), (ROWS, (768,), (768,))),
    "group norm without weights": (lambda x: functional.group_norm(x, 8), (IMAGES,)),
    "batch norm of rows": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        ((4096, 64), (64,), (64,)),
    ),
    "batch norm of a transposed sequence": (
        lambda x, w, b: functional.batch_norm(x.transpose(1, 2), None, None, w, b, training=True),
        (TOKENS, (768,), (768,)),
    ),
    "samples of images": (
        lambda x, grid: functional.grid_sample(x, grid, align_corners=True),
        ((4, 45, 56, 56), (4, 28, 30, 2)),
    ),
    "batch norm of volumes, channels last": (
        lambda x, w, b: functional.batch_norm(
            x.contiguous(memory_format=torch.channels_last_3d), None, None, w, b, training=True
        ),
        ((4, 45, 16, 56, 56), (45,), (45,)),
    ),
    "layer norm before a transposition": (
        lambda x, w: functional.layer_norm(functional.linear(x, w), (768,)).transpose(1, 2) * 2,
        (TOKENS, (768, 768)),
    ),
    "rms norm before a transposition": (
        lambda x, w: functional.rms_norm(functional.linear(x, w), (768,)).transpose(1, 2) * 2,
        (TOKENS, (768, 768)),
    ),
    "elu of a transposition": (lambda x, w: functional.elu((x @ w).transpose(1, 2)), (TOKENS, (768, 768))),
    "mse of a transposition": (
        lambda x, w: functional.mse_loss((x @ w).transpose(1, 2), x.detach().transpose(1, 2).contiguous()),
        (TOKENS, (768, 768)),
    ),
    "absolute distances": (lambda x, y: torch.cdist(x.float(), y.float(), p=1), ((64, 32), (48, 32))),
    "absolute distances of transposed points": (
        lambda x, y: torch.cdist(x.float().t(), y.float().t(), p=1),
        ((32, 64), (32, 48)),
    ),
    "mean of what meets": (
        lambda x: torch.zeros_like(x).scatter_reduce(1, rows(4, 512, 768), x, "mean"),
        (TOKENS,),
    ),
    "drawn": (lambda x: x * torch.bernoulli(x.detach()), (TOKENS,)),
    "gru cell": (torch.gru_cell, ((64, 32), (64, 48), (144, 32), (144, 48), (144,), (144,))),
    "clip of several": (
        lambda x, y: torch.stack(torch._foreach_norm([x.flatten(), y.flatten()])).norm(),
        (TOKENS, TOKENS),
    ),
    "clip": (lambda x: torch.stack(torch._foreach_norm([x, x])).norm(), (TOKENS,)),
}


Figures = tuple[int, int]
"""Peak, and change of the level, of the requested bytes: without rounding, or unused ends of blocks."""


def figures(run: Callable[[], Any]) -> tuple[Any, Figures]:
    """Return what `run` returns, and its figures, on the GPU or on fake tensors."""
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = run()
    after = torch.cuda.memory_stats()
    return result, tuple(after[f"requested_bytes.all.{part}"] - before for part in ("peak", "current"))


def train(measure: Any, name: str, dtype: torch.dtype, wide: bool) -> list[Figures]:
    """Return the figures of an operator's forward and backward."""
    function, shapes = OPERATORS[name]
    inputs = [torch.ones(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]
    result, forward = measure(lambda: function(*inputs))
    one = torch.ones((), dtype=result.dtype, device="cuda")
    gradient = one.expand(result.shape) if wide else torch.empty_like(result)
    return [forward, measure(lambda: result.backward(gradient))[1]]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float32", "expanded gradient", "bfloat16"],
)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_what_the_estimate_says(name: str, dtype: torch.dtype, wide: bool) -> None:
    try:
        gpu = GpuSpec.named(torch.cuda.get_device_name())
    except MemPluginError:
        pytest.skip("the number of this GPU's processors is not known")
    with MemoryEstimator(gpu=gpu):
        estimated = train(figures, name, dtype, wide)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert train(figures, name, dtype, wide) == estimated
