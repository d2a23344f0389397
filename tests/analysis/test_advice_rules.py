"""Advice on small histories: each rule finds what a person can work out by hand, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis import advice, block_origins
from tb_memplugin.analysis.advice_rules import RULES, advice_on_steps
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import Kind, MemoryTrace, Step
from tests.analysis.advice_rules.findings import evidence, found, stacked, verdict
from tests.analysis.histories import M, allocator_trace, steps_of
from tests.step_figures import figures
from tests.traces import EPOCH, MICROSECOND, trace


def test_every_rule_is_judged_on_every_device_and_a_quiet_training_gives_no_finding() -> None:
    history = steps_of("alloc 5 a# device=cuda:0", "free a#", "alloc 9 b# device=cpu", "free b#", count=3)
    advised = advice(history)
    assert advised.findings == ()
    assert [(told.device, told.kind) for told in advised.judgements] == [
        (device, kind) for device in ("cuda:0", "cpu") for kind in RULES
    ]
    assert all(told.why.endswith(".") for told in advised.judgements)
    assert {told.device for told in advice(history, "cpu").judgements} == {"cpu"}


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotRecordedError, match="cuda:7"):
        advice(trace("alloc 5 a"), "cuda:7")


def test_a_trace_without_devices_or_events_has_no_advice() -> None:
    empty = trace("start 0 nothing")
    assert advice(empty).findings == ()
    assert {told.verdict for told in advice(empty).judgements} == {"not judged"}


GROWS = ("alloc 100 loss# module=net operator=aten::add", "alloc 900 t# operator=mm", "free t#")


def test_growth_has_its_place_its_slope_and_the_levels_between_steps() -> None:
    finding = found(steps_of(*GROWS, count=4, before=("start 70 w",)), "growth")
    assert (finding.level, finding.bytes, finding.of_bytes, finding.step) == ("problem", 100, 1370, 3)
    assert finding.levels == (70, 170, 270, 370, 470)
    assert finding.subject == "net · aten::add"
    assert finding.subject in finding.title
    assert evidence(finding) == [("net · aten::add", 400)]
    assert "rises 100 B per step; 4 blocks kept, grew in 4 of 4 steps" in finding.evidence[0].detail
    assert finding.where.view == "allocations"
    assert dict(finding.where.state) == {"step": "3", "search": "net", "listed": "lifetime"}


def test_a_rise_is_told_in_the_unit_of_the_growth() -> None:
    """Four steps of 2 MiB: 8 MiB, and not "2,048.00 KiB per step" beside it."""
    (row,) = found(steps_of(f"alloc {2 << 20} loss# operator=mm", count=4), "growth").evidence
    assert (row.bytes, row.detail.partition(";")[0]) == (8 << 20, "rises 2.00 MiB per step")


def test_growth_in_layers_that_repeat_is_one_place_and_many_places_are_one_finding() -> None:
    lines = [f"alloc 10 a#{layer} module=blocks.{layer}.mlp operator=mm" for layer in range(3)]
    finding = found(steps_of(*lines, "alloc 5 b# module=head operator=mm", count=3), "growth")
    assert evidence(finding) == [("blocks.*.mlp · mm", 90), ("head · mm", 15)]
    assert (finding.bytes, "(also 1 more place)" in finding.title) == (35, True)


def test_growth_goes_by_the_line_of_the_users_code_where_there_are_stacks() -> None:
    lines = [f"alloc {64 + step}M {1 << 10} stack=0" for step in range(3)]
    steps = [Step(n, EPOCH + n * MICROSECOND, EPOCH + (n + 1) * MICROSECOND) for n in range(3)]
    stack = ("append train.py:9", "main train.py:1")
    finding = found(allocator_trace(*lines, steps=tuple(steps), stacks=(stack,)), "growth")
    assert evidence(finding) == [("train.py:9 (append)", 3 << 10)]
    assert finding.where.view == "stacks"
    assert dict(finding.where.state) == {"step": "2", "event": "2", "search": "append train.py:9"}


def test_growth_that_would_not_matter_in_a_thousand_steps_is_told_but_not_found() -> None:
    history = steps_of("alloc 4 loss# module=net", count=3, before=("start 1000000 w",))
    assert verdict(history, "growth") == (
        "fine",
        "Memory grows by 4 B per step: 1,000 steps would add less than 1% of the peak.",
    )
    more = steps_of("alloc 40 loss# module=net", count=3, before=("start 1000000 w",))
    assert found(more, "growth").bytes == 40


def test_growth_is_not_judged_on_two_steps() -> None:
    verdict_of_two = verdict(steps_of(*GROWS, count=2), "growth")
    assert verdict_of_two == ("not judged", "This rule needs 3 whole steps in one recording; this one has 2.")
    assert "this one has no separate steps" in verdict(trace("alloc 5 a"), "growth")[1]


def test_where_no_steps_are_told_the_optimizer_tells_them_apart() -> None:
    lines = [
        line.replace("#", str(step))
        for step in range(4)
        for line in ("alloc 1 s# phase=optimizer", "free s# phase=optimizer", "alloc 50 a# module=net")
    ]
    finding = found(trace(*lines), "growth")
    assert (finding.bytes, evidence(finding)) == (50, [("net · (no operator)", 150)])


@pytest.mark.parametrize(
    ("held", "used", "idle"), [(200, 50, 150), (400, 319, 81), (400, 321, 0), (100, 40, 0), (128, 100, 0)]
)
def test_a_reserve_is_unused_where_a_fifth_of_it_and_64_mib_never_come_to_use(
    held: int, used: int, idle: int
) -> None:
    history = allocator_trace(f"held 16M {held}M", f"live 16M {used}M", f"free_completed 16M {used}M")
    if not idle:
        assert verdict(history, "unused_reserve")[0] == "fine"
        return
    finding = found(history, "unused_reserve")
    assert (finding.level, finding.bytes, finding.of_bytes) == ("problem", idle * M, held * M)
    assert evidence(finding)[:2] == [("most reserved", held * M), ("most in use", used * M)]
    assert evidence(finding)[2:] == [("pool default, default stream", idle * M)]
    assert (finding.where.view, dict(finding.where.state)) == ("allocator", {"step": "0", "event": "-1"})


def test_the_cpu_has_no_reserve_to_leave_unused() -> None:
    assert verdict(trace("alloc 5 a"), "unused_reserve") == (
        "fine",
        "The allocator of cpu does not keep reserved memory.",
    )
    assert verdict(trace("alloc 5 a device=cuda:0"), "unused_reserve")[0] == "not judged"


# Two blocks that each hold 300 bytes for backward and pass 50 on, then a loss of 200: 950 bytes at the peak.
BLOCKS = (
    "step 0",
    "alloc 50 x module=emb category=activation phase=forward operator=embedding",
    "alloc 300 h0 module=blocks.0.up category=activation phase=forward operator=up",
    "alloc 50 y0 module=blocks.0 category=activation phase=forward operator=down",
    "alloc 300 h1 module=blocks.1.up category=activation phase=forward operator=up",
    "alloc 50 y1 module=blocks.1 category=activation phase=forward operator=down",
    "alloc 200 loss category=activation phase=forward operator=loss",
    "free loss phase=backward",
    "free y1 phase=backward",
    "free h1 phase=backward",
    "free y0 phase=backward",
    "free h0 phase=backward",
    "free x phase=backward",
)
CALLS = [
    ("emb", 0, 0, "forward"),
    ("blocks.0", 1, 2, "forward"),
    ("blocks.0.up", 1, 1, "forward"),
    ("blocks.1", 3, 4, "forward"),
    ("blocks.1.up", 3, 3, "forward"),
    ("blocks.1", 8, 8, "backward"),
    ("blocks.0", 10, 10, "backward"),
]


def test_checkpointing_saves_what_layers_hold_but_for_what_they_pass_on() -> None:
    """With both blocks checkpointed the second's forward is the peak: x, y0, and its own 350 bytes."""
    finding = found(trace(*BLOCKS, calls=CALLS), "checkpointing")
    assert (finding.level, finding.subject, finding.step) == ("option", "blocks.*", 0)
    assert (finding.bytes, finding.of_bytes) == (950 - 450, 950)
    assert evidence(finding) == [("blocks.*", 500)]
    assert "< 0.01 ms of forward in 2 calls" in finding.evidence[0].detail
    assert "holds 600 B" in finding.evidence[0].detail
    assert dict(finding.where.state) == {"step": "0", "find": "blocks.*", "sort": "activations"}


def test_what_a_millisecond_saves_is_told_in_a_unit_of_which_there_is_one() -> None:
    """10,000 bytes in 4 microseconds of forward: 2,500,000 bytes per ms are 2.38 MiB, not 2,441.41 KiB."""
    larger = [re.sub(r"alloc (\d+)", lambda found: f"alloc {20 * int(found[1])}", line) for line in BLOCKS]
    finding = found(trace(*larger, calls=CALLS), "checkpointing")
    assert "saves 2.38 MiB per ms" in finding.evidence[0].detail


def test_a_module_whose_input_dies_with_it_saves_nothing() -> None:
    """As dropout: it keeps a mask of 100 bytes, and checkpointed would keep its input of 100 instead."""
    history = trace(
        "step 0",
        "alloc 100 x module=a category=activation phase=forward operator=linear",
        "alloc 100 mask module=drop category=activation phase=forward operator=bernoulli",
        "alloc 100 out module=drop category=activation phase=forward operator=mul",
        "free x phase=forward",
        "alloc 100 loss category=activation phase=forward operator=loss",
        "free loss phase=backward",
        "free out phase=backward",
        "free mask phase=backward",
        calls=[
            ("a", 0, 0, "forward"),
            ("drop", 1, 2, "forward"),
            ("drop", 7, 7, "backward"),
            ("a", 8, 8, "backward"),
        ],
    )
    assert verdict(history, "checkpointing")[0] == "fine"


def test_recomputing_the_whole_model_lowers_no_peak() -> None:
    calls = [("model", 0, 5, "forward"), ("model", 6, 11, "backward")]
    whole = [
        line.replace("module=", "module=model.").replace("loss ", "loss module=model ") for line in BLOCKS
    ]
    assert verdict(trace(*whole, calls=calls), "checkpointing")[0] == "fine"


def test_checkpointing_needs_the_modules_calls() -> None:
    assert "pass the model to the recorder" in verdict(trace(*BLOCKS), "checkpointing")[1]


def state_of(dtype: str | None, size: int = 300, other: int = 100) -> MemoryTrace:
    told = {} if dtype is None else {f"dtype_bytes.optimizer_state.cpu.{dtype}": str(size)}
    return trace(
        f"start {size} m category=optimizer_state module=net label=net.weight(exp_avg)",
        f"alloc {other} a",
        properties=told,
    )


def test_optimizer_state_in_float32_may_be_kept_in_8_bits() -> None:
    finding = found(state_of("float32"), "optimizer_state")
    assert (finding.level, finding.bytes, finding.of_bytes) == ("option", 300 - 75, 400)
    assert evidence(finding) == [("float32", 300), ("exp_avg", 300), ("peak of step 0", 400)]
    assert "75.0 % of the peak: all float32" in finding.title
    assert (finding.where.view, dict(finding.where.state)["sort"]) == ("modules", "optimizer")


def test_what_a_finding_says_of_a_part_has_the_unit_of_the_whole() -> None:
    finding = found(state_of("float32", size=8 << 20), "optimizer_state")
    assert finding.evidence[0].detail == "4 bytes per element; 2.00 MiB with 1 byte"


@pytest.mark.parametrize(
    ("history", "expected", "why"),
    [
        (state_of("float32", other=1000), "fine", "23.1 % of the peak"),
        (state_of("bfloat16"), "fine", "all bfloat16"),
        (state_of("uint8"), "fine", "all uint8"),
        (trace("alloc 5 a"), "not judged", "No optimizer state was found"),
    ],
)
def test_optimizer_state_that_is_small_narrow_or_of_unknown_dtype_is_no_finding(
    history: MemoryTrace, expected: str, why: str
) -> None:
    told, sentence = verdict(history, "optimizer_state")
    assert told == expected
    assert why in sentence


def test_a_temporary_without_which_the_peak_is_half() -> None:
    history = trace(
        "start 100 w",
        "step 3",
        "alloc 500 t category=temporary operator=softmax module=head",
        "free t",
        "alloc 200 a",
    )
    finding = found(history, "large_temporary")
    assert (finding.level, finding.step, finding.bytes, finding.of_bytes) == ("option", 3, 300, 600)
    assert evidence(finding) == [
        ("softmax in head", 500),
        ("peak of step 3", 600),
        ("the same peak without them", 300),
    ]
    assert dict(finding.where.state) == {"step": "3", "block": "1"}


@pytest.mark.parametrize(
    ("phase", "lifetime", "to_do"),
    [
        ("forward", "they exist only while this operator runs.", "loss over parts of the batch"),
        ("backward", "they exist only while this operator runs.", "loss over parts of the batch"),
        ("optimizer", "they are freed before the optimizer step ends.", "fused=True"),
        ("other", "they are freed soon after they are made.", "free each result"),
    ],
)
def test_temporaries_live_as_long_as_their_phase_says(phase: str, lifetime: str, to_do: str) -> None:
    """What the program makes outside any phase, and holds, is a temporary, too."""
    each = [f"alloc 500 t{n} category=temporary operator=aten::add phase={phase}" for n in range(2)]
    finding = found(trace("start 100 w", *each, "free t0", "free t1"), "large_temporary")
    assert finding.title == f"Temporaries of aten::add set the peak: {lifetime}"
    assert to_do in finding.what_to_do


@pytest.mark.parametrize(("operator", "is_told"), [("aten::sqrt", False), ("aten::_foreach_sqrt", True)])
def test_one_parameter_at_a_time_is_advice_where_all_are_updated_together(
    operator: str, is_told: bool
) -> None:
    line = f"alloc 500 t category=temporary operator={operator} phase=optimizer"
    finding = found(trace("start 100 w", line, "free t"), "large_temporary")
    assert ("foreach=False" in finding.what_to_do) is is_told


def test_temporaries_without_an_operator_are_those_of_their_line() -> None:
    history = trace("start 100 w", "alloc 500 t category=temporary phase=optimizer", "free t")
    stacks = (("_multi_tensor_adamw /lib/torch/optim/adamw.py:9", "train train.py:7"),)
    at = replace(history.events, stack=np.where(history.events.kind == Kind.ALLOC, 0, -1).astype(np.int32))
    finding = found(replace(history, events=at, stacks=stacks), "large_temporary")
    assert finding.title.startswith("Temporaries of train.py:7 (train) set the peak:")
    assert [row.bytes for row in finding.evidence] == [500, 600, 100]


def test_temporaries_of_the_model_itself_are_those_of_the_root() -> None:
    history = trace("start 100 w", "alloc 500 t category=temporary operator=softmax module=", "free t")
    assert evidence(found(history, "large_temporary"))[0] == ("softmax in (root)", 500)


def test_temporaries_of_layers_that_repeat_are_one_and_of_others_hide_each_other() -> None:
    lines = [f"alloc 500 t{n} category=temporary operator=softmax module=blocks.{n}.attn" for n in range(2)]
    each = [line for n, alloc in enumerate(lines) for line in (alloc, f"free t{n}")]
    assert found(trace("start 100 w", *each), "large_temporary").bytes == 500
    other = ("alloc 500 u category=temporary operator=mm module=head", "free u")
    told, why = verdict(trace("start 100 w", *each, *other), "large_temporary")
    assert told == "fine"
    assert why.endswith("Without those of any single operator, the peak would be at most 0 B lower.")


def test_growth_comes_before_what_saves_more() -> None:
    history = steps_of(
        "alloc 100 loss# module=net",
        "alloc 5000 t# category=temporary operator=softmax",
        "free t#",
        count=3,
    )
    assert [(one.kind, one.level) for one in advice(history).findings] == [
        ("growth", "problem"),
        ("large_temporary", "option"),
    ]


def test_names_that_are_hostile_stay_names() -> None:
    lines = [f"alloc 100 x{step} module=a\x1b[31m<b>.{step} operator=%s{{}}" for step in range(3)]
    steps = [line for step in range(3) for line in (f"step {step}", lines[step])]
    assert advice(trace(*steps)).findings == ()  # each step another name: nothing repeats
    same = steps_of("alloc 100 x# module=a\x1b[31m<b> operator=%s{}", count=3)
    assert found(same, "growth").subject == "a\x1b[31m<b> · %s{}"


def test_results_are_plain_numbers_for_json() -> None:
    for finding in advice(trace(*BLOCKS, calls=CALLS)).findings:
        assert not any(isinstance(value, np.generic) for value in (finding.bytes, *finding.levels))


def test_what_saves_most_comes_first_whether_it_is_a_problem_or_an_option() -> None:
    """At the peak, 600 of a sort are beside the old 400, the new 400 and 100."""
    each = ("alloc 100 a# phase=forward", "alloc 400 r# phase=forward")
    sort = "alloc 600 t# phase=forward category=temporary operator=aten::sort"
    lines = [line for again in ("", "free r0") for line in (*each, sort, "free t#", "free a#", again) if line]
    numbered = [line.replace("#", str(at // 5)) for at, line in enumerate(lines)]
    history = stacked(trace(*numbered), ("forward net.py:3",), ("forward net.py:9",), ("forward net.py:12",))
    assert [(one.kind, one.level, one.bytes, one.of_bytes) for one in advice(history).findings] == [
        ("large_temporary", "option", 600, 1500),
        ("previous_result", "problem", 400, 1500),
    ]


def test_figures_alone_judge_no_other_rule() -> None:
    verdicts = {one.kind: one.verdict for one in advice_on_steps(figures([M] * 100)).judgements}
    assert verdicts == dict.fromkeys(RULES, "not judged") | {"growth": "fine"}


def test_what_several_rules_need_is_computed_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    step_blocks = block_origins._step_blocks

    def counted(judged: block_origins.Judged) -> block_origins.StepBlocks:
        read.append(judged.device)
        return step_blocks(judged)

    monkeypatch.setattr(block_origins, "_step_blocks", counted)
    advice(allocator_trace("live 16M 600", "live 32M 600 device=1", "alloc 17M 512"))
    assert read == [0, 1]
