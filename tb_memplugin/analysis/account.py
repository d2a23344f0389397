"""The account of a recording: its live bytes beside those of a counter that is not its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import Cause, Counter, CounterReading, MemoryTrace, Moment
from tb_memplugin.trace.replay import frees_of_unknown, unreported_frees
from tb_memplugin.trace.tables import Int64

TOLERATED = 0.001
"""The share of the allocator's bytes by which a recording may differ from it before it is a warning."""

_PREFERENCE = (
    *(Counter.CALLS, Counter.ALLOCATED, Counter.REQUESTED, Counter.BLOCKS, Counter.OTHER, Counter.SEEN),
    Counter.SIMULATED,
)
"""Which counter of several is compared with a trace: the allocator's bytes come rounded or as requested, as
those of the trace, and a trace of requested bytes has no other."""

CAUSES = {
    Cause.OTHER: "for a reason that a newer version knows",
    Cause.FREED_UNKNOWN: "from before the window, freed in it",
    Cause.NOT_TRACED: "seen in use, not seen allocated",
    Cause.UNSEEN: "allocated or freed where the recorder does not see it",
    Cause.STILL_COUNTED: "perhaps freed earlier, without a report",
    Cause.FOREIGN: "in memory that the allocator did not allocate",
}
MOMENTS = {
    Moment.START: "at the window's start",
    Moment.PEAK: "at the peak",
    Moment.END: "at the window's end",
}

NOT_RECORDED = "not recorded: no counter was read, as in recordings of older versions"
SIMULATED = "simulated: there is no allocator to compare with"
NOT_KNOWN = (
    "not known: torch has no counter of these bytes "
    "(on Linux, TB_MEMPLUGIN_EXACT_CPU=1 counts those of the CPU)"
)
AT_LEAST = "not known: the counter began after the first tensors, and all that it counts is here"


AccountLevel = Literal["exact", "different", "not_known", "not_recorded", "simulated"]
"""How a recording agrees with the allocator; `exact` is within `TOLERATED` at all moments that are known."""


@dataclass(frozen=True, slots=True)
class Account:
    """A device's live bytes at one moment of a window, by the recording and by a counter.

    Attributes:
        moment: the moment. At the peak, each side has its own highest value.
        counted: the live bytes of the recording.
        counter: what counted the others.
        allocator: the live bytes by the counter, None if it knows only `causes`.
        at_least: whether `allocator` is a lower bound.
        causes: (cause, bytes) of known differences, positive where the recording has fewer.
    """

    moment: Moment
    counted: int
    counter: Counter
    allocator: int | None = None
    at_least: bool = False
    causes: tuple[tuple[Cause, int], ...] = ()

    @property
    def missing(self) -> int | None:
        """The bytes that the recording does not have, negative if it has too many; None if not known."""
        if self.allocator is None:
            return sum(size for cause, size in self.causes if cause is not Cause.FOREIGN) or None
        missing = self.allocator - self.own
        return None if self.at_least and missing <= 0 else missing

    @property
    def own(self) -> int:
        """The counted bytes without those that the allocator did not allocate."""
        return self.counted + sum(size for cause, size in self.causes if cause is Cause.FOREIGN)

    @property
    def is_bound(self) -> bool:
        """Whether the true difference may be larger than `missing`."""
        return self.at_least or self.allocator is None

    @property
    def total(self) -> int:
        """The allocator's bytes as far as they are known."""
        return self.allocator if self.allocator is not None else self.own + max(self.missing or 0, 0)

    @property
    def is_different(self) -> bool:
        """Whether more than `TOLERATED` of the allocator's bytes differ."""
        return abs(self.missing or 0) > TOLERATED * self.total


@dataclass(frozen=True, slots=True)
class AccountLine:
    """The account of a device in a line of text."""

    level: AccountLevel
    text: str


def accounts(trace: MemoryTrace, device: int) -> tuple[Account, ...]:
    """Return the accounts of a device, in the order of their moments; () if no counter was read."""
    own = [reading for reading in trace.counters if reading.device == device]
    own.sort(key=lambda reading: _PREFERENCE.index(reading.counter), reverse=True)
    best = {reading.moment: reading for reading in own}
    readings = [best[moment] for moment in sorted(best)]
    if not readings:
        return ()
    live = trace.live(device)
    event = {Moment.START: -1, Moment.PEAK: int(live.argmax()) - 1, Moment.END: len(live) - 2}
    blocks = trace.allocations
    frees = frees_of_unknown(trace.events, blocks)
    frees, reused = frees[trace.events.device[frees] == device], unreported_frees(trace.events, blocks)
    return tuple(
        Account(
            reading.moment,
            int(live[event[reading.moment] + 1]),
            reading.counter,
            reading.bytes,
            reading.at_least,
            _causes(trace, reading, event[reading.moment], frees, reused),
        )
        for reading in readings
    )


def _causes(
    trace: MemoryTrace, reading: CounterReading, event: int, frees: Int64, reused: Int64
) -> tuple[tuple[Cause, int], ...]:
    """Return the causes of a reading, with those that the trace itself shows for the state after an event.

    Args:
        frees: the reported frees on the reading's device of blocks that the trace never knew.
        reused: the rows of blocks whose address was allocated again without a reported free.
    """
    if reading.counter is Counter.SIMULATED:
        return reading.causes
    causes = dict(reading.causes)
    blocks = trace.allocations
    if size := int(trace.events.bytes[frees[frees > event]].sum()):
        causes[Cause.FREED_UNKNOWN] = causes.get(Cause.FREED_UNKNOWN, 0) + size
    if len(reused) and (
        size := int(blocks.bytes[np.intersect1d(blocks.alive_at(event, reading.device), reused)].sum())
    ):
        causes[Cause.STILL_COUNTED] = causes.get(Cause.STILL_COUNTED, 0) - size
    return tuple(causes.items())


def account_line(of_device: Sequence[Account]) -> AccountLine:
    """Return a device's account as a line: the moment with the largest difference, or what is not known."""
    if not of_device:
        return AccountLine("not_recorded", NOT_RECORDED)
    if all(account.counter is Counter.SIMULATED for account in of_device):
        return AccountLine("simulated", SIMULATED)
    comparable = [account for account in of_device if account.missing is not None]
    if not comparable:
        begun = any(account.counter is Counter.CALLS for account in of_device)
        return AccountLine("not_known", AT_LEAST if begun else NOT_KNOWN)
    worst = max(comparable, key=lambda account: abs(account.missing or 0) / max(account.total, 1))
    if worst.is_different:
        return AccountLine("different", _sentence(worst))
    exact = [account for account in comparable if not account.is_bound]
    if not exact:
        return AccountLine("not_known", f"{NOT_KNOWN}; {_sentence(worst)}")
    return AccountLine("exact", _sentence(worst) + _only(exact))


def _only(exact: Sequence[Account]) -> str:
    """Return at which moments the account is not known, if at any."""
    exact_moments = {account.moment for account in exact}
    unknown = [text for moment, text in MOMENTS.items() if moment not in exact_moments]
    return f"; its count {' and '.join(unknown)} is not known" if unknown else ""


def _sentence(account: Account) -> str:
    missing = account.missing or 0
    share = f"{'at most ' if account.is_bound and missing > 0 else ''}{_percent(account)} %"
    text = f"accounts for {share} of the allocator's bytes"
    if not missing:
        return text
    where = MOMENTS[account.moment]
    if missing > 0:
        least = "at least " if account.is_bound else ""
        text += f": {least}{size_text(missing)} missing {where}"
    elif account.is_bound:
        text = f"counts up to {size_text(-missing)} too much {where}"
    else:
        text += f": {size_text(-missing)} too much {where}"
    return f"{text}{_reasons(account, missing)}"


def _percent(account: Account) -> str:
    """Return which share of the allocator's bytes is counted: 100.00 only if it is all of them."""
    counted, total = account.own, account.total
    if counted == total:
        return "100.00"
    if not total:
        return "more than 100"
    share = int(np.floor(10_000 * counted / total))
    share = min(share, 9_999) if counted < total else max(share, 10_001)
    return f"{share / 100:,.2f}"


def _reasons(account: Account, missing: int) -> str:
    """Return the causes that go in the direction of the difference, and what of it they leave open."""
    causes = [
        (cause, size)
        for cause, size in account.causes
        if (size > 0) == (missing > 0) and cause is not Cause.FOREIGN
    ]
    reasons, rest = [], abs(missing)
    for cause, size in causes:
        part = min(abs(size), rest)  # some causes are upper bounds
        rest -= part
        reasons += [f"{size_text(part)} {CAUSES[cause]}"] if part else []
    if reasons and rest:
        reasons.append(f"{size_text(rest)} for no known reason")
    return f" ({'; '.join(reasons)})" if reasons else ""
