"""Operators on whole numbers and a mask, both known or not: prints what each engine answers."""

import json
from collections.abc import Callable
from typing import Any

import torch

device = "cuda"
rows = torch.arange(64, device=device)
drawn = torch.randn(32768, 64, device=device)  # too large to be computed
every = torch.ones(drawn.numel(), dtype=torch.bool, device=device)


def assign(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    assigned = torch.zeros_like(numbers)
    assigned[mask] = 5
    return assigned


def count(_: torch.Tensor, mask: torch.Tensor) -> int:
    total = torch.zeros(1, dtype=torch.long, device=device)
    for _step in range(3):
        total = total + mask.sum()
    return int(total)


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda numbers, mask: int(mask.sum()),
    "long sum": lambda numbers, mask: int(mask.long().sum()),
    "long sum of rows": lambda numbers, mask: int(mask.view(2, -1).int().sum(1).max()),
    "several": count,
    "stacked": lambda numbers, mask: int(torch.stack([mask.sum(), mask.sum() + 1]).max()),
    "cumsum": lambda numbers, mask: int(mask.cumsum(0)[-1]),
    "count_nonzero": lambda numbers, mask: int(torch.count_nonzero(mask)),
    "nonzero": lambda numbers, mask: len(mask.nonzero()),
    "argwhere": lambda numbers, mask: len(torch.argwhere(mask)),
    "where": lambda numbers, mask: len(torch.where(mask)[0]),
    "index": lambda numbers, mask: len(numbers[mask]),
    "masked_select": lambda numbers, mask: len(numbers.masked_select(mask)),
    "largest selected": lambda numbers, mask: int(
        torch.cat([numbers.masked_select(mask), numbers[:1]]).max()
    ),
    "unique": lambda numbers, mask: len(torch.unique(numbers[mask])),
    "unique of a mask": lambda numbers, mask: len(torch.unique(mask)),
    "bincount": lambda numbers, mask: len(torch.bincount(numbers[mask])),
    "bincount of a mask": lambda numbers, mask: len(torch.bincount(mask.long())),
    "repeat_interleave": lambda numbers, mask: len(numbers.repeat_interleave(mask.long())),
    "assigned": lambda numbers, mask: assign(numbers, mask).shape[0],
    "filled": lambda numbers, mask: len(numbers.masked_fill(mask, 7)),
    "range": lambda numbers, mask: len(range(int(mask.long().sum()))),
    "if any": lambda numbers, mask: 1 if mask.any() else 0,
}
KINDS: dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]] = {
    "known": lambda row: (torch.tensor([0, 1, 0, 2], device=device), torch.arange(4, device=device) % 2 > 0),
    "none": lambda row: (rows, torch.zeros(64, dtype=torch.bool, device=device)),
    "decided": lambda row: (rows, (drawn[row] > 0) & torch.zeros(64, dtype=torch.bool, device=device)),
    "unknown": lambda row: (rows, drawn[row] > 0),
}
answers: dict[str, list[Any]] = {}
for number, (name, operator) in enumerate(OPERATORS.items()):
    answers[name] = [operator(*kind(number)) for kind in KINDS.values()]
answers["of true numbers"] = [len(torch.unique(torch.ones(4, device=device) > 0))]
answers["of many"] = [int(every.long().sum()), int((drawn > 0).long().sum())]
for name, compare in {"first": lambda index: index == 0, "other": lambda index: index != 0}.items():
    answers[name] = [sum(1 for index in drawn.argmax(1)[:3] if compare(index))]
print("ANSWERS", json.dumps(answers), flush=True)
