"""Our categories beside those of torch's `_memory_profile()`, block by block at the peak.

python -m tests.record.agreement [after|first|between] [THREADS]

prints the tables of docs/categories.md; the first word says where the loop calls `zero_grad()` (`Clears`).

Where the two differ, evidence from neither decides: `Evidence`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import schedule
from torch.profiler._memory_profiler import Action

from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.record.profiler.roles import NODE_PREFIX, OPTIMIZER_PREFIX
from tb_memplugin.trace import Category
from tests.record.untuned import MORE_UNTUNED
from tests.training import CNN, MODELS, Transformer, train


class GRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 32), nn.Linear(48, 60)
        self.gru = nn.GRU(32, 48, num_layers=2, batch_first=True)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0]).flatten(0, 1)

    batch = staticmethod(Transformer.batch)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.inner, self.up = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 10, 1)

    def forward(self, x):
        wide = F.silu(self.norm(self.down(x)))
        return self.out(torch.cat([wide, self.up(F.relu(self.inner(wide)))], 1)).mean((2, 3))

    batch = staticmethod(CNN.batch)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(768, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256),
            nn.BatchNorm1d(256), nn.SiLU(), nn.Linear(256, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)

    batch = staticmethod(CNN.batch)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(60, 32), nn.Linear(32, 4), nn.Linear(32, 60)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(x[row]) * weight[row, place, None])
        return self.head(x + out)

    batch = staticmethod(Transformer.batch)


Clears = Literal["after", "first", "between"]
"""Where a step calls `zero_grad()`: after the optimizer's step or first of all, as PyTorch's tutorials do,
or between forward and backward, which leaves the last step's gradients alive through the forward."""

THREADS = 2
"""With more threads than one ATen takes oneDNN's convolutions, else its own; see docs/categories.md."""

UNTUNED = {"gru": GRU, "unet": UNet, "mlp": MLP, "experts": MixtureOfExperts}
"""Models that nobody looked at while the rules were written."""


@dataclass
class Agreement:
    """Bytes at the peak: all, those torch gives a category, those it gives the same one, and the rest.

    `differ` and `unnamed` count bytes by (ours, torch's, operator) and (ours, operator). Of these,
    `torch_wrong` counts those where the evidence says that torch is wrong, or silent on what is proven.
    """

    total: int = 0
    named_by_torch: int = 0
    same: int = 0
    differ: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    unnamed: Counter[tuple[str, str]] = field(default_factory=Counter)
    torch_wrong: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    open: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @property
    def of_all(self) -> float:
        """Of all bytes at the peak, how many torch names as we do; its silence counts as a difference."""
        return self.same / self.total

    @property
    def of_named(self) -> float:
        """Of the bytes that torch names, how many it names as we do."""
        return self.same / self.named_by_torch

    @property
    def of_undecided(self) -> float:
        """Of all bytes but those where torch is proven wrong or silent, how many it names as we do."""
        return self.same / (self.total - self.torch_wrong.total())


@dataclass
class Evidence:
    """What pointers, the autograd graph and the profiler's own events say, taken beside the training.

    `notes` are (ns, address -> category): parameters, buffers, gradients and optimizer state by pointer,
    and what the autograd graph has saved just before a backward: if it is none of these, an activation.
    `spans` are the operators, autograd nodes and optimizer steps: (start ns, end ns).
    """

    notes: list[tuple[int, dict[int, str]]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    clears: Clears = "after"

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, _: bool) -> None:
        """A training step with notes."""
        x, y = batch()
        if self.clears == "first":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if self.clears == "between":
            optimizer.zero_grad()
        self._note(model, optimizer, None if getattr(model, "checkpointing", None) else loss)
        loss.backward()
        self._note(model, optimizer)
        optimizer.step()
        self._note(model, optimizer)
        if self.clears == "after":
            optimizer.zero_grad()

    def look_up(self, tree: Any) -> None:
        """Take the spans from the profiler's event tree."""
        pending = list(tree)
        while pending:
            event = pending.pop()
            if event.name.startswith((NODE_PREFIX, OPTIMIZER_PREFIX, "aten::")):
                self.spans.append((event.start_time_ns, event.end_time_ns))
            pending += event.children

    def against(self, address: int, born: int, freed: int, ours: str, theirs: str | None) -> str | None:
        """What shows that torch is wrong on a block, or silent where it need not be; None: nothing does."""
        seen = {note[address] for when, note in self.notes if born <= when < freed and address in note}
        if ours in seen:
            return "the graph has saved it" if ours == "activation" else "its pointer"
        if ours == "temporary" and any(start <= born and freed <= end for start, end in self.spans):
            return "born and freed within one operator, node or optimizer step"
        if theirs in ("parameter", "gradient") and theirs not in seen:  # they live until they are noted
            return f"it is no {theirs}: no pointer"
        return None

    def _note(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor | None = None
    ) -> None:
        found = dict.fromkeys(_addresses(_saved(loss)), "activation")
        found |= dict.fromkeys(_addresses(model.parameters()), "parameter")
        found |= dict.fromkeys(_addresses(model.buffers()), "buffer")
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        found |= dict.fromkeys(_addresses(gradients), "gradient")
        state = (value for mine in optimizer.state.values() for value in mine.values())
        found |= dict.fromkeys(_addresses(state), "optimizer_state")
        self.notes.append((time_ns(), found))


def _addresses(tensors: Any) -> list[int]:
    return [one.untyped_storage().data_ptr() for one in tensors if isinstance(one, torch.Tensor)]


def _saved(loss: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """What the operators of a forward made and the autograd graph saved for the backward.

    Each call from here is an event of the profile, which records stacks: kinds of nodes are asked once.
    """
    pending = [] if loss is None else [loss.grad_fn]
    seen = set()
    names: dict[type, list[str]] = {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_saved_")]
        for name in names[kind]:
            value = getattr(node, name)
            for one in value if isinstance(value, tuple | list) else (value,):
                if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                    yield one


def agreement(model: nn.Module, optimizer: Any = torch.optim.AdamW, clears: Clears = "after") -> Agreement:
    """Train a model and compare at one step's peak: torch's analysis takes long, longer with each step."""
    evidence = Evidence(clears=clears)
    (cycle,) = train(
        model,
        optimizer=optimizer,
        steps=3,
        plan=schedule(wait=1, warmup=1, active=1, repeat=1),
        step=evidence.step,
        with_memory_profile=True,
        record_shapes=True,
        with_stack=True,
    )
    evidence.look_up(cycle.tree)
    trace, blocks = cycle.trace, cycle.trace.allocations
    top = max(step_stats(trace, 0), key=lambda step: step.peak_bytes)
    theirs = _torch_state(cycle.memory_profile, top.peak_time_ns)
    times = [*trace.events.time_ns.tolist(), sys.maxsize]
    found = Agreement(total=top.peak_bytes)
    for row in blocks.alive_at(top.peak_event, 0).tolist():
        size, ours = int(blocks.bytes[row]), Category(blocks.category[row]).key
        operator = trace.operators[blocks.operator[row]] if blocks.operator[row] >= 0 else "before the window"
        address = int(blocks.address[row])
        other = theirs.get(address)
        found.named_by_torch += size if other is not None else 0
        if other == ours:
            found.same += size
            continue
        if other is None:
            found.unnamed[ours, operator] += size
        else:
            found.differ[ours, other, operator] += size
        born = times[blocks.born[row]] if blocks.born[row] >= 0 else 0
        reason = evidence.against(address, born, times[blocks.freed[row]], ours, other)
        if reason:
            found.torch_wrong[ours, other or "nothing", operator, reason] += size
        else:
            found.open[ours, other or "nothing", operator] += size
    return found


def _torch_state(profile: Any, until_ns: int) -> dict[int, str]:
    """Address -> category of the blocks that torch knows and names at a time."""
    live: dict[int, tuple[int, str | None]] = {}
    for when, action, (key, version), _ in profile.timeline:
        if when > until_ns:
            break
        if not hasattr(key, "storage"):
            continue  # torch saw no tensor in it
        block = key.storage.allocation_id
        if action is Action.DESTROY:
            live.pop(block, None)
            continue
        category = profile._categories.get(key, version + (action is Action.INCREMENT_VERSION))
        live[block] = key.storage.ptr, category.name.lower() if category else None
    return {address: name for address, name in live.values() if name is not None}


def tables(clears: Clears) -> str:
    """All models' agreement in Markdown: shares by model, their counts, and where torch is wrong."""
    models: dict[str, Any] = {**UNTUNED, **MORE_UNTUNED, **MODELS}
    shares = ["| model | optimizer | bytes at the peak | of all | of named | of undecided | left open |"]
    shares += ["|" + "---|" * 7]
    wrong: defaultdict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    untuned: list[Agreement] = []
    for name, make in models.items():
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):
            found = agreement(make(), optimizer, clears)
            if name not in MODELS:
                untuned.append(found)
            left = "; ".join(
                f"{ours} (torch: {other}) in `{operator}` {size:,} B"
                for (ours, other, operator), size in found.open.most_common(3)
            )
            cells = f"{found.of_all:.1%} | {found.of_named:.1%} | {found.of_undecided:.1%} | {left or 'none'}"
            shares.append(f"| {name} | {optimizer.__name__} | {found.total:,} | {cells} |")
            for (ours, other, _, reason), size in found.torch_wrong.items():
                of_model = wrong[ours, other, reason]
                of_model[name] = max(of_model.get(name, 0), size)
    rows = ["| ours | torch | what shows it | most bytes | models |", "|" + "---|" * 5]
    for (ours, other, reason), sizes in sorted(wrong.items(), key=lambda item: -max(item[1].values())):
        rows.append(f"| {ours} | {other} | {reason} | {max(sizes.values()):,} | {', '.join(sizes)} |")
    shares.append("")
    for share in ("of_all", "of_named", "of_undecided"):
        enough = sum(getattr(one, share) >= 0.95 for one in untuned)
        shares.append(f"{share} is 95 % or more in {enough} of the {len(untuned)} untuned runs.")
    same, named = sum(one.same for one in untuned), sum(one.named_by_torch for one in untuned)
    shares.append(f"of_named is {same / named:.1%} in these runs together.")
    return "\n".join([*shares, "", *rows])


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]) if len(sys.argv) > 2 else THREADS)
    where: Clears = next((one for one in get_args(Clears) if one in sys.argv), "after")
    sys.stdout.write(tables(where) + "\n")
