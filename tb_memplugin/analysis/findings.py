"""What advice is made of: findings with their evidence, and what every rule came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tb_memplugin.analysis.units import size_told

FindingKind = Literal[
    "growth", "kept_gradients", "unused_reserve", "checkpointing", "optimizer_state", "large_temporary"
]
Level = Literal["problem", "option"]


@dataclass(frozen=True, slots=True)
class Where:
    """What shows it: a view of the Memory tab, and the state in its address, as (key, value) pairs."""

    view: str
    state: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """One row of evidence: what holds how many bytes. `detail` says the rest: how often, how long, when.

    `name` is True where `what` is a name from outside (a module, a line), not a word of ours.
    """

    what: str
    bytes: int
    detail: str = ""
    name: bool = True
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to act on. See docs/advice.md for what each kind's bytes are.

    Attributes:
        kind: the rule that found it.
        level: "problem" costs memory for nothing; "option" is memory to be had at a price.
        device: a device's name.
        step: the number of the step that it is about; None where it is about the window.
        title: a sentence with the names in it.
        subject: the name within the title, "" where it has none.
        bytes: what one would get back, or what is at stake.
        measure: what they are: "a step", "less at the peak", ...
        of_bytes: what they are a part of, for a share: the peak, or the reserve.
        evidence: rows, the weightiest first.
        where: the view that shows it.
        what_to_do: one sentence.
        price: what doing so costs, "" where nothing.
        levels: live bytes at each step's bounds, for growth; else empty.
    """

    kind: FindingKind
    level: Level
    device: str
    step: int | None
    title: str
    subject: str
    bytes: int
    measure: str
    of_bytes: int
    evidence: tuple[Evidence, ...]
    where: Where
    what_to_do: str
    price: str = ""
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule came to on a device: "found", "fine", or "not judged", and why, as a sentence."""

    kind: FindingKind
    device: str
    verdict: Literal["found", "fine", "not judged"]
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """All findings, problems first, then by bytes; and one judgement for every rule on every device."""

    findings: tuple[Finding, ...]
    judgements: tuple[Judgement, ...]


@dataclass(frozen=True, slots=True)
class Fine:
    """A rule looked and found nothing: what it saw, as a sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class NotJudged:
    """The trace does not record what a rule needs: what is missing, as a sentence."""

    why: str


Result = Finding | Fine | NotJudged


def in_words(size: float) -> str:
    """Bytes as people say them: "13.25 MiB"; the rule is that of all units."""
    return size_told(size)


def share(part: int, whole: int) -> str:
    """A part of a whole: "12.3 %"."""
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"
