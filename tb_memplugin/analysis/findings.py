"""The results of the advice rules: findings with their evidence, and one judgement per rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tb_memplugin.trace.result import AnalysisResult

Level = Literal["problem", "option"]
Verdict = Literal["found", "fine", "not judged"]


@dataclass(frozen=True, slots=True)
class Where(AnalysisResult):
    """A link to a view of the Memory tab; `state` are the (key, value) pairs in its address."""

    view: str
    state: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence(AnalysisResult):
    """One row of evidence: `what` holds `bytes`. `detail` adds how often, for how long, or when.

    `name` is True if `what` is a name from the user's program (a module, a line), False if it is our text.
    """

    what: str
    bytes: int
    detail: str = ""
    name: bool = True
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class Finding(AnalysisResult):
    """One thing to act on. docs/advice.md explains what the bytes of each kind are.

    Attributes:
        kind: the rule that found it, a key of `advice.RULES`.
        level: "problem" if the memory is wasted; "option" if saving it has a price.
        device: a device's name.
        step: the number of the step concerned; None if it concerns the whole window.
        title: a sentence that contains the names.
        subject: the name within the title, "" if it has none.
        bytes: the bytes that could be saved, or that are at stake.
        measure: what `bytes` counts: "more with every step", "less at the peak", ...
        of_bytes: the total of which `bytes` is a share: the peak, or the reserved bytes.
        evidence: rows of evidence, the most important first.
        where: the view that shows it.
        what_to_do: what to change, in a few sentences.
        price: what the change costs, "" if nothing.
        levels: live bytes at the bounds of the steps, or in each window, for growth; else empty.
    """

    kind: str
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
class Judgement(AnalysisResult):
    """The verdict of a rule on a device; `why` gives the reason in a sentence."""

    kind: str
    device: str
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Fine:
    """The result of a rule that found nothing; `why` says in a sentence what it saw."""

    why: str


@dataclass(frozen=True, slots=True)
class NotJudged:
    """The result of a rule that needs more than the trace records; `why` says what is missing."""

    why: str


Result = Finding | Fine | NotJudged


def share(part: int, total: int) -> str:
    """Return a part of a whole as a percentage: "12.3 %"."""
    return f"{100 * part / total:.1f} %" if total else "0.0 %"
