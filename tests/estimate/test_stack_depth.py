"""An estimate does not depend on how many Python functions stand between the program and a rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.run.correction import Corrections
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tests.estimate.extra_frames import deeper
from tests.estimate.fake_runs import allocations
from tests.estimate.small_models import llama


def sums_and_masks() -> None:
    """Sum gradients, write derivatives into zeros and combine masks: what autograd's engine does in place."""
    data = torch.zeros(64, 64, device="cuda", requires_grad=True)
    twice = data * 2
    chosen = twice[torch.zeros(5, dtype=torch.long, device="cuda")].sum() + twice.max() + twice.exp().sum()
    (chosen + twice.clamp(torch.zeros_like(data), torch.ones_like(data)).sum()).backward()


def checks() -> None:
    """Ask for values: checks that pass, a number, and a selection that a hint for the line decides."""
    data = torch.zeros(64, device="cuda")
    if not torch.isfinite(data).all():
        raise ValueError
    torch.distributions.Normal(data, data + 1).log_prob(data)
    data[data > data.sum().item()].exp()


def products() -> None:
    layer = nn.Linear(64, 64).cuda()
    query = layer(torch.zeros(2, 4, 32, 64, device="cuda"))
    functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    layer(torch.zeros(8, 64, device="cuda")).sort(-1)[0].sum().backward()


def language_model() -> None:
    with torch.device("cuda"):
        model, loss, _ = llama()
    model.cuda()
    loss().backward()


def outcome(program: Any) -> tuple[Any, ...]:
    with MemoryEstimator(gpu="h100", hints={"share": 0.25}) as estimator:
        program()
    answer = estimator.estimate()
    figures = (answer.peak_allocated_bytes, answer.peak_reserved_bytes, answer.notes)
    return (*figures, allocations(estimator))


def add_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put two frames around the mode and around every rule; the list gets an entry for each call of one."""
    calls: list[int] = []
    create = Corrections.__init__

    def counting(rule: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return rule(*args, **kwargs)

        return deeper(run)

    def with_deeper_rules(corrections: Corrections, *args: Any, **options: Any) -> None:
        create(corrections, *args, **options)
        for rules in (corrections.rules, corrections.after):
            rules.update({operator: counting(rule) for operator, rule in rules.items()})
        corrections.kernels = {
            operator: replace(kernel, buffers=counting(kernel.buffers))
            for operator, kernel in corrections.kernels.items()
        }

    monkeypatch.setattr(Corrections, "__init__", with_deeper_rules)
    dispatch = CountingFakeMode.__torch_dispatch__
    monkeypatch.setattr(CountingFakeMode, "__torch_dispatch__", deeper(dispatch))
    monkeypatch.setattr(CountingFakeMode, "_note", deeper(CountingFakeMode._note))
    return calls


@pytest.mark.parametrize("program", [sums_and_masks, checks, products, language_model])
def test_frames_around_every_rule_change_nothing(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = outcome(program)
    calls = add_frames(monkeypatch)
    assert outcome(program) == usual
    assert calls


def test_the_program_is_still_told_apart_from_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of the engine takes its first summand's block; the same sum in a hook is a new block."""

    def gradients(hook: bool) -> int:
        with MemoryEstimator(gpu="h100") as estimator:
            data = torch.zeros(64, 64, device="cuda", requires_grad=True)
            twice = data * 2
            if hook:
                twice.register_hook(lambda gradient: gradient + gradient)
            (twice * 3 + twice.exp()).sum().backward()
        return sum(name == "add.Tensor" or name == "add" for name, _, _ in allocations(estimator))

    add_frames(monkeypatch)
    assert gradients(hook=True) == gradients(hook=False) + 1
