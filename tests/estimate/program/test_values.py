"""Tests for operators that depend on values: with hints, with a noted upper bound, or with an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, WhisperConfig, WhisperForConditionalGeneration

from tb_memplugin import MemoryEstimator, MemPluginError
from tests.estimate.fake_runs import estimated, sizes

KIB = 1 << 10


def unknown(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", **options)


def test_a_float_is_taken_to_be_one_and_noted() -> None:
    read: list[float] = []
    done = estimated(lambda: read.append(unknown(3).sum().item()))
    assert read == [1.0]
    assert any("test_values.py:" in note and "1.0" in note for note in done.estimate().notes)


def test_a_constant_keeps_its_value() -> None:
    read: list[float] = []
    estimated(lambda: read.append(torch.tensor(7.5).item()))
    assert read == [7.5]


def test_a_truth_is_refused_with_its_line_and_what_to_do() -> None:
    with pytest.raises(MemPluginError, match=r"(?s)whether a condition holds.*hints="):
        estimated(lambda: bool((unknown(3) > 0).any()))


def raises_if_negative(tensor: torch.Tensor) -> None:
    if tensor.dim() and not (tensor > 0).all():
        raise ValueError("negative")


def refuses_one_of_two(tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        return
    if (tensor < 0).any() or (tensor > 9).any():
        raise ValueError("outside")


def asserts(tensor: torch.Tensor) -> None:
    assert torch.equal(tensor, tensor + 0)


def raise_no_matter_what() -> None:
    raise ValueError("not finite")


def skips_what_is_not_finite(tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise_no_matter_what()


def checks(tensor: torch.Tensor) -> None:
    torch._check_tensor_all(tensor > 0)


def draws(tensor: torch.Tensor) -> None:
    torch.distributions.Normal(tensor, tensor).log_prob(tensor)
    torch.nn.functional.gaussian_nll_loss(tensor, tensor, tensor)


def test_a_factorization_is_assumed_to_succeed() -> None:
    """transformers asks this of a covariance when it adds tokens to a model (resize_token_embeddings)."""
    positive_definite: Any = torch.distributions.constraints.positive_definite
    read = []
    estimated(lambda: read.append(bool(positive_definite.check(torch.rand(4, 4, device="cuda")).all())))
    assert read == [True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_values_follow_the_data_that_a_parameter_is_given(device: str) -> None:
    read: list[Any] = []

    def run() -> None:
        bias = torch.nn.Parameter(torch.zeros(3, device=device))
        bias.data = torch.nn.functional.pad(bias.data, (0, 1), value=2.0)
        read.append((bias.data * 1).tolist())
        bias.data = torch.rand(5, device=device)
        read.append((bias.data * 1).shape)

    estimated(run)
    assert read == [[0.0, 0.0, 0.0, 2.0], (5,)]


def test_values_on_the_host_decide_sizes() -> None:
    shapes: list[tuple[int, ...]] = []

    def run() -> None:
        drawn = torch.tensor([3, 3, 3, 0])
        for each in (torch.unique(drawn), torch.bincount(drawn), torch.repeat_interleave(drawn)):
            shapes.append(tuple(each.cuda().shape))
        assert torch.equal(drawn, drawn)

    estimated(run)
    assert shapes == [(2,), (4,), (9,)]


@pytest.mark.parametrize(
    "check",
    [raises_if_negative, refuses_one_of_two, asserts, skips_what_is_not_finite, checks, draws],
)
def test_a_check_is_taken_to_pass_and_noted(check: Any) -> None:
    done = estimated(lambda: check(unknown(3)))
    assert any("the check is assumed to pass" in note for note in done.estimate().notes)


def ignores_what_is_no_number(tensor: torch.Tensor) -> torch.Tensor:
    missing, infinite = torch.isnan(tensor), torch.isinf(tensor)
    none = torch.zeros_like(missing).bool()
    if missing.any() or none.any() or (infinite | ~torch.isfinite(tensor)).sum() > 0:
        tensor = tensor[~missing]
    return tensor


def test_numbers_that_are_not_known_are_taken_for_finite_wherever_the_answer_goes() -> None:
    kept: list[torch.Tensor] = []
    estimated(lambda: kept.append(ignores_what_is_no_number(unknown(3, 5))))
    assert [tuple(tensor.shape) for tensor in kept] == [(3, 5)]


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda x: x.new_full((2,), 3.0), [3.0, 3.0]),
        (lambda x: torch.full_like(x, 4, dtype=torch.int64), [4, 4]),
        (torch.ones_like, [1.0, 1.0]),
        (lambda x: x.new_zeros(2), [0.0, 0.0]),
    ],
)
def test_what_takes_only_a_tensors_shape_has_known_values(make: Any, numbers: list[Any]) -> None:
    read: list[Any] = []
    estimated(lambda: read.append(make(unknown(2)).tolist()))
    assert read == [numbers]


def test_a_hint_goes_before_a_check() -> None:
    with pytest.raises(ValueError, match="negative"):
        estimated(lambda: raises_if_negative(unknown(3)), hints={"truth": False})


def chooses(tensor: torch.Tensor) -> torch.Tensor:
    if (tensor > 0).all():
        return tensor * 2
    return tensor


def compares_with_false(tensor: torch.Tensor) -> None:
    if (tensor > 0).all().item() is False:
        raise ValueError


@pytest.mark.parametrize("choice", [chooses, compares_with_false])
def test_what_is_no_check_is_still_refused(choice: Any) -> None:
    with pytest.raises(MemPluginError, match="whether a condition holds"):
        estimated(lambda: choice(unknown(3)))


@pytest.mark.parametrize(
    "use",
    [
        int,
        range,
        lambda count: "many" if count > 2 else "few",
        lambda count: "both" if count == 2 else "other",
        lambda count: [1, 2][count],
        lambda count: {count: 1},
        bool,
    ],
)
def test_a_whole_number_that_decides_is_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(MemPluginError, match="a whole number") as refused:
        estimated(lambda: use(unknown(3).long().sum().item()))
    assert "test_values.py" in str(refused.value)


def test_a_size_that_is_read_is_refused() -> None:
    def run() -> None:
        count: Any = unknown(3).long().sum().item()
        torch.zeros(count)

    with pytest.raises(MemPluginError, match="a whole number"):
        estimated(run)


@pytest.mark.parametrize(
    "use",
    [
        lambda data, count: data / count,
        lambda data, count: count - data,
        lambda data, count: data.mul_(count),
        lambda data, count: data.__iadd__(count),
        lambda data, count: data.fill_(count),
        lambda data, count: data.clamp(max=count),
        lambda data, count: torch.full_like(data, count),
        lambda data, count: torch.full((3,), count, device="cuda"),
        lambda data, count: torch.tensor([0, 1, count], device="cuda"),
    ],
)
def test_a_whole_number_that_becomes_a_value_of_a_tensor_decides_nothing(use: Callable[..., Any]) -> None:
    """As `GradScaler.load_state_dict` does, with the steps that it counted."""

    def run() -> None:
        assert use(unknown(3), unknown(3).long().sum().item()).shape == (3,)

    assert [note for note in estimated(run).estimate().notes if "test_values.py" in note and "hint" in note]


@pytest.mark.parametrize(
    "use",
    [
        lambda data, count: data.view(count),
        lambda data, count: data.narrow(0, 0, count),
        lambda data, count: torch.arange(count),
        lambda data, count: torch.zeros((count, 3)),
        lambda data, count: torch.zeros(count, 3),
        lambda data, count: torch.rand(count, 3),
        lambda data, count: data[:1].expand(count, 3),
        lambda data, count: data.new_zeros(count, 3),
        lambda data, count: torch.full((count,), 1.0),
        lambda data, count: torch.nn.functional.pad(data, (0, count)),
        lambda data, count: data.reshape(-1, count),
    ],
)
def test_a_whole_number_that_becomes_a_size_is_refused(use: Callable[..., Any]) -> None:
    with pytest.raises(MemPluginError, match=r"test_values\.py"):
        estimated(lambda: use(unknown(3), unknown(3).long().sum().item()))


def test_a_whole_number_that_is_counted_and_printed_is_assumed() -> None:
    printed: list[Any] = []

    def run() -> None:
        correct: Any = 0
        for _ in range(2):
            correct += (unknown(3) == unknown(3)).sum().item()
        printed.extend([f"{correct}/6", correct / 6, 100.0 * correct, max(0.5, correct / 6)])

    done = estimated(run)
    assert printed == ["?/6", 1.0, 1.0, 1.0]
    assert [note for note in done.estimate().notes if "test_values.py" in note and "hint" in note]


def test_an_index_that_is_chosen_is_the_first() -> None:
    chosen: list[Any] = []
    estimated(lambda: chosen.append(["left", "right"][int(unknown(2).argmax().item())]))
    assert chosen == ["left"]


def replaced_where_it_ended(chosen: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    tokens = torch.full((3,), 7, device="cuda")
    tokens[~ended] = chosen[~ended]
    return tokens


def multiplied_where_it_ended(chosen: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    return chosen * ~ended + 7 * ended


def in_bounds(chosen: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (chosen - 1).clamp(min=0)


@pytest.mark.parametrize("step", [replaced_where_it_ended, multiplied_where_it_ended, in_bounds])
def test_what_follows_from_chosen_indices_is_the_first(
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    read: list[list[int]] = []
    estimated(lambda: read.append(step(unknown(3, 9).argmax(-1), unknown(3) > 0).tolist()))
    assert read == [[0, 0, 0]]


def cuts_at_an_item() -> torch.Tensor:
    tokens = unknown(8)
    end = tokens.argmax().item()
    return tokens[:end]


def cuts_at_an_int() -> torch.Tensor:
    tokens = unknown(8)
    end = int(tokens.argmax())
    return tokens[:end]


@pytest.mark.parametrize("run", [cuts_at_an_item, cuts_at_an_int])
def test_a_chosen_index_that_becomes_a_length_is_refused(run: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(MemPluginError, match=r"--hint test_values.py:\d+=7"):
        estimated(run)


def test_arrays_have_known_numbers_and_zeros_for_chosen_indices() -> None:
    arrays: list[list[Any]] = []

    def run() -> None:
        labels = torch.tensor([3, 1, 2]).cuda()
        actions = torch.distributions.Categorical(logits=unknown(2, 4)).sample()
        arrays.append((labels + 1).cpu().numpy().tolist())
        arrays.append(actions.cpu().numpy().tolist())

    done = estimated(run)
    assert arrays == [[4, 2, 3], [0, 0]]
    assert [note for note in done.estimate().notes if "assumed to be 0" in note]


def test_a_comparison_of_a_float_that_is_not_known_is_made_with_one() -> None:
    truths: list[bool] = []

    def run() -> None:
        loss = unknown(3).mean()
        truths.extend([bool(loss < 2.0), bool(loss > torch.tensor(2.0)), bool(loss >= loss)])

    done = estimated(run)
    assert truths == [True, False, True]
    assert [note for note in done.estimate().notes if "compares is assumed to be 1.0" in note]
    with pytest.raises(MemPluginError, match="whether a condition holds"):
        estimated(lambda: bool(unknown(1).long().sum() > 0))


def writes() -> tuple[Any, torch.Tensor]:
    config = GPT2Config(vocab_size=50, n_positions=32, n_layer=1, n_head=2, n_embd=16)
    return GPT2LMHeadModel(config).to("cuda"), torch.ones(2, 4, dtype=torch.long, device="cuda")


def transcribes() -> tuple[Any, torch.Tensor]:
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    tokens = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=50, **sizes, **widths, **tokens)
    return WhisperForConditionalGeneration(config).to("cuda"), unknown(2, 80, 3000)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("make", [writes, transcribes])
def test_transformers_generates_to_the_greatest_length(make: Callable[[], Any], beams: int) -> None:
    calls: list[int] = []

    def run() -> None:
        model, given = make()
        model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
        model.generate(given, max_new_tokens=9, num_beams=beams, pad_token_id=2)

    noted = estimated(run).estimate().notes
    assert len(calls) == 9
    assert any("generated to their greatest length" in note for note in noted)


def test_a_single_number_on_the_cpu_is_drawn() -> None:
    drawn: list[float] = []

    def draw() -> None:
        torch.manual_seed(3)
        drawn.extend([torch.rand(1).item(), torch.empty(1).uniform_(5.0, 6.0).item()])

    draw()
    estimated(draw)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] < 1 < 5 <= drawn[1]


@pytest.mark.parametrize(("rows", "is_known"), [(128, True), (16384, False)])
def test_the_mask_of_a_batch_is_known(rows: int, is_known: bool) -> None:
    """A batch of 128 sequences of 77 tokens tells which attention kernel runs; 16,384 are too many."""
    lengths = torch.tensor([76] + [77] * (rows - 1))

    def run() -> bool:
        return bool(((torch.arange(77)[None] < lengths[:, None]).cuda()).all())

    if is_known:
        done: list[bool] = []
        estimated(lambda: done.append(run()))
        assert done == [False]
    else:
        with pytest.raises(MemPluginError, match="whether a condition holds"):
            estimated(run)


def test_an_encoder_in_eval_keeps_its_padding() -> None:
    """Real runs would use nested tensors, which leave it out."""
    shapes = []

    def run() -> None:
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 2).cuda().eval()
        with torch.no_grad():
            shapes.append(encoder(unknown(4, 10, 16), src_key_padding_mask=unknown(4, 10) > 0).shape)

    done = estimated(run)
    assert shapes == [(4, 10, 16)]
    assert [note for note in done.estimate().notes if "nn.TransformerEncoder" in note]


def test_a_hint_answers_by_line_or_by_kind() -> None:
    line = inspect.currentframe().f_lineno + 4  # type: ignore[union-attr]

    def run() -> list[int]:
        return [
            int(unknown(3).long().sum().item()),
            int(unknown(3).long().max().item()),
        ]

    read: list[list[int]] = []
    estimated(lambda: read.append(run()), hints={f"test_values.py:{line}": 5, "count": 9})
    assert read == [[5, 9]]


def test_a_hint_for_a_line_that_asks_nothing_is_named() -> None:
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    hints = {f"test_values.py:{line}": 5, "test_values.py:1": 5}
    done = estimated(lambda: unknown(3).sum().item(), hints=hints)
    notes = [note for note in done.estimate().notes if "was not used" in note]
    assert notes == ["The hint for test_values.py:1 was not used: the program asked nothing at that line."]


def test_a_hint_may_be_a_function_of_the_question() -> None:
    read: list[bool] = []
    estimated(
        lambda: read.append(bool((unknown(3) > 0).all())),
        hints=lambda asked: asked.kind == "truth" and asked.dtype is torch.bool,
    )
    assert read == [True]


@pytest.mark.parametrize("hints", [["number"], {"nothing": 1}, 3])
def test_hints_that_belong_to_nothing_are_refused(hints: Any) -> None:
    with pytest.raises(MemPluginError, match="hint"):
        MemoryEstimator(hints=hints)


def select() -> torch.Tensor:
    tensor = unknown(KIB)
    return tensor[tensor > 0]


def test_a_mask_selects_everything_at_most() -> None:
    """The result has 1024 floats, and meanwhile there are as many indices of 8 bytes."""
    done = estimated(select)
    assert sizes(done, "index") == [8 * KIB, 4 * KIB]
    assert any("selects" in note for note in done.estimate().notes)


def test_a_hint_says_what_a_mask_selects() -> None:
    assert sizes(estimated(select, hints={"share": 0.25}), "index") == [2 * KIB, KIB]
    assert sizes(estimated(select, hints={"share": 128}), "index") == [KIB, 512]


def test_a_mask_has_a_backward() -> None:
    def run() -> None:
        tensor = unknown(KIB, requires_grad=True)
        tensor[tensor > 0].sum().backward()

    assert sizes(estimated(run), "new_zeros") == [4 * KIB]


def test_masks_of_several_dimensions() -> None:
    def run() -> torch.Tensor:
        tensor = unknown(4, 8, 16)
        return tensor[tensor[..., 0] > 0]

    assert sizes(estimated(run), "index")[-1] == 4 * 8 * 16 * 4


def test_writing_through_a_mask_needs_no_hint() -> None:
    def run() -> torch.Tensor:
        tensor = unknown(KIB)
        tensor[tensor > 0] = 0.0
        return tensor

    assert sizes(estimated(run), "index_put_") == []


def test_nonzero_masked_select_and_unique() -> None:
    def run() -> list[torch.Tensor]:
        tensor = unknown(KIB)
        return [tensor.nonzero(), tensor.masked_select(tensor > 0), tensor.unique()]

    done = estimated(run)
    assert sizes(done, "nonzero") == [8 * KIB]
    assert sizes(done, "masked_select") == [8 * KIB, 4 * KIB]  # indices, and elements
    assert sizes(done, "_unique2")[0] == 4 * KIB


@pytest.mark.parametrize(
    ("program", "name", "hint"),
    [
        (lambda: torch.bincount(unknown(3).long()), "bincount", "7"),
        (lambda: unknown(3, 4).repeat_interleave(unknown(3).long(), dim=0), "repeat_interleave", "7"),
        (lambda: torch.equal(unknown(3), unknown(3)), "equal", "True"),
        (lambda: torch.allclose(unknown(3), unknown(3)), "allclose", "True"),
        (lambda: unknown(3).long().cpu().numpy(), "numpy", "7"),
    ],
)
def test_what_only_a_hint_can_answer_is_refused_with_the_hint(program: Any, name: str, hint: str) -> None:
    with pytest.raises(MemPluginError, match=rf"(?s){name}.*hints=.*test_values.py:\d+\": {hint}"):
        estimated(program)


def test_hints_say_how_many_rows_there_are() -> None:
    """The results are 9 integers of 8 bytes, and 9 rows of 4 floats with 9 temporary indices."""

    def run() -> list[torch.Tensor]:
        counts = unknown(3).long()
        return [torch.bincount(counts), unknown(3, 4).repeat_interleave(counts, dim=0)]

    done = estimated(run, hints={"count": 9})
    assert sizes(done, "bincount") == [9 * 8]
    assert sizes(done, "repeat_interleave") == [9 * 8]
    assert sizes(done, "index_select") == [9 * 4 * 4]


def test_a_bincount_has_the_type_of_its_weights() -> None:
    def run() -> list[torch.Tensor]:
        counts = unknown(3).long()
        return [torch.bincount(counts, unknown(3)), torch.bincount(counts, minlength=100)]

    assert sizes(estimated(run, hints={"count": 9}), "bincount") == [9 * 4, 100 * 8]


def test_a_bincount_without_a_hint_has_its_minlength() -> None:
    done = estimated(lambda: torch.bincount(unknown(3).long(), minlength=100))
    assert sizes(done, "bincount") == [100 * 8]
    assert [note for note in done.estimate().notes if "minlength, 100" in note]


def test_unique_rows_and_runs() -> None:
    """The results are half of 8 rows of 4 floats, half of 8 floats in a row, and the indices of both."""

    def run() -> list[Any]:
        return [
            torch.unique(unknown(8, 4), dim=0),
            unknown(8).unique_consecutive(),
            unknown(8, 4).unique_consecutive(dim=0),
        ]

    done = estimated(run, hints={"share": 0.5})
    assert sizes(done, "unique_dim") == [4 * 16, 8 * 8, 4 * 8]
    assert sizes(done, "unique_consecutive") == [4 * 4, 4 * 16, 8 * 8, 4 * 8]


def test_a_hint_says_whether_tensors_are_equal() -> None:
    read: list[bool] = []
    estimated(lambda: read.append(torch.equal(unknown(3), unknown(3))), hints={"truth": False})
    assert read == [False]


def test_a_loss_is_printed() -> None:
    said: list[str] = []
    done = estimated(lambda: said.append(f"loss {unknown(3).sum():.2f}, {unknown(3).sum()}"))
    assert said[0].startswith("loss 1.00, FakeTensor")
    assert any("1.0" in note for note in done.estimate().notes)


def test_an_array_of_numbers_is_ones_or_the_hint() -> None:
    read: list[Any] = []

    def run() -> None:
        read.append(unknown(3).cpu().numpy().tolist())

    assert any("array" in note for note in estimated(run).estimate().notes)
    estimated(run, hints={"number": 2.5})
    assert read == [[1.0] * 3, [2.5] * 3]


def test_a_picture_is_an_array_of_zeros() -> None:
    pictures: list[Any] = []
    done = estimated(lambda: pictures.append(unknown(2, 3).mul(255).byte().cpu().numpy().tolist()))
    assert pictures == [[[0, 0, 0], [0, 0, 0]]]
    assert any("assumed to be 0" in note for note in done.estimate().notes)


def test_the_indices_of_a_mask_are_those_that_it_is_assumed_to_select() -> None:
    read: list[Any] = []

    def run() -> None:
        mask = unknown(2, 3) > 0
        read.append(mask.nonzero().tolist())

    estimated(run)
    estimated(run, hints={"share": 2})
    assert read == [[[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]], [[0, 0], [0, 1]]]


def test_some_of_known_numbers_are_no_larger_than_the_largest() -> None:
    sizes: list[int] = []

    def run() -> None:
        graphs = torch.tensor([0, 0, 1, 4, 4], device="cuda")
        kept = graphs[unknown(5).topk(3).indices]
        sizes.append(int(kept.max()) + 1)

    done = estimated(run)
    assert sizes == [5]
    assert any("4 is assumed" in note for note in done.estimate().notes)


def test_arrays_that_a_real_run_would_refuse_are_refused() -> None:
    with pytest.raises(TypeError, match="cpu"):
        estimated(lambda: unknown(3).numpy())
    with pytest.raises(RuntimeError, match="detach"):
        estimated(lambda: torch.ones(3, requires_grad=True).numpy())


def test_a_kernel_that_has_no_fake_rule_is_refused_by_name() -> None:
    with pytest.raises(MemPluginError, match=r"_to_sparse\S* has no fake implementation"):
        estimated(lambda: unknown(3, 3).to_sparse())


def test_an_operator_without_a_fake_rule_is_refused_by_name() -> None:
    with torch.library._scoped_library("tb_memplugin_test", "FRAGMENT") as library:
        library.define("strange(Tensor x) -> Tensor")
        with pytest.raises(MemPluginError, match="strange"):
            estimated(lambda: torch.ops.tb_memplugin_test.strange(unknown(3)))


def test_masks_are_looked_up_in_numbers_of_eight_bytes() -> None:
    """1,024 elements have two indices each: when they are read, in the derivative, and when they are set.

    The derivative also copies the expanded gradient, and sorts: 4 x 8 bytes for each, and a byte for CUB.
    """

    def run() -> None:
        table = 2 * unknown(32, 32, requires_grad=True)
        table[table > 0].sum().backward()
        other = unknown(32, 32)
        other[other > 0] = 0.0  # filled in without indices
        other[other > 0] = unknown(KIB)

    done = estimated(run)
    assert sizes(done, "index") == [16 * KIB, 4 * KIB]
    assert sum(sizes(done, "index_put")) == (16 + 4 + 4 * 8) * KIB + 1
    assert sum(sizes(done, "index_put_")) == 16 * KIB


def test_masks_of_transformers_that_mask_nothing_leave_flash_attention_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    sides = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}

    def run() -> Any:
        model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, **sides)).cuda().bfloat16()
        ids = unknown(2, 32, dtype=torch.long)
        return model(input_ids=ids, attention_mask=torch.empty_like(ids)).last_hidden_state

    done = estimated(run, gpu="a100")
    assert 2 * 2 * 32 * 64 in sizes(done, "_scaled_dot_product_flash_attention")
    assert any("nothing is padded or packed" in note for note in done.estimate().notes)


def test_generation_pads_nothing_and_goes_on(tmp_path: Path) -> None:
    """As transformers asks: whether a mask is 1 everywhere, and whether all sequences are finished."""
    folder = tmp_path / "transformers" / "generation"
    folder.mkdir(parents=True)
    file = folder / "utils.py"
    text = "answers.append(((mask == 1).all().item(), bool(left.max() == 0), torch.any(mask == 0).item()))"
    file.write_text(text, "utf-8")
    answers: list[Any] = []

    def run() -> None:
        names = {"torch": torch, "answers": answers, "mask": unknown(4, 8).long(), "left": unknown(4).long()}
        exec(compile(text, str(file), "exec"), names)

    done = estimated(run)
    assert answers == [(True, False, False)]
    assert any("While transformers generates" in note for note in done.estimate().notes)


def breaks_where_all_are_done(done: torch.Tensor) -> int:
    for step in range(4):
        if done.all() and step >= 0:
            break
    return step


def continues_for_what_is_empty(done: torch.Tensor) -> int:
    count = 0
    for step in range(4):
        if not done.any():
            continue
        count += step - step + 1
    return count - 1


def fills_what_is_dead(done: torch.Tensor) -> int:
    filled = 0
    if done.any():
        filled = 3
    return filled


def returns_at_once_where_nothing_is_left(done: torch.Tensor) -> int | None:
    if not done.any():
        return None
    return int(str(3))


def compares_a_count(done: torch.Tensor) -> int:
    best = 0
    if done.sum().item() > best:
        best = 3
    return best


def computes_or_takes_nothing(done: torch.Tensor) -> int:
    return int(str(3)) if done.any() else 0


def counts_what_is_selected(done: torch.Tensor) -> int:
    return len(done) if done.any() else int(str(0))


GOES_ON = [
    counts_what_is_selected,
    computes_or_takes_nothing,
    breaks_where_all_are_done,
    continues_for_what_is_empty,
    fills_what_is_dead,
    returns_at_once_where_nothing_is_left,
    compares_a_count,
]


@pytest.mark.parametrize("program", GOES_ON)
def test_a_condition_is_assumed_so_that_the_program_goes_on(program: Callable[[torch.Tensor], int]) -> None:
    results: list[int] = []
    done = estimated(lambda: results.append(program(unknown(3) > 0)))
    assert results == [3]
    assert any("with which the program goes on" in note for note in done.estimate().notes)


def test_a_script_that_is_no_function_takes_the_larger_of_two_numbers() -> None:
    names: dict[str, Any] = {}

    def run() -> None:
        names["mask"] = unknown(3) > 0
        exec("share = 6 / max(1, mask.sum().item())", names)

    estimated(run)
    assert names["share"] == 1.0  # what is calculated from a number that is not known


def test_anomaly_mode_finds_no_gradient_that_is_not_a_number() -> None:
    def run() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            torch.randn(8, device="cuda", requires_grad=True).exp().sum().backward()

    assert any("the check is assumed to pass" in note for note in estimated(run).estimate().notes)


def repeats_while_some_are_not(done: torch.Tensor) -> None:
    while not done.all():
        str(done)


def doubles_or_halves(done: torch.Tensor) -> torch.Tensor:
    return done * 2 if done[0] else done / 2


@pytest.mark.parametrize("program", [repeats_while_some_are_not, doubles_or_halves])
def test_a_condition_that_ends_a_loop_or_chooses_between_two_ways_is_refused(program: Any) -> None:
    with pytest.raises(MemPluginError, match="whether a condition holds"):
        estimated(lambda: program(unknown(3) > 0))


def test_a_mask_counts_all_where_its_count_decides() -> None:
    def run() -> list[torch.Tensor]:
        mask = unknown(3, 4) > 0
        layer = torch.nn.Linear(int(mask.sum()), 2, device="cuda")  # 12 x 2 floats
        rows = [0] * int(mask.long().sum(1).max() + 1)
        return [layer.weight, unknown(len(rows))]

    done = estimated(run)
    assert any("counts depends on values: 12 is assumed" in note for note in done.estimate().notes)
    assert any("5 is assumed" in note for note in done.estimate().notes)


def test_indices_of_the_largest_are_chosen_and_so_is_what_is_calculated_from_them() -> None:
    read: list[Any] = []

    def run() -> None:
        scores = unknown(2, 50)
        top = scores.topk(3).indices
        read.append((top // 10).tolist())
        read.append(int(torch.cat([top, scores.sort().indices[:, :1]], 1)[0, 3]))
        read.append(scores.cpu().max(1)[1].tolist())
        sequences = torch.full((2, 4), 7, device="cuda")
        sequences[:, 1:] = top
        assert torch.unique_consecutive(sequences[0]).tolist() == [0] * 4
        read.append(torch.nn.functional.pad(sequences, (0, 1)).cpu().numpy().shape)
        read.append(torch.multinomial(torch.tensor([0.0, 1.0, 0.0]), 1).tolist())

    estimated(run)
    assert read[:3] == [[[0] * 3] * 2, 0, [0, 0]]
    assert read[3] == (2, 5)
    assert read[4] == [1]  # drawn for real: the weights are known


def test_lbfgs_makes_all_its_iterations() -> None:
    """With a history of two: 4 vectors as large as the parameters, the gradient and the direction."""
    side, history = 1024, 2
    evaluations = 0

    def train() -> Any:
        nonlocal evaluations
        weight = torch.nn.Parameter(torch.empty(side, side, device="cuda"))
        optimizer = torch.optim.LBFGS([weight], max_iter=5, history_size=history)

        def closure() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            assert loss.item() == 1.0  # the program's own reads are like others
            return loss

        optimizer.step(closure)
        return weight, optimizer

    done = estimated(train)
    assert evaluations == 5
    assert len(sizes(done, "mul")) >= 4
    assert any("LBFGS is assumed to make all max_iter iterations" in note for note in done.estimate().notes)


def test_a_tensor_is_made_of_tensors() -> None:
    read: list[Any] = []

    def run() -> None:
        numbers = torch.tensor([5, 6])
        read.append(torch.tensor([numbers[0], 3]).tolist())
        floats = torch.tensor([[unknown(2)[0], 1.5], [2.5, 3.5]])
        read.append((tuple(floats.shape), floats.dtype, floats[0, 0].item()))

    estimated(run)
    assert read == [[5, 3], ((2, 2), torch.float32, 1.0)]


def test_nms_keeps_every_box() -> None:
    """The mask of overlaps has a word of 64 bits for each box and 64 others: 100 x 2 x 8 bytes."""
    torchvision = pytest.importorskip("torchvision")
    kept: list[int] = []

    def run() -> None:
        boxes, scores = torch.rand(100, 4, device="cuda"), torch.rand(100, device="cuda")
        kept.append(len(torchvision.ops.nms(boxes, scores, 0.5)))

    assert sizes(estimated(run), "new_empty") == [100 * 2 * 8, 100]
    assert kept == [100]


def test_a_mask_selects_at_most_what_was_set_where_nothing_was() -> None:
    """As samplers of detectors do; anything else that writes to it makes all possible again."""
    selected: list[int] = []

    def run() -> None:
        unknown = torch.randn(2, 4000, device="cuda")
        (candidates,) = torch.where(unknown[0] > 0)
        first = torch.zeros_like(unknown[0], dtype=torch.uint8)
        first[candidates[torch.randperm(len(candidates), device="cuda")[:100]]] = 1
        second = torch.zeros(4000, dtype=torch.bool, device="cuda")
        second[candidates[:30]] = True
        either = first | second
        top = torch.zeros(2, 4000, dtype=torch.bool, device="cuda")
        top.scatter_(1, unknown.topk(5).indices, True)
        masks = [either, torch.cat([either, either]), top, top[0], top[..., None].expand(2, 4000, 3)]
        selected.extend(len(mask.nonzero()) for mask in masks)
        second |= unknown[0] > 0
        top |= unknown > 0
        selected.extend([len(second.nonzero()), len(top.nonzero())])

    estimated(run)
    assert selected == [130, 260, 10, 5, 30, 4000, 8000]


EXPERTS, TOKENS = 8, 1024


def routed(by: Callable[[torch.Tensor], list[torch.Tensor]]) -> Callable[[], list[int]]:
    """Return a program that selects the tokens of each expert, of which each token chooses two."""

    def run() -> list[int]:
        chosen = unknown(TOKENS, EXPERTS).topk(2).indices
        return [len(torch.where(mask)[0]) for mask in by(chosen)]

    return run


@pytest.mark.parametrize(
    "by",
    [
        lambda chosen: [chosen == expert for expert in range(EXPERTS)],
        lambda chosen: [(chosen == expert).any(-1) for expert in range(EXPERTS)],
        lambda chosen: list(torch.nn.functional.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0))[:EXPERTS],
        lambda chosen: list((chosen.unsqueeze(-1) == torch.arange(EXPERTS, device="cuda")).unbind(-1)),
    ],
)
def test_experts_are_chosen_equally_often(by: Any) -> None:
    counts: list[list[int]] = []
    done = estimated(lambda: counts.append(routed(by)()))
    assert counts == [[2 * TOKENS // EXPERTS] * EXPERTS]
    assert any("as frequent as any other, so 256 of" in note for note in done.estimate().notes)


def test_parts_of_a_range_and_other_choices_share_the_elements() -> None:
    counts: list[int] = []

    def run() -> None:
        values, labels = unknown(TOKENS), unknown(TOKENS, dtype=torch.long)
        binned = torch.bucketize(values, torch.linspace(0, 1, 3, device="cuda"))
        guess = unknown(TOKENS, 4).argmax(-1)
        counts.extend(len(values[mask]) for mask in (binned == 1, guess == 3, (guess == 3) & (values > 0)))
        counts.extend([len(torch.unique(guess)), len(values[guess == labels]), len(values[guess != 3])])
        counts.append(int((guess == 3).sum()))

    estimated(run)
    assert counts == [TOKENS // 4] * 3 + [4, TOKENS, TOKENS, TOKENS // 4]


def test_a_line_that_selects_of_several_sizes_has_one_note() -> None:
    def run() -> None:
        for rows in (3, 5):
            torch.unique(unknown(rows))

    notes = [note for note in estimated(run).estimate().notes if "selects" in note]
    assert len(notes) == 1


def counted_by_one_hot(chosen: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(chosen, 4).sum(0)


def counted_without_an_end(chosen: torch.Tensor) -> torch.Tensor:
    return torch.bincount(chosen)


def counted_in_bins(chosen: torch.Tensor) -> torch.Tensor:
    return torch.histc(chosen.int(), bins=4, min=0, max=3)


@pytest.mark.parametrize("count", [counted_by_one_hot, counted_without_an_end, counted_in_bins])
def test_how_often_each_is_chosen_divides_the_rows(count: Callable[[torch.Tensor], torch.Tensor]) -> None:
    parts: list[int] = []

    def run() -> None:
        rows = unknown(10, 8)
        tokens_of_each = count(unknown(10, 4).argmax(-1)).tolist()
        parts.extend(len(part) for part in rows.split(tokens_of_each))

    done = estimated(run)
    assert parts == [3, 3, 2, 2]
    assert any("assumed as frequent as any other" in note for note in done.estimate().notes)


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_experts_that_are_marked_are_chosen_equally_often(chosen: int) -> None:
    """As DeepSeek's code counts them: a one in each row at those that were chosen."""
    counts: list[int] = []

    def run() -> None:
        indices = unknown(TOKENS, EXPERTS).topk(chosen).indices
        marks = indices.new_zeros(TOKENS, EXPERTS).scatter_(1, indices, 1)
        counts.extend(marks.sum(0).cpu().numpy())
        counts.append(len(marks[:, 0].nonzero()))

    estimated(run)
    assert counts == [chosen * TOKENS // EXPERTS] * (EXPERTS + 1)


def first(values: torch.Tensor, end: int) -> torch.Tensor:
    return values[: end + 1]


def window(values: torch.Tensor, start: int) -> torch.Tensor:
    return values[start : start + 8]


def repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    return values.repeat(times)


@pytest.mark.parametrize("function", [first, repeated, lambda values, rows: torch.zeros((rows, 2))])
def test_a_chosen_index_is_no_length_in_another_function_either(function: Any) -> None:
    with pytest.raises(MemPluginError, match=r"a whole number(?s:.*)test_values\.py:"):
        estimated(lambda: function(unknown(9), unknown(9).argmax().item()))


def test_a_chosen_index_is_one_in_a_row_of_a_tensor() -> None:
    picked: list[torch.Tensor] = []
    done = estimated(lambda: picked.append(unknown(3, 9, 2)[1, unknown(9).argmax()]))
    assert picked[0].shape == (2,)
    assert any("assumed to be 0" in note for note in done.estimate().notes)


def test_known_complex_numbers_are_copied() -> None:
    """As positions that are turned by `torch.polar`: they count nothing."""

    def turn() -> None:
        ones = torch.ones(4, device="cuda")
        torch.polar(ones, ones).clone()

    assert sizes(estimated(turn), "clone") == [32]


def test_a_window_that_begins_at_a_chosen_index_has_its_length() -> None:
    read: list[Any] = []
    estimated(lambda: read.append(window(unknown(9), unknown(9).argmax().item() // 2).shape))  # type: ignore[arg-type]
    assert read == [(8,)]


def test_a_function_that_takes_no_unknown_number_is_named_with_the_hint() -> None:
    def run() -> None:
        side: Any = unknown(4, dtype=torch.long).max().item()
        torch.nn.functional.interpolate(unknown(1, 1, 4, 4), size=(side, side))

    with pytest.raises(MemPluginError, match=r"interpolate\(\) needs(?s:.*)--hint test_values\.py:"):
        estimated(run)


def test_rows_that_a_sort_chooses_are_as_many_as_of_each_group() -> None:
    """As torch_geometric's pooling keeps the best nodes of each graph: two of four and one of two."""
    read: list[int] = []

    def pool() -> None:
        graph = torch.tensor([0, 0, 0, 0, 1, 1], device="cuda")
        first, most = torch.tensor([0, 4], device="cuda"), torch.tensor([2, 1], device="cuda")
        order = unknown(6).sort(descending=True).indices
        sorted_graph, back = graph[order].sort(stable=True)
        kept = order[back[torch.arange(6, device="cuda") - first[sorted_graph] < most[sorted_graph]]]
        places = torch.arange(len(kept), device="cuda")
        read.extend([len(kept), int(places.clone().scatter_(0, places, graph[kept]).max())])

    done = estimated(pool)
    assert read == [3, 1]  # the last graph is assumed to be among those that are left
    assert any("1 is assumed" in note for note in done.estimate().notes)


def test_inference_mode_sorts_what_is_not_known() -> None:
    def sort() -> None:
        with torch.inference_mode():
            assert unknown(8).sort().indices.sort().values.shape == (8,)

    estimated(sort)


def test_rows_in_an_unknown_order_are_not_known_once_they_are_written() -> None:
    def write() -> None:
        shuffled = torch.arange(4, device="cuda")[unknown(4).sort().indices]
        shuffled += unknown(4, dtype=torch.long)
        int(shuffled.sort().values.max())

    with pytest.raises(MemPluginError, match="whole number"):
        estimated(write)
