"""`tb-memplugin estimate` of models of transformers, by their configs alone."""

import json

import pytest

from tests.commands.files import refused
from tests.commands.test_estimate import M, estimate, parts

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 64,
}
LLAMA_PARAMETERS = 2 * 1024 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_llama_from_its_config(llama):
    answer = estimate(llama, "--dtype", "bf16", "--batch", 2)
    small_weights = 5 * (512 - 2 * 128)  # five norms of 256 bytes take 512 each
    assert parts(answer)["parameter"] == 2 * LLAMA_PARAMETERS + small_weights
    assert parts(answer)["optimizer_state"] == 2 * parts(answer)["parameter"]
    assert (answer["workload"]["seq"], answer["workload"]["batch"]) == (64, 2)
    assert answer["target"] == "LlamaForCausalLM (LlamaConfig)"


def test_a_config_file_longer_than_its_positions_and_checkpointed(llama):
    answer = estimate(llama / "config.json", "--seq", 128, "--checkpointing")
    assert any("128 tokens are more than the 64 positions" in note for note in answer["notes"])


def test_a_config_of_an_unknown_model(llama):
    (llama / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "transformers cannot read the config" in refused("estimate", llama)


def test_a_config_without_a_model(llama):
    (llama / "config.json").write_text("{")
    assert "transformers cannot read the config" in refused("estimate", llama)


@pytest.mark.parametrize(
    ("name", "parameters", "seq"),
    [("GPT2Config", 124_439_808, 1024), ("ViTConfig", 85_800_194, None), ("BertConfig", 109_514_298, 512)],
)
def test_models_of_transformers_by_the_name_of_their_config(name, parameters, seq):
    """Large blocks keep a rest that is too small to be one: less than 1 MiB each, as torch counts it."""
    answer = estimate(name, "--inference")
    assert 0 <= parts(answer)["parameter"] - 4 * parameters < 4 * parameters // 100
    assert answer["workload"]["seq"] == seq


def test_the_rest_of_a_large_block_by_hand():
    embedding = 50_257 * 768 * 4  # GPT-2's; tied to its head, so there is one
    rest = 148 * M - embedding
    assert parts(estimate("GPT2Config", "--inference"))["parameter"] == 4 * 124_439_808 + rest


def test_a_loop_over_tokens_that_would_not_end_is_refused_by_name():
    message = refused("estimate", "MambaConfig", "--no-changes")
    assert "MambaForCausalLM loops over tokens in Python, 32 layers x 2,048 tokens" in message
    assert "--seq 128" in message


@pytest.mark.parametrize(
    ("name", "parameters", "features"),
    [("ResNetConfig", 25_557_032, 2048), ("ConvNextConfig", 28_589_128, 768)],
)
def test_convolutional_models_train(name, parameters, features):
    """With 1,000 classes ResNet-50 has 25,557,032 parameters, ConvNext-tiny 28,589,128. Here are 2."""
    answer = estimate(name, "--batch", 2)
    fewer = 998 * (features + 1)
    assert 0 <= parts(answer)["parameter"] - 4 * (parameters - fewer) < 4 * parameters // 100
    assert any("cuDNN's workspaces are not known" in note for note in answer["notes"])
    assert not any("1.0" in note for note in answer["notes"])  # rates of stochastic depth are known numbers


WEIGHTS = 2 * LLAMA_PARAMETERS  # in bf16
ROUNDING = 512 * (2 + 2 * 9 + 1)
"""At most a block more for each of its parameters: embedding and head, nine in each of two layers, a norm."""


def on_a_mesh(llama, mesh, *more):
    return estimate(llama, "--dtype", "bf16", "--mesh", mesh, *more)


@pytest.mark.parametrize(("mesh", "share"), [("fsdp=4", 4), ("dp=2,fsdp=4", 4), ("fsdp=2,tp=2", 4)])
def test_a_sharded_rank_has_its_share_of_weights_and_state(llama, mesh, share):
    answer = on_a_mesh(llama, mesh)
    norms = 5 * 256 if "tp" in mesh else 0  # these are not divided by tensor parallelism
    assert 0 <= parts(answer)["parameter"] - WEIGHTS // share <= ROUNDING + norms
    assert parts(answer)["optimizer_state"] == 2 * parts(answer)["parameter"]
    assert any("fully_shard around 2 layers" in note for note in answer["notes"])


def test_tensor_parallelism_divides_what_transformers_plan_names(llama):
    answer = on_a_mesh(llama, "tp=2", "--optimizer", "adamw-fused")
    assert 0 <= parts(answer)["parameter"] - WEIGHTS // 2 <= ROUNDING + 5 * 256
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("mesh", "share"),
    [("pp=2,dp=2", 1), ("pp=2,fsdp=2", 2)],
)
def test_a_rank_has_its_share_of_its_stage(llama, mesh, share):
    """Of two stages: a layer and the embedding, or a layer, the norm and the head."""
    answer = on_a_mesh(llama, mesh, "--micro-batches", 3, "--no-changes")
    assert 0 <= parts(answer)["parameter"] - WEIGHTS // 2 // share <= ROUNDING
    assert parts(answer)["optimizer_state"] == 2 * parts(answer)["parameter"]
    assert any("Each stage is sharded by" in note for note in answer["notes"])


def test_replicas_hold_all_and_a_bucket_of_gradients(llama):
    answer = on_a_mesh(llama, "dp=2", "--checkpointing")
    assert 0 <= parts(answer)["parameter"] - WEIGHTS <= ROUNDING
    assert 0 <= parts(answer)["communication"] - WEIGHTS <= ROUNDING
    assert any("DistributedDataParallel" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("name", "mesh", "what"),
    [
        (None, "dp=2,tp=2", "does not take a model with tensor parallelism"),
        (None, "pp=2,ep=2", "is not divided along ep together with other dimensions"),
        (None, "pp=2,dp=2", "fails in torch itself"),  # with two micro-batches: reducer.cpp asserts
        ("GPT2Config", "tp=2", "GPT2LMHeadModel has no plan for tensor parallelism"),
    ],
)
def test_meshes_that_cannot_be_are_refused_by_name(llama, name, mesh, what):
    assert what in refused("estimate", name or llama, "--mesh", mesh, "--no-changes")
