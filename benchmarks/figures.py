"""One measured figure with its peer's value and its goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Figure:
    """The values of each round, ours and those of a peer, if there is one.

    `limit` is the goal: the highest ratio of ours to the peer's or, without a peer, our highest value.
    `interval` is the 95 % confidence interval of the ratio, if it was measured: then the goal is met if a
    ratio up to the goal is in it.
    """

    what: str
    unit: str
    ours: Sequence[float]
    limit: float | None = None
    peer: Sequence[float] = ()
    peer_name: str = ""
    interval: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios; None without a peer."""
        return median(a / b for a, b in zip(self.ours, self.peer, strict=True)) if self.peer else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.limit is None:
            return None
        if self.interval is not None:
            return self.interval[0] <= self.limit
        return (median(self.ours) if self.ratio is None else self.ratio) <= self.limit

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table row: what, ours, peer, the peer's name, ratio, goal, met."""
        ratio, goal = self.ratio, "" if self.limit is None else f"≤ {self.limit:.4g}"
        between = "" if self.interval is None else "\n{:.3f} to {:.3f}".format(*self.interval)
        return (
            self.what,
            _shown(median(self.ours), self.unit),
            _shown(median(self.peer), self.unit) if self.peer else "",
            self.peer_name,
            "" if ratio is None else f"{ratio:.3f}{between}",
            goal + (f" {self.unit}" if goal and ratio is None else ""),
            {True: "yes", False: "NO", None: ""}[self.met],
        )


def _shown(value: float, unit: str) -> str:
    return f"{value:,.{1 if value >= 10 else 2}f} {unit}".rstrip()
