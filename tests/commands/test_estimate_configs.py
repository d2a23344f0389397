"""`tb-memplugin estimate` of models of transformers, by their configs alone."""

import json

import pytest

from tb_memplugin.estimate.answer.targets import read_target
from tests.commands.files import refused, run
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


@pytest.mark.parametrize(
    ("target", "what"),
    [("absent/config.json", "no such file or folder"), ("models.py", "Give models.py:FUNCTION")],
)
def test_a_file_that_is_no_target_is_refused_by_name(target, what):
    assert what in refused("estimate", target)


def test_a_config_without_a_model(llama):
    (llama / "config.json").write_text("{")
    assert "transformers cannot read the config" in refused("estimate", llama)


def with_more(folder, **more):
    (folder / "config.json").write_text(json.dumps(LLAMA | more))
    return folder


def test_the_type_is_that_of_the_config_and_else_fp32(llama):
    assert estimate(llama, "--inference")["workload"]["dtype"] == "fp32"
    answer = estimate(with_more(llama, dtype="bfloat16"), "--inference")
    assert answer["workload"]["dtype"] == "bf16"
    assert 0 <= parts(answer)["parameter"] - 2 * LLAMA_PARAMETERS < ROUNDING
    assert "dtype, 'float64', cannot be estimated" in refused("estimate", with_more(llama, dtype="float64"))


def test_quantized_weights_are_refused_and_with_a_type_left_out_by_name(llama):
    folder = with_more(llama, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "describes quantized weights (gptq)" in refused("estimate", folder)
    notes = estimate(folder, "--dtype", "bf16", "--inference")["notes"]
    assert any("quantized weights (gptq): the estimate is without quantization" in note for note in notes)


def test_an_architecture_that_is_not_there_is_told(llama):
    answer = estimate(with_more(llama, architectures=["LlamaForPoetry"]), "--inference")
    assert answer["target"] == "LlamaForCausalLM (LlamaConfig)"
    assert "names LlamaForPoetry, which this version of transformers does not have" in answer["notes"][0]


def test_a_model_that_does_not_run_in_a_type_is_told_what_would(llama):
    sizes = {"d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 128, "vocab_size": 100}
    (llama / "config.json").write_text(json.dumps({"model_type": "xlnet"} | sizes))
    message = refused("estimate", llama, "--dtype", "bf16", "--seq", 16)
    assert "does not run in this dtype" in message
    assert "--autocast bf16" in message


def test_layers_that_a_config_drops_at_random_are_kept_with_a_note(llama):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "vocab_size": 64}
    (llama / "config.json").write_text(json.dumps({"model_type": "m2m_100", **sizes, "decoder_ffn_dim": 32}))
    (note,) = (one for one in estimate(llama, "--seq", 8)["notes"] if "at random" in one)
    assert "encoder_layerdrop, decoder_layerdrop" in note


def test_a_model_that_takes_only_a_part_of_the_config_is_not_chosen():
    """transformers maps Llama 4's config to Llama4ForCausalLM, too, which takes its text_config."""
    target = read_target("Llama4Config")
    assert target.name == "Llama4ForConditionalGeneration (Llama4Config)"


def test_what_an_optimizer_reads_is_noted_with_its_line(llama):
    notes = estimate(llama, "--optimizer", "adafactor")["notes"]
    assert any("_adafactor.py:" in note and "is assumed to be 1.0" in note for note in notes)


def test_a_model_of_videos_gets_frames(llama):
    """One frame of three times 32 x 32 floats is 12 KiB; there are four."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    pictures = {"image_size": 32, "patch_size": 16, "num_frames": 4}
    (llama / "config.json").write_text(json.dumps({"model_type": "timesformer", **sizes, **pictures}))
    assert parts(estimate(llama, "--inference"))["input"] == 4 * 12 * 1024


def test_a_mixture_in_fp32_and_tokens_alone_of_a_model_for_images(llama):
    sizes = {name: LLAMA[name] for name in LLAMA if name not in ("model_type", "architectures")}
    mixture = {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
    (llama / "config.json").write_text(json.dumps(sizes | mixture))
    experts = 2 * 4 * 3 * 128 * 256  # grouped products in fp32, forward and backward
    assert parts(estimate(llama, "--seq", 64))["parameter"] > 4 * experts
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 1, "image_size": 56, "patch_size": 14}
    seeing = {"model_type": "llava", "text_config": LLAMA, "vision_config": vision, "image_token_index": 3}
    (llama / "config.json").write_text(json.dumps(seeing))
    notes = estimate(llama, "--seq", 64, "--inference")["notes"]
    assert any("also takes images. The estimate gives it only tokens" in note for note in notes)


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
    assert "MambaForCausalLM loops over tokens in Python (32 layers x 2,048 tokens)" in message
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
    assert any("cuDNN's workspaces are not counted" in note for note in answer["notes"])
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


def test_replicas_of_divided_tensors_hold_a_share_and_its_bucket(llama):
    answer = on_a_mesh(llama, "dp=2,tp=2", "--no-changes")
    divided = WEIGHTS // 2 + 5 * 128  # the five norms are whole
    assert 0 <= parts(answer)["parameter"] - divided <= ROUNDING
    assert 0 <= parts(answer)["communication"] - divided <= 512
    assert len(answer["ranks"]) == 4


@pytest.mark.parametrize(("mesh", "share"), [("pp=2,dp=2", 1), ("pp=2,fsdp=2", 2)])
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
        (None, "fsdp=2,dp=2", "cannot be divided over a mesh in this order: fsdp,dp"),
        (None, "tp=3", "4 heads (num_attention_heads) cannot be divided over 3 ranks"),
        (None, "pp=2,ep=2", "LlamaForCausalLM has no plan for expert parallelism"),
        (None, "pp=2,dp=2", "fails in torch itself"),  # with two micro-batches: reducer.cpp asserts
        ("GPT2Config", "tp=2", "GPT2LMHeadModel has no plan for tensor parallelism"),
    ],
)
def test_meshes_that_cannot_be_are_refused_by_name(llama, name, mesh, what):
    assert what in refused("estimate", name or llama, "--mesh", mesh, "--no-changes")


def test_where_no_change_alone_fits_all_of_them_and_more_gpus_are_tried(llama):
    """64 MiB of workspaces, and a gathered layer twice on a stream of its own, are on each GPU."""
    folder = with_more(llama, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, head_dim=64)
    result = run("estimate", folder, "--dtype", "bf16", "--capacity", "290MiB", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["verdict"]) == (1, "does not fit")
    *single, together, sharded = answer["changes"]
    assert not any(change["fits"] for change in (*single, together))
    assert together["options"].split("--")[1:] == [
        "free-output ",
        "checkpointing ",
        "optimizer adafactor ",
        "alloc-conf expandable_segments:True",
    ]
    assert together["saved_bytes"] >= max(change["saved_bytes"] for change in single)
    assert (sharded["options"], sharded["fits"]) == ("--mesh fsdp=8", True)


def test_a_model_of_images_and_words_has_its_head(llama):
    """What is trained on images and words has a head for words, which its body alone has not."""
    text = {name: value for name, value in LLAMA.items() if name != "architectures"}
    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 64, "image_size": 28}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
    (llama / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": text, "vision_config": vision})
    )
    assert estimate(llama, "--seq", 32)["target"] == "LlavaForConditionalGeneration (LlavaConfig)"


def test_parameters_that_do_not_follow_the_device_are_moved_to_it(llama):
    """XLNet makes its own with torch.FloatTensor, which is always on the CPU, and always float32."""
    small = {"model_type": "xlnet", "d_model": 64, "n_layer": 1, "n_head": 2, "d_inner": 64, "vocab_size": 64}
    (llama / "config.json").write_text(json.dumps(small))
    assert parts(estimate(llama, "--seq", 32))["parameter"] > 0
    message = refused("estimate", llama, "--seq", 32, "--dtype", "bf16")
    assert "does not run in this dtype" in message
    assert "modeling_xlnet.py" in message  # as the weights, loaded in bf16, do not
