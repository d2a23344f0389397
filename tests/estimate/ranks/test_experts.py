"""Tests for experts divided over ranks: uneven all-to-all with hints, and mixtures of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tb_memplugin.commands.estimate import command
from tb_memplugin.estimate.answer.hints import Question
from tb_memplugin.estimate.ranks import RankEstimates, estimate_ranks
from tests.cli import CliRunner
from tests.estimate.ranks.experts import SENT, WIDTH, exchange, train_a_mixture
from tests.estimate.ranks.real_ranks import differences, really, sizes

ROW = 4 * WIDTH
"""Bytes of a row."""

MIXTURE = {
    "model_type": "mixtral",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""The contents of a config.json."""


def estimated(folder: Path, *options: str) -> Any:
    """Return the command's JSON output for a config."""
    ran = CliRunner().invoke(command, [str(folder), *options, "--dtype", "bf16", "--no-changes", "--json"])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def of_both(program: Any, hints: list[Any]) -> RankEstimates:
    """Estimate two ranks, each with its own hints."""
    found = [
        estimate_ranks(lambda *_: program(), 2, [rank], device="cpu", hints=hints[rank]) for rank in (0, 1)
    ]
    return RankEstimates(found[0].mesh, tuple(one.ranks[0] for one in found))


def in_turn(numbers: list[int]) -> Any:
    """Return hints that answer each question with the next number."""
    left: Iterator[int] = iter(numbers)

    def rows(asked: Question) -> int | None:
        return next(left) if asked.kind == "count" else None

    return rows


def test_uneven_exchanges_allocate_what_real_processes_do(tmp_path: Path) -> None:
    """Rank 0 receives 5 and 9 rows, rank 1 receives 11 and 7; a row has 512 bytes."""
    programs = {"plain": partial(exchange, False), "functional": partial(exchange, True)}
    real = really(programs, 2, tmp_path)
    received = [[SENT[sender][rank] for sender in (0, 1)] for rank in (0, 1)]
    for name, program in programs.items():
        found = of_both(program, [in_turn(rows) for rows in received])
        assert not differences(found.ranks, real[name])
        assert ROW * sum(received[0]) in sizes(found.of(0))


def test_a_mixture_of_transformers_allocates_what_real_processes_do(tmp_path: Path) -> None:
    """The estimate's hints are the choices of the router in the real run."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    real = really({"mixture": partial(train_a_mixture, str(tmp_path))}, 2, tmp_path)["mixture"]
    read = [json.loads((tmp_path / f"read{rank}.json").read_text()) for rank in (0, 1)]
    found = of_both(train_a_mixture, [in_turn(rows) for rows in read])
    assert not differences(found.ranks, real)


def test_experts_on_meshes_allocate_what_real_processes_do(tmp_path: Path) -> None:
    """The parameters outside experts are in four shards, two replicas, divided tensors, and two stages."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    meshes = ("fsdp=2,ep=2", "dp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2")
    for mesh in meshes:
        (tmp_path / mesh).mkdir()
    real = really(
        {mesh: partial(train_a_mixture, str(tmp_path / mesh), mesh) for mesh in meshes}, 4, tmp_path
    )
    for mesh in meshes:
        found = []
        for rank in (0, 3):
            rows = in_turn(json.loads((tmp_path / mesh / f"read{rank}.json").read_text()))
            run = partial(train_a_mixture, None, mesh)
            ranks = estimate_ranks(lambda *_, run=run: run(), mesh, [rank], device="cpu", hints=rows)
            found.append(ranks.of(rank))
        assert not differences(found, [real[mesh][0], real[mesh][3]])


def test_experts_are_divided_over_the_ranks_that_share_tensors_too(tmp_path: Path) -> None:
    """Each of four ranks has two of eight experts; 256 tokens have two choices, and a rank sends half."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    told = estimated(tmp_path, "--mesh", "pp=2,ep=2,tp=2", "--seq", "256")
    assert [one["rank"] for one in told["ranks"]] == list(range(8))
    assert any(f"{2 * 256 // 2 // 4} rows from each rank to each" in note for note in told["notes"])
    assert any("Experts are divided over 4 ranks" in note for note in told["notes"])


@pytest.mark.parametrize("mesh", ["tp=2,ep=2", "ep=2,pp=2", "ep=2,cp=2"])
def test_a_mesh_of_experts_in_another_order_is_refused(tmp_path: Path, mesh: str) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    ran = CliRunner().invoke(command, [str(tmp_path), "--mesh", mesh, "--seq", "32"])
    assert ran.exit_code != 0
    assert "in the order pp,dp,fsdp,ep,tp" in str(ran.exception)


def test_the_command_divides_the_experts_of_a_config(tmp_path: Path) -> None:
    """8 experts over 4 ranks, in two replicas, are 2 on each rank, and 128 rows go from each rank to each."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    told = estimated(tmp_path, "--mesh", "dp=2,ep=4", "--seq", "256")
    assert [one["rank"] for one in told["ranks"]] == [0, 3, 4, 7]
    assert any("128 rows from each rank to each" in note for note in told["notes"])


def test_a_model_without_experts_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    ran = CliRunner().invoke(command, [str(tmp_path), "--mesh", "ep=4", "--seq", "32"])
    assert ran.exit_code != 0
    assert "no plan for expert parallelism" in str(ran.exception or ran.output)


def test_a_mixture_with_tied_embeddings_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"tie_word_embeddings": True}))
    ran = CliRunner().invoke(command, [str(tmp_path), "--mesh", "ep=2", "--seq", "32"])
    assert "MixtralForCausalLM has tied parameters" in str(ran.exception)
