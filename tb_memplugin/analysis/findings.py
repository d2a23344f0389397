"""The results of the advice rules: findings with their evidence, and one judgement per rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tb_memplugin.trace.result import AnalysisResult

Level = Literal["problem", "option"]
Verdict = Literal["found", "fine", "not judged"]


@dataclass(frozen=True, slots=True)
class Where(AnalysisResult):
    """A view of the Memory tab and its state."""

    view: str
    """The name of the view."""
    state: tuple[tuple[str, str], ...] = ()
    """What is picked in it: the (key, value) pairs in its address."""


@dataclass(frozen=True, slots=True)
class Evidence(AnalysisResult):
    """A row of evidence."""

    what: str
    bytes: int
    """What has these bytes."""
    detail: str = ""
    """How often, for how long or when; may be ""."""
    name: bool = True
    """Whether `what` is a name from the user's program: a module, a line."""
    where: Where | None = None
    """The view that shows it, or None."""


@dataclass(frozen=True, slots=True)
class Finding(AnalysisResult):
    """A finding of a rule. [Advice](advice.md) explains what the bytes of each kind are."""

    kind: str
    """The rule."""
    level: Level
    """`problem`: memory is wasted; `option`: saving it has a price."""
    device: str
    """The name of the device."""
    step: int | None
    """The step concerned; None: the whole window."""
    title: str
    """A sentence that contains the names."""
    subject: str
    """The name within the title, or ""."""
    bytes: int
    """What could be saved, or is at stake."""
    measure: str
    """What these bytes are, in words: `less at the peak`, `more with every step`, ..."""
    of_bytes: int
    """What they are a part of: the peak, or the reserved bytes."""
    evidence: tuple[Evidence, ...]
    """The most important row first."""
    where: Where
    """The view that shows it."""
    what_to_do: str
    """What to change, in sentences."""
    price: str = ""
    """What the change costs; "" if nothing."""
    levels: tuple[int, ...] = ()
    """Of growth: live bytes at the bounds of the steps, or in each window; else empty."""


@dataclass(frozen=True, slots=True)
class Judgement(AnalysisResult):
    """The verdict of a rule on a device."""

    kind: str
    """The rule."""
    device: str
    """The name of the device."""
    verdict: Verdict
    """What came of it."""
    why: str
    """The reason, in a sentence."""


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
