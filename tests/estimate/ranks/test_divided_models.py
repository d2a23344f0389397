"""Tests for models of transformers that are divided over ranks as by the command, beside real processes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.ranks import estimate_ranks
from tb_memplugin.estimate.ranks.sharded_model import sharded
from tests.estimate.ranks.real_ranks import differences, really, sizes

WIDTH, INNER, WORDS, TOKENS, BATCH = 64, 128, 128, 32, 4
STEPS = 3
HALF = (2 * WORDS * WIDTH + 4 * WIDTH * WIDTH + 3 * WIDTH * INNER) // 2
"""Elements of the divided parameters, embedding, head and one layer, on one of two ranks."""
NORMS = 3 * WIDTH


def train(across: str, *, tied: bool) -> object:
    """Train a Llama of one layer as one of four ranks: two pairs, each of which shares its tensors.

    Args:
        across: "dp" or "fsdp", the dimension of the pairs.
        tied: whether embedding and head are one parameter.
    """
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        use_cache=False,
        attn_implementation="eager",  # the CPU's fused kernel allocates buffers
        tie_word_embeddings=tied,
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(across, "tp"))
    model: Any = transformers.LlamaForCausalLM(config)
    model, _ = sharded(model, mesh)
    gc.collect()  # frees what was not this rank's
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def replicas() -> object:
    return train("dp", tied=False)


def tied_shards() -> object:
    return train("fsdp", tied=True)


def test_divided_models_allocate_what_real_processes_do(tmp_path: Path) -> None:
    """Allocations of at least 512 bytes are the same in order, and so is the peak."""
    pytest.importorskip("transformers")
    programs = {"dp=2,tp=2": replicas, "fsdp=2,tp=2": tied_shards}
    real = really(programs, 4, tmp_path)
    for mesh, program in programs.items():
        found = estimate_ranks(lambda *_, run=program: run(), mesh, device="cpu")
        assert not differences(found.ranks, real[mesh])


def test_the_bucket_of_ddp_holds_the_part_of_the_rank() -> None:
    pytest.importorskip("transformers")
    found = estimate_ranks(lambda *_: replicas(), "dp=2,tp=2", ranks=[0], device="cpu")
    assert 4 * (HALF + NORMS) in sizes(found.of(0), "communication")


def test_ddp_of_tied_and_divided_parameters_is_refused_by_name() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(MemPluginError, match="does not keep divided parameters tied"):
        estimate_ranks(lambda *_: train("dp", tied=True), "dp=2,tp=2", ranks=[0], device="cpu")
