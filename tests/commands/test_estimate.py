"""`tb-memplugin estimate`: tiny models whose bytes a person can add up, and what is refused."""

from __future__ import annotations

import json
import sys

import pytest

from tb_memplugin.commands.estimate import fits_text
from tb_memplugin.estimate.answer.changes import Change
from tests.commands.files import refused, run, told

pytest.importorskip("torch")

M = 1 << 20
WORKSPACES = 2 * 32 * M
"""cuBLAS on an H100: one for forward's thread, one for backward's."""

INPUT = 8192
"""4 samples of 512 floats."""

LOSS = 2 * 512
"""A number and its gradient."""

SPREAD = INPUT
"""The gradient of a sum is one number; cuBLAS wants it written out, as large as the output."""

COPY = INPUT
"""Of the gradient of a sum, one number with a shape, which cuBLAS cannot read as it lies."""

OUTPUT = INPUT
"""The output of the model: 4 samples of 512 floats. It and the loss live until the next forward ends."""

MODELS = '''
import torch
from torch import nn


class Block(nn.Module):
    """1 MiB in, 1 MiB out; 4,096 floats a sample between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 4096, bias=False)
        self.second = nn.Linear(4096, 64, bias=False)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def one(batch=4):
    return nn.Linear(512, 512, bias=False), torch.zeros(batch, 512)


def deep(batch=1024):
    return nn.Sequential(*(Block() for _ in range(4))), torch.zeros(batch, 64)


def sized(batch, seq, dtype, device):
    assert device == torch.device("cuda")
    return nn.Linear(512, 512, bias=False, dtype=dtype), {"input": torch.zeros(batch, seq, 512, dtype=dtype)}


def own_optimizer():
    model = nn.Linear(512, 512, bias=False)
    return model, [torch.zeros(4, 512)], torch.optim.SGD(model.parameters(), lr=0.1)


def a_loss():
    class WithLoss(nn.Linear):
        def forward(self, x):
            return {"logits": x, "loss": super().forward(x).mean()}

    return WithLoss(512, 512, bias=False), torch.zeros(4, 512)


def sharded(mesh, batch=4):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.zeros(batch, 512)


def no_gradient():
    class Constant(nn.Linear):
        def forward(self, x):
            return x.detach()

    return Constant(4, 4), torch.zeros(4, 4)


def nothing():
    pass


def asks(batch=2):
    class Asking(nn.Linear):
        def forward(self, x):
            rows = int(self.weight.sum().long())  # this line is asked about
            return super().forward(x[:rows])

    return Asking(512, 512, bias=False), torch.zeros(batch, 512)


def in_half():
    return nn.Linear(4, 4).half(), torch.zeros(4, 4).half()


def in_default_place():
    return nn.Linear(4, 4), torch.zeros(4, 4)


def on_the_cpu():
    return nn.Linear(4, 4, device="cpu"), torch.zeros(4, 4, device="cpu")


def on_meta():
    return nn.Linear(4, 4, device="meta"), torch.zeros(4, 4)


def three_of_a_kind():
    return 1, 2, 3


def an_optimizer_that_is_none():
    return nn.Linear(4, 4), torch.zeros(4, 4), "sgd"


def wants_more(path):
    pass


def fails():
    raise ValueError("a file is missing\\nand more")


def fails_after_an_empty_line():
    raise ImportError("\\nscipy is missing")


def fails_in_forward():
    return nn.Linear(4, 4), torch.zeros(4, 5)


def fails_in_loading():
    model = nn.Linear(4, 4)
    model.load_state_dict({})


NUMBER = 5
'''


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("models", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    yield
    for name in ("models", "broken"):
        sys.modules.pop(name, None)


def estimate(*arguments):
    """Return the answer, which the exit code repeats."""
    result = run("estimate", *arguments, "--no-changes", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == {"fits": 0, "may fit": 3, "does not fit": 1}[answer["verdict"]]
    return answer


def parts(answer):
    return {part["key"]: part["bytes"] for part in answer["breakdown"]}


# An allocator gives multiples of 512 bytes; every tensor here is one already. The weight has 1 MiB.


@pytest.mark.parametrize(
    ("optimizer", "peak"),
    [
        ("adamw", 5 * M + 512),  # weight, gradient, two averages, foreach's temporary, and the loss
        ("adam", 5 * M + 512),
        ("adamw-fused", 4 * M + 512 + LOSS + COPY),  # no temporary, but the count of steps
        ("momentum", 3 * M + LOSS + COPY),
        ("sgd", 2 * M + LOSS + COPY),
    ],
)
def test_a_step_by_hand(optimizer, peak):
    answer = estimate("models:one", "--optimizer", optimizer)
    assert answer["workspace_bytes"] == WORKSPACES
    assert answer["peak_allocated_bytes"] == WORKSPACES + INPUT + OUTPUT + peak
    assert parts(answer)["parameter"] == parts(answer)["gradient"] == M
    assert sum(parts(answer).values()) == answer["peak_allocated_bytes"]


def test_what_programs_get():
    answer = estimate("models:one")
    assert answer.keys() >= {
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "fits",
        "gpu",
        "breakdown",
        "phases",
        "seconds",
    }
    assert (answer["fits"], answer["gpu"], answer["workload"]["batch"]) == (True, "h100", 4)
    assert [phase["name"] for phase in answer["phases"]] == ["building", "forward", "backward", "optimizer"]
    assert max(phase["peak_bytes"] for phase in answer["phases"]) == answer["peak_allocated_bytes"]
    assert answer["peak_reserved_bytes"] >= answer["peak_allocated_bytes"]
    assert answer["margin_bytes"] == answer["memory_bytes"] - answer["peak_reserved_bytes"]


def test_a_second_estimate_in_a_process_says_the_same():
    first, second = estimate("models:deep"), estimate("models:deep")
    assert parts(first)["input"] == M // 4
    assert (parts(first), first["phases"]) == (parts(second), second["phases"])


def test_inference_has_one_workspace_and_no_gradients():
    answer = estimate("models:one", "--inference")
    assert parts(answer) == {"workspace": 32 * M, "parameter": M, "input": INPUT, "activation": INPUT}
    assert [phase["name"] for phase in answer["phases"]] == ["building", "forward"]


def test_the_workspace_is_the_gpus():
    assert estimate("models:one", "--gpu", "A100 40GB")["workspace_bytes"] == 2 * 8_519_680


def test_the_pytorch_that_will_run_it_is_told():
    answer = estimate("models:one", "--torch", "2.15", "--inference")
    assert (answer["torch"], answer["workspace_bytes"]) == ("2.15", 32 * M)
    assert "The rules of PyTorch '1.0' are not known" in refused("estimate", "models:one", "--torch", "1.0")


def test_the_runtime_engine_runs_no_other_pytorch():
    words = ("estimate", "--torch", "2.11", "--engine", "runtime", "--", "python", "train.py")
    assert "The runtime engine runs the installed PyTorch" in refused(*words)


def test_sizes_are_given_to_a_function_that_wants_them():
    answer = estimate("models:sized", "--batch", 2, "--seq", 8, "--dtype", "bf16", "--inference")
    assert parts(answer)["parameter"] == 512 * 512 * 2
    assert parts(answer)["input"] == 2 * 8 * 512 * 2


def test_a_dtype_holds_for_a_function_that_knows_none():
    answer = estimate("models:one", "--dtype", "bf16", "--inference")
    assert (parts(answer)["parameter"], parts(answer)["input"]) == (M // 2, INPUT // 2)


def test_autocast_keeps_parameters_and_adds_copies_of_two_bytes():
    answer = estimate("models:one", "--autocast", "bf16", "--inference")
    assert parts(answer)["parameter"] == M
    assert parts(answer)["activation"] == M // 2 + INPUT // 2 + INPUT // 2  # of weight, input and output


def test_fp16_autocast_with_its_scaler():
    answer = estimate("models:one", "--autocast", "fp16", "--optimizer", "sgd")
    assert parts(answer)["gradient"] == M + M // 2  # the copy's, and the weight's own that it is cast to
    assert answer["workload"]["autocast"] == "fp16"


def test_a_function_in_a_file_and_its_own_optimizer():
    answer = estimate("models.py:own_optimizer")
    assert answer["peak_allocated_bytes"] == WORKSPACES + INPUT + OUTPUT + 2 * M + LOSS + COPY
    assert answer["workload"]["optimizer"] is None


def test_an_output_that_is_freed_is_not_there_in_backward():
    kept, freed = (estimate("models:one", "--optimizer", "sgd", *more) for more in ((), ("--free-output",)))
    assert kept["peak_allocated_bytes"] - freed["peak_allocated_bytes"] == OUTPUT


def test_what_is_built_on_the_cpu_is_moved_to_the_gpu():
    assert parts(estimate("models:on_the_cpu", "--optimizer", "sgd")) == parts(
        estimate("models:in_default_place", "--optimizer", "sgd")
    )


def test_a_rank_of_a_mesh_has_its_shard_of_parameters_and_state(tmp_path):
    answer = estimate("models:sharded", "--mesh", "dp=8", "--logdir", tmp_path / "runs")
    assert parts(answer)["parameter"] == 4 * M // 8
    assert parts(answer)["optimizer_state"] == 2 * 4 * M // 8
    assert (answer["mesh"], answer["worst_rank"]) == ("dp=8", 0)
    assert [(rank["rank"], rank["coordinate"]) for rank in answer["ranks"]] == [(0, [0]), (7, [7])]
    assert max(rank["peak_reserved_bytes"] for rank in answer["ranks"]) == answer["peak_reserved_bytes"]
    assert (
        "mesh dp=8: rank 0 needs the most memory, of ranks [0, 7]"
        in run("estimate", "models:sharded", "--mesh", "dp=8", "--no-changes").stdout
    )


def test_what_only_a_real_run_knows_is_a_hint():
    line = 1 + next(n for n, text in enumerate(MODELS.splitlines()) if "is asked about" in text)
    assert f"--hint models.py:{line}=7" in refused("estimate", "models:asks")
    answer = estimate("models:asks", "--hint", f"models.py:{line}=1", "--inference")
    assert parts(answer)["activation"] == 512 * 4  # a row


def test_a_models_own_loss():
    assert parts(estimate("models:a_loss", "--optimizer", "sgd"))["gradient"] == M


# Four blocks of 2 MiB, 1,024 samples: 0.25 MiB between blocks, 16 MiB inside of each. The highest moment is
# in a block's backward, with two gradients of 16 MiB: without checkpointing the last block's, with all that
# forward kept and the first gradient; with it the first block's, with its own inside and all gradients but
# one.


def test_checkpointing_keeps_the_inside_of_one_block_alone():
    plain = estimate("models:deep", "--optimizer", "sgd")
    kept = WORKSPACES + 8 * M + M // 4 + LOSS  # M // 4: the output
    assert plain["peak_allocated_bytes"] == kept + 4 * (16 * M + M // 4) + 33 * M
    thin = estimate("models:deep", "--optimizer", "sgd", "--checkpointing")
    assert thin["peak_allocated_bytes"] == kept + 16 * M + M // 4 + (32 + 7) * M


def test_what_to_change_first_is_what_an_estimate_of_it_says():
    base = told("estimate", "models:deep", "--optimizer", "sgd")
    saved = [change["saved_bytes"] for change in base["changes"]]
    assert saved == sorted(saved, reverse=True)
    assert base["changes"][0]["options"] == "--checkpointing"
    for change in base["changes"]:
        changed = estimate("models:deep", "--optimizer", "sgd", *change["options"].split())
        assert changed["peak_reserved_bytes"] == change["peak_reserved_bytes"]
        assert change["saved_bytes"] == base["peak_reserved_bytes"] - changed["peak_reserved_bytes"] > 0


def test_a_change_keeps_the_other_settings_of_the_allocator():
    answer = told("estimate", "models:deep", "--alloc-conf", "max_split_size_mb:20")
    options = [change["options"] for change in answer["changes"]]
    assert all("max_split" in option for option in options if option.startswith("--alloc-conf"))


def test_the_largest_batch_that_fits():
    size = ("models:one", "--capacity", "100MiB", "--optimizer", "sgd")
    largest = estimate(*size, "--find-max-batch")["max_batch"]["batch"]
    assert estimate(*size, "--batch", largest)["fits"]
    assert not estimate(*size, "--batch", largest + 1)["fits"]
    # a sample takes 2 KiB in and 2 KiB out: what 100 MiB leave beside the rest holds no more than this
    assert largest * 2 * 2048 <= 100 * M - WORKSPACES - M


def test_not_even_one_sample():
    answer = estimate("models:one", "--capacity", "10MiB", "--find-max-batch")
    assert (answer["fits"], answer["max_batch"]) == (False, {"batch": 0, "estimates": 1})
    assert answer["margin_bytes"] < 0


def test_people_read_what_fits():
    result = run("estimate", "models:deep", "--find-max-batch", "--capacity", "1GiB")
    shown = result.stdout
    assert "models:deep: training, batch 1,024, adamw" in shown
    assert "fits h100 (1.00 GiB) with 92.84 to 731.5 MiB to spare" in shown
    assert "--checkpointing " in shown
    assert "The largest batch that fits is" in shown
    assert "note: Not counted: the CUDA context" in result.stderr


def test_a_target_without_sizes_is_told_in_a_whole_sentence():
    shown = run("estimate", "models:own_optimizer", "--inference", "--no-changes").stdout
    assert "models:own_optimizer: inference\n" in shown


def test_people_read_what_does_not_fit(tmp_path):
    options = ["--capacity", "10MiB", "--no-changes", "--find-max-batch", "--logdir", tmp_path]
    shown = run("estimate", "models:one", *options).stdout
    for said in ("does not fit h100 (10.00 MiB)", "too little", "Not even a batch of 1 fits"):
        assert said in shown
    assert shown.endswith(f"tensorboard --logdir {tmp_path}\n")


def test_a_run_for_the_tab(tmp_path):
    answer = estimate("models:one", "--logdir", tmp_path / "runs")
    (device,) = told("peak", tmp_path / "runs")["devices"]
    assert device["peak_bytes"] == answer["peak_allocated_bytes"] - 508  # of the loss's 512 it asked for 4
    assert device["peak_reserved_bytes"] == answer["peak_reserved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("models:one", "--inference", "--optimizer", "adamw"), "Inference does not use optimizer"),
        (("models:one", "--inference", "--checkpointing"), "Inference does not use checkpointing"),
        (("models:one", "--dtype", "fp16", "--autocast", "fp16"), "does not take gradients in fp16"),
        (("models:in_half", "--dtype", "bf16"), "No parameter of the model is bf16"),
        (("models:one", "--hint", "share"), "'share' is not a hint"),
        (("models:one", "--hint", "rows=3"), "The hint 'rows' does not match any kind of question"),
        (("no_such_module:f",), "There is no module 'no_such_module'"),
        (("no_such_file.py:f",), "There is no file 'no_such_file.py'"),
        (("../models:one",), "'../models' is not a module name"),
        (("\x1b[31mred:one",), "'\\x1b[31mred' is not a module name"),
        (("broken:f",), "Importing the module failed: ModuleNotFoundError: No module named 'no_such_thing'"),
        (("models:g",), "has no 'g'"),
        (("models:NUMBER",), "'NUMBER' is a int, not a function"),
        (("models:nothing",), "The function returned nothing"),
        (("models:on_meta",), "The model is on the device meta, so none of it uses memory of the GPU"),
        (("models:one", "--inference", "--free-output"), "Inference does not use free_output"),
        (("models:three_of_a_kind",), "returned a int as the model, which is not a torch.nn.Module"),
        (("models:an_optimizer_that_is_none",), "returned a str as the optimizer"),
        (("models:wants_more",), "The function has a parameter 'path'"),
        (("models:fails",), "could not be built on fake tensors: ValueError: a file is missing"),
        (("models:fails_after_an_empty_line",), "on fake tensors: ImportError: scipy is missing"),
        (("models:fails_in_forward",), "could not be run on fake tensors: RuntimeError"),
        (("models:fails_in_loading",), "state_dict for Linear: Missing key(s) in state_dict"),
        (("models:no_gradient",), "has a gradient, so there is no loss"),
        (("models:one", "--seq", "9"), "has no parameter named seq"),
        (("models:own_optimizer", "--batch", "9"), "has no parameter named batch"),
        (("models:own_optimizer", "--find-max-batch"), "so the largest batch cannot be found"),
        (("models:own_optimizer", "--optimizer", "sgd"), "returns its own optimizer, SGD"),
        (("models:one", "--checkpointing"), "no list of equal blocks"),
        (("models:one", "--gpu", "h1000"), "'h1000' is not the name of a GPU"),
        (("models:one", "--capacity", "much"), "'much' is not a size"),
        (("models:one", "--alloc-conf", "no_such_key:1"), "no_such_key"),
        (("models:one", "--mesh", "dp=8,tp=2"), "has no parameter named mesh"),
        (("models:sharded",), "The function needs a mesh"),
        (("models:sharded", "--mesh", "eight"), "cannot be read at 'eight'"),
        (("models:one", "--batch", "0"), "0 is not in the range"),
        (("models:one", "--batch", str(1 << 21)), "is not in the range"),
        (("models",), "'models' is not something that can be estimated"),
        (("NoSuchConfig",), "transformers has no class 'NoSuchConfig'"),
        (("LlamConfig",), "Did you mean LlamaConfig"),
        ((".",), "The folder has no config.json"),
    ],
)
def test_what_is_refused(arguments, what):
    assert what in refused("estimate", *arguments, "--no-changes")


def test_a_failure_is_told_with_its_line():
    message = refused("estimate", "models:fails")
    assert f"models.py:{1 + MODELS.splitlines().index('def fails():') + 1}" in message
    assert "and more" not in message


def test_what_cannot_be_changed_is_told_with_the_reason():
    answer = told("estimate", "models:one")
    assert [one["options"] for one in answer["impossible"]] == ["--checkpointing"]
    assert "no list of equal blocks" in answer["impossible"][0]["why"]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("fits", "reserved", "told"),
    [(True, 80 * GIB, "yes"), (True, 80 * GIB + 1, "just"), (False, 81 * GIB, "no"), (None, 1, "?")],
)
def test_a_step_that_fits_by_giving_its_cache_back_is_told_apart(fits, reserved, told):
    change = Change("half the batch", "--batch 1", GIB, reserved, fits)
    assert fits_text(change, usable_bytes=80 * GIB) == told
