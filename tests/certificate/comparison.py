"""What differs between two runs of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from tests.certificate.cpu_blocks import Blocks
from tests.certificate.run import Record

SHOWN = 6
"""How many parts of a difference its text shows."""


@dataclass(frozen=True)
class Difference:
    """One kind of difference.

    Attributes:
        kind: of `recorders.EVERYTHING`.
        count: how many parts differ; of "allocations", the bytes between the two peaks.
        text: what differs, base first.
    """

    kind: str
    count: int
    text: str


def differences(base: Record, recorded: Record) -> list[Difference]:
    """Return every kind in which two records differ."""
    pairs: dict[str, tuple[Any, Any]] = {
        "gpu": (base.gpu, recorded.gpu),
        "bits": (base.values, recorded.values),
        "objects": (base.objects, recorded.objects),
        "meanwhile": (base.meanwhile, recorded.meanwhile),
        "process": (base.process, recorded.process),
        "dynamo": (base.dynamo, recorded.dynamo),
        "output": (base.output, recorded.output),
    }
    seen = [_operators(base.operators, recorded.operators), _allocations(base.blocks, recorded.blocks)]
    for kind, (left, right) in pairs.items():
        parts = list(_parts(left, right))
        seen.append(Difference(kind, len(parts), "\n".join(parts[:SHOWN])) if parts else None)
    return [difference for difference in seen if difference is not None]


def _parts(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Yield a text for each part that differs."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys([*left, *right]):
            yield from _parts(left.get(key, "(absent)"), right.get(key, "(absent)"), f"{path}.{key}")
        if list(left) != list(right) and set(left) == set(right):
            yield f"{path}: another order: {list(left)} {list(right)}"
    elif isinstance(left, list) and isinstance(right, list):
        if len(left) == len(right):
            for index, pair in enumerate(zip(left, right, strict=True)):
                yield from _parts(*pair, f"{path}[{index}]")
        elif all(isinstance(part, str) for part in [*left, *right]):
            yield f"{path}: {_line_differences(left, right)}"
        else:
            yield f"{path}: {len(left)} and {len(right)} parts"
    elif left != right:
        yield f"{path}: {_shortened(left)} became {_shortened(right)}"


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:300]}..."


def _operators(base: dict[int, list[str]], recorded: dict[int, list[str]]) -> Difference | None:
    if list(base.values()) == list(recorded.values()):
        return None
    left, right = _all(base.values()), _all(recorded.values())
    changed = _changed(left, right)
    return Difference("operators", len(changed), " ".join(changed[:SHOWN]) or "on other threads")


def _allocations(base: Blocks | None, recorded: Blocks | None) -> Difference | None:
    assert base is not None
    assert recorded is not None
    if base.live_before != recorded.live_before:
        raise AssertionError("the two runs did not begin in the same state")
    if list(base.sizes.values()) == list(recorded.sizes.values()) and base.peak == recorded.peak:
        return None
    changed = _changed(
        *([f"{size:+}" for size in _all(blocks.sizes.values())] for blocks in (base, recorded))
    )
    text = (
        f"peak {base.peak:,} became {recorded.peak:,} B, "
        f"at the end {base.live_after:,} became {recorded.live_after:,} B; "
        f"{len(changed)} entries: {' '.join(changed[:SHOWN])}"
    )
    return Difference("allocations", recorded.peak - base.peak, text)


def _all(rows: Any) -> list[Any]:
    return [part for row in rows for part in row]


def _changed(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Return the lines that only one side has, with - or + before them."""
    lines = list(unified_diff(left, right, n=0, lineterm=""))[2:]  # without the names of the two sides
    return [line for line in lines if not line.startswith("@@")]


def _line_differences(left: Sequence[str], right: Sequence[str]) -> str:
    return "; ".join(_changed(left, right)[:SHOWN])
