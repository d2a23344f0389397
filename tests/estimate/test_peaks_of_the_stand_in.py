"""Estimates equal what PyTorch's CUDA allocator counts for the same trainings, to the byte.

The table was made by `python -m tests.gpu.standin -m benchmarks.on_gpu estimate` (docs/gpu.md), as an A100
with PyTorch 2.13.0+cu130. cuDNN takes nothing for convolutions there, and for LSTMs what cuDNN 9.20 asks for.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.on_gpu.programs import LARGE, Program
from tb_memplugin import MemoryEstimator
from tb_memplugin.read.cublas import keeps_workspaces

PEAKS = {
    Program("CNN", "fp32", "SGD"): (4_725_769_728, 4_861_198_336),
    Program("CNN", "fp32", "Adam"): (4_728_156_160, 4_865_392_640),
    Program("CNN", "fp32", "fused Adam"): (4_728_182_784, 4_863_295_488),
    Program("CNN", "AMP", "SGD"): (2_381_288_448, 2_447_376_384),
    Program("CNN", "AMP", "Adam"): (2_383_674_880, 2_449_473_536),
    Program("CNN", "bf16", "Adam"): (2_372_646_400, 2_443_182_080),
    Program("CNN", "fp32", "SGD", compiled=True): (4_491_044_864, 4_513_071_104),
    Program("LSTM", "fp32", "SGD"): (2_485_972_480, 3_365_928_960),
    Program("LSTM", "fp32", "Adam"): (2_815_418_880, 3_890_216_960),
    Program("LSTM", "bf16", "fused Adam"): (2_235_238_912, 2_829_058_048),
    Program("transformer", "fp32", "SGD"): (4_829_110_272, 5_668_601_856),
    Program("transformer", "fp32", "Adam"): (5_494_461_440, 6_629_097_472),
    Program("transformer", "fp32", "fused Adam"): (5_494_512_128, 6_629_097_472),
    Program("transformer", "AMP", "Adam"): (4_950_994_432, 5_790_236_672),
    Program("transformer", "bf16", "Adam"): (3_404_321_280, 4_150_263_808),
    Program("transformer", "bf16", "fused Adam"): (3_404_371_968, 4_150_263_808),
    Program("transformer", "bf16", "Adam", compiled=True): (3_538_539_008, 4_282_384_384),
    Program("transformer, checkpointed", "fp32", "Adam"): (3_883_324_416, 4_934_598_656),
    Program("transformer, checkpointed", "bf16", "fused Adam"): (2_664_069_120, 3_095_396_352),
}
"""Bytes at the peak, allocated and reserved."""


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or not keeps_workspaces(), reason="counted with PyTorch 2.13"
)
@pytest.mark.parametrize(("program", "counted"), PEAKS.items(), ids=map(str, PEAKS))
def test_an_estimate_equals_the_allocators_counters(program: Program, counted: tuple[int, int]) -> None:
    with MemoryEstimator("cuda", gpu="a100-40gb") as estimator:
        program.train("cuda", LARGE)
    answer = estimator.estimate()
    assert (answer.peak_allocated_bytes, answer.peak_reserved_bytes) == counted
