"""Advice on real trainings of the demo's transformer: every finding true to the byte, none false."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import profile, schedule
from torch.utils.checkpoint import checkpoint

from examples.demo import Config, Transformer, batches, standard_library
from tb_memplugin import load, memory_trace_handler
from tb_memplugin.analysis import Finding, advice
from tb_memplugin.analysis.advice_rules.checkpointing import Activations
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.steps import highest_step
from tb_memplugin.trace import MemoryTrace

CONFIG = Config("advised", batch=4, context=64, depth=3)
STEPS = 4
RANDOM_STATE = torch.get_rng_state().nbytes
"""What torch.utils.checkpoint keeps for every call beside its input."""

Train = Callable[[Transformer, torch.optim.Optimizer, Tensor, Tensor], None]
Record = Callable[..., MemoryTrace]


def usual(model: Transformer, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
    model(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def text() -> Tensor:
    return standard_library()


@pytest.fixture
def record(text: Tensor, tmp_path: Path) -> Iterator[Record]:
    """Trains a few steps and loads what was recorded of them; every training sees the same batches."""

    def recorded(train: Train = usual, *, recompute: str = "", with_stack: bool = False) -> MemoryTrace:
        gc.collect()  # else cycles with an earlier model may be alive before one window and not another
        torch.manual_seed(0)
        model = Transformer(CONFIG)
        rows = folds([name for name, _ in model.named_modules()])
        for name, module in model.named_modules():
            if recompute and rows[name] == recompute:
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with profile(
            schedule=schedule(skip_first=1, wait=0, warmup=1, active=STEPS, repeat=1),
            profile_memory=True,
            on_trace_ready=memory_trace_handler(tmp_path, "rank0", model=model, optimizer=optimizer),
            with_stack=with_stack,
        ) as profiler:
            for tokens, targets in islice(batches(text, CONFIG), STEPS + 2):
                train(model, optimizer, tokens, targets)
                profiler.step()
        return load(max(tmp_path.rglob("*.mem"), key=lambda file: file.stat().st_mtime_ns))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield recorded
    torch.set_num_threads(threads)


def peak(trace: MemoryTrace) -> int:
    return int(trace.live(0).max())


def problems(trace: MemoryTrace) -> list[Finding]:
    return [finding for finding in advice(trace).findings if finding.level == "problem"]


def test_a_training_that_is_fine_has_no_problem_and_all_is_judged(record: Record) -> None:
    advised = advice(record())
    assert {finding.level for finding in advised.findings} == {"option"}
    assert "not judged" not in {told.verdict for told in advised.judgements}


def first_zeroed(model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    model(x, y).backward()
    optimizer.step()


def twice_summed() -> Train:
    calls = iter(range(1, 100))

    def train(model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        model(x, y).backward()
        if next(calls) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize("train", [first_zeroed, twice_summed()], ids=["zeroed first", "accumulated"])
def test_other_orders_that_waste_nothing_are_no_problem(record: Record, train: Train) -> None:
    assert problems(record(train)) == []


def zeroed_in_place(model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    model(x, y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def zeroed_after_forward(model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("train", [zeroed_in_place, zeroed_after_forward])
def test_gradients_kept_cost_the_peak_what_freeing_them_gives_back_but_for_one_at_most(
    record: Record, train: Train
) -> None:
    """Of a gradient that backward is just adding to, the old and the new count."""
    usual_peak, kept = peak(record()), record(train)
    (finding,) = problems(kept)
    assert finding.kind == "kept_gradients"
    gradients = [parameter.nbytes for parameter in Transformer(CONFIG).parameters()]
    assert 0 <= finding.of_bytes - finding.bytes - usual_peak <= max(gradients)
    assert finding.evidence[0].bytes == sum(gradients)


def keeping(kept: list[Tensor], *, graph: bool) -> Train:
    """Keeps a loss of every step, with its graph and so with all that this saved for backward, or without."""

    def train(model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        usual(model, optimizer, x, y)
        loss = model(x, y)
        kept.append(loss if graph else loss.detach())

    return train


def test_losses_kept_with_their_graph_grow_by_what_the_graph_holds(record: Record) -> None:
    kept: list[Tensor] = []
    trace = record(keeping(kept, graph=True))
    (finding,) = problems(trace)
    assert (finding.kind, finding.evidence[0].what) == ("growth", "blocks.*.mlp · aten::gelu")
    hidden = CONFIG.batch * CONFIG.context * 4 * CONFIG.width * 4
    assert finding.evidence[0].bytes == STEPS * CONFIG.depth * hidden
    assert (
        f"{STEPS * CONFIG.depth} blocks kept, grew in {STEPS} of {STEPS} steps" in finding.evidence[0].detail
    )
    assert set(np.diff(finding.levels[1:])) == {finding.bytes}, "the slope is that of the whole device"


def test_losses_kept_without_their_graph_are_too_little_to_name(record: Record) -> None:
    kept: list[Tensor] = []
    advised = advice(record(keeping(kept, graph=False)))
    assert [finding.level for finding in advised.findings] == ["option"]
    growth = next(told.why for told in advised.judgements if told.kind == "growth")
    assert "Memory grows by 4 B per step" in growth


def test_with_stacks_growth_has_the_line_that_made_it(record: Record) -> None:
    kept: list[Tensor] = []

    def train(model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        usual(model, optimizer, x, y)
        kept.append(torch.zeros(1000))

    trace = record(train, with_stack=True)
    (finding,) = problems(trace)
    line = train.__code__.co_firstlineno + 2
    (row,) = finding.evidence
    assert (row.bytes, row.what[-50:].partition("test_advice.py")[2]) == (STEPS * 4000, f":{line} (train)")
    assert (finding.bytes, finding.where.view) == (4000, "stacks")


@pytest.mark.parametrize("name", ["blocks.*", "blocks.*.mlp", "blocks.*.attn"])
def test_checkpointing_saves_what_was_foretold_but_for_the_random_state(record: Record, name: str) -> None:
    trace = record()
    step = highest_step(trace, 0)
    folded = folds([module.key for module in trace.modules])
    rows = [row for row, module in enumerate(trace.modules) if folded[module.key] == name]
    foretold = Activations(trace, 0, step).recomputed(np.array(rows))
    assert foretold.saved_bytes > 0.05 * step.peak_bytes
    saved = step.peak_bytes - peak(record(recompute=name))
    beside = foretold.saved_bytes - saved
    assert 0 <= beside <= foretold.calls * RANDOM_STATE
    assert beside % RANDOM_STATE == 0


def test_what_is_checkpointed_already_is_not_advised_again(record: Record) -> None:
    found = advice(record(recompute="blocks.*")).findings
    assert "checkpointing" not in {finding.kind for finding in found}


def test_dtypes_of_optimizer_state_and_parameters_are_recorded(record: Record) -> None:
    properties = record().properties
    parameters = list(Transformer(CONFIG).parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    assert properties["dtype_bytes.parameter.cpu.float32"] == str(size)
    assert properties["dtype_bytes.optimizer_state.cpu.float32"] == str(2 * size + 4 * len(parameters))
