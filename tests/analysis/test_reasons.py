"""Each block says why it has its category."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis import why
from tb_memplugin.analysis.moments import live_allocation
from tb_memplugin.analysis.reasons import reason_of
from tb_memplugin.trace import Reason
from tests.traces import trace


def sentence(line: str) -> str:
    return why(trace(line), 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "start 4 g category=gradient label=net.weight_(gradient) module=net reason=held",
            "gradient net.weight_(gradient): it was in .grad of a parameter, by its address",
        ),
        (
            "alloc 4 a category=activation module=net.layer phase=forward reason=in_forward",
            "activation: allocated in the forward of net.layer and not freed when its operator ended",
        ),
        (
            "alloc 4 t category=temporary operator=aten::linear reason=freed_in_operator",
            "temporary: freed before aten::linear returned",
        ),
        (
            "alloc 4 i category=input reason=alive_in_forward",
            "input: made outside modules before a forward, and alive in it",
        ),
        (
            "alloc 4 i category=input label=input_of_net reason=entered",
            "input (input_of_net): it was an argument of a module called from outside all modules",
        ),
        (
            "alloc 4 g category=autograd_detail module=outside:aten::mul reason=freed_in_backward",
            "autograd detail: allocated in backward outside all modules and freed in backward",
        ),
        ("alloc 4 u", "unknown: the recording does not say why"),
        (
            "alloc 4 u phase=optimizer reason=no_rule",
            "unknown: allocated in an optimizer step; no rule says what it is",
        ),
    ],
)
def test_a_sentence_has_the_facts(line, expected):
    assert sentence(line) == expected


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_sentence_of_one_line(reason):
    line = f"alloc 4 a category=cache reason={reason.name.lower()}"
    text = reason_of(live_allocation(trace(line), 0))
    assert text.startswith("cache: ")
    assert len(text) > len("cache: ")
    assert "\n" not in text
    assert not text.endswith(".")
