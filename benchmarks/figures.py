"""One measured figure with its peer's value and its goal, and what a page of docs says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95

Claims = Mapping[tuple[str, str], tuple[str, str]]
"""By a figure's name and its peer's, what a page says of it: ours, and the ratio."""


@dataclass(frozen=True)
class Figure:
    """The values of each round, ours and those of a peer, if there is one.

    `what` and `peer_name` are also the words in the table of docs/performance.md. `limit` is the goal: the
    highest ratio of ours to the peer's or, without a peer, our highest value. `interval` is the 95 %
    confidence interval of the ratio, if it was measured: then the goal is met if a ratio up to the goal is
    in it.
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
    def between(self) -> tuple[float, float]:
        """The 95 % confidence interval of the ratio or, without a peer, of ours."""
        if self.interval is not None:
            return self.interval
        rounds = [a / b for a, b in zip(self.ours, self.peer, strict=True)] if self.peer else self.ours
        return median_interval(rounds)

    def contradicted(self, claims: Claims) -> str | None:
        """Return how a page says better than this figure, None if it does not, or says nothing of it."""
        cells = claims.get((self.what, self.peer_name)) or claims.get((self.what, ""))
        if cells is None:
            return None
        number = re.search(r"\d[\d,]*(?:\.(\d+))?", cells[1] if self.peer else cells[0])
        low, high = self.between
        if number is None or float(number[0].replace(",", "")) >= round(low, len(number[1] or "")):
            return None
        return f"{self.what}: the page says {number[0]}, measured were {low:.4g} to {high:.4g}"

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


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest two values, equally far from both ends, that have the median between them at 95 %.

    The median is below the k-th smallest of n values as often as fewer than k of n coins show heads. Of
    fewer than six values, the least and the largest are returned, which have it between them less often.
    """
    ordered, count = sorted(values), len(values)
    outside = 0
    while 2 * sum(comb(count, heads) for heads in range(outside + 2)) <= (1 - CONFIDENCE) * 2**count:
        outside += 1
    return ordered[outside], ordered[-1 - outside]


def claims_of(page: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return what the tables of a Markdown page say.

    In one with the columns what, ours, peer and ratio, each row is a figure. In any other, each cell is:
    the one named by its column and its row, "column: row", whatever its peer.
    """
    claims: dict[tuple[str, str], tuple[str, str]] = {}
    header: list[str] = []
    for line in page.replace("`", "").replace("*", "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not header or not cells:
            header = cells
        elif header[:4] == ["what", "ours", "peer", "ratio"]:
            claims[cells[0], cells[2].partition(":")[0].strip()] = (cells[1], cells[3])
        else:
            columns = zip(header[1:], cells[1:], strict=False)
            claims |= {(f"{column}: {cells[0]}", ""): (cell, cell) for column, cell in columns}
    return {key: cells for key, cells in claims.items() if any(re.search(r"\d", cell) for cell in cells)}
