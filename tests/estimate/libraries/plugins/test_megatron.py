"""Tests with the real megatron-core, if it is installed: `pip install --no-deps megatron-core`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.ranks import RankEstimate, estimate_ranks
from tb_memplugin.trace import Category

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

TP, PP = 2, 2
LAYERS, HIDDEN, HEADS, WORDS, TOKENS, SAMPLES, MICRO_BATCHES = 4, 256, 4, 1024, 128, 2, 4
STAGES, IN_A_PIPELINE = 4, 8


def train(estimator: MemoryEstimator, any_length: bool) -> nn.Module:
    """Train a GPT for one step with 1F1B, in two stages of two layers."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(TP, PP)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        variable_seq_lengths=any_length,
        moe_token_dispatcher_type="alltoall",
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).cuda()
    ids = estimator.create_fake_tensor(SAMPLES, TOKENS, dtype=torch.long)

    def forward(_: Any, stage: nn.Module) -> Any:
        return stage(ids, ids, None, labels=ids), lambda output: (output.float().sum(), {})

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=TOKENS,
        micro_batch_size=SAMPLES,
        decoder_seq_length=None,
        forward_only=False,
    )
    return model


def held(one: RankEstimate, category: Category) -> int:
    blocks = one.trace.allocations
    return int(blocks.bytes[blocks.category == category].sum())


@pytest.mark.parametrize("any_length", [False, True])
def test_a_gpt_over_tensor_and_pipeline_ranks_holds_its_share(any_length: bool) -> None:
    before = P2PCommunicator._communicate
    try:
        found = estimate_ranks(lambda rank, _: train(rank, any_length), f"pp={PP},tp={TP}", gpu="a100")
    finally:
        parallel_state.destroy_model_parallel()
    assert P2PCommunicator._communicate is before
    # A layer has matrices of 12 x hidden^2 in total and biases of 7 x hidden, divided over TP. The biases of
    # both outputs and the two norms are not divided.
    layer = 12 * HIDDEN**2 // TP + 7 * HIDDEN // TP + 2 * HIDDEN + 4 * HIDDEN
    first = LAYERS // PP * layer + WORDS * HIDDEN // TP + TOKENS * HIDDEN  # positions are not divided
    last = LAYERS // PP * layer + WORDS * HIDDEN // TP + 2 * HIDDEN  # output layer and last norm
    expected = [4 * count for count in (first, first, last, last)]
    assert [held(one, Category.PARAMETER) for one in found.ranks] == expected
    assert found.worst.rank == 0  # two micro-batches are in flight in the first stage, one in the last


def train_in_stages(estimator: MemoryEstimator, chunks: int) -> list[nn.Module]:
    """Train for one step of 8 micro-batches on 4 ranks, each with one or two chunks of one layer."""
    parallel_state.destroy_model_parallel()
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(1, STAGES, virtual_pipeline_model_parallel_size=virtual)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=STAGES * chunks,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=virtual,
        batch_p2p_comm=True,
        moe_token_dispatcher_type="alltoall",
    )
    models = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=WORDS,
            max_sequence_length=TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        ).cuda()
        for stage in ([None] if virtual is None else range(chunks))
    ]
    ids = estimator.create_fake_tensor(SAMPLES, TOKENS, dtype=torch.long)

    def forward(_: Any, stage: nn.Module) -> Any:
        return stage(ids, ids, None, labels=ids), lambda output: (output.float().sum(), {})

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None] * chunks if virtual else None,
        model=models if virtual else models[0],
        num_microbatches=IN_A_PIPELINE,
        seq_length=TOKENS,
        micro_batch_size=SAMPLES,
        decoder_seq_length=None,
        forward_only=False,
    )
    return models


def in_flight(one: RankEstimate) -> int:
    """Return the most micro-batches that a rank keeps for backward at once, from the results of GELU."""
    blocks, operators, count = one.trace.allocations, one.trace.operators, len(one.trace.events)
    kept = np.array([operators[row] == "aten::gelu" for row in blocks.operator])
    kept &= blocks.bytes == 4 * SAMPLES * TOKENS * 4 * HIDDEN
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, blocks.born[kept], 1)
    np.add.at(change, np.minimum(blocks.freed[kept], count), -1)
    return int(change.cumsum().max())


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (1, [4, 3, 2, 1]),  # P - r
        (2, [11, 9, 7, 5]),  # 2 (P - 1 - r) + (chunks - 1) P, plus the one that runs
    ],
)
def test_megatrons_schedules_hold_the_micro_batches_that_are_in_flight(
    chunks: int, expected: list[int]
) -> None:
    try:
        found = estimate_ranks(lambda rank, _: train_in_stages(rank, chunks), f"pp={STAGES}", gpu="a100")
    finally:
        parallel_state.destroy_model_parallel()
    assert [in_flight(one) for one in found.ranks] == expected
    assert found.worst.rank == 0
