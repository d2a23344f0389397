"""The options that limit a command to a range of events."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tb_memplugin.analysis.moments import events_between
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.trace import MemoryTrace

if TYPE_CHECKING:
    from tb_memplugin.analysis.allocations import Action


_TIME = re.compile(r"(?P<us>\d{1,16})|(?P<s>\d{1,9}(?:\.\d{1,9})?)s")


@dataclass(frozen=True, slots=True)
class Range:
    """The values of the options; see their help."""

    start: str | None = None
    end: str | None = None
    until: str | None = None
    action: Action = "alloc"

    @property
    def is_whole(self) -> bool:
        """Whether none of the options was given."""
        return self.start is None and self.end is None and self.until is None

    def events(self, trace: MemoryTrace, device: str | None = None) -> tuple[int, int]:
        """Return the first and the last event of the range.

        Raises:
            MemPluginError: a text is no time, or no allocation.
            NotRecordedError: nothing was recorded in the range.
        """
        if (self.start or self.end) and not trace.times_are_known:
            raise NotRecordedError(
                "This recording has no times: a snapshot has them since PyTorch 2.2.",
                where=trace.source,
                fix="Give an allocation with --until.",
            )
        first, last = events_between(
            trace, _nanoseconds(trace, self.start, "--start"), _nanoseconds(trace, self.end, "--end", 999)
        )
        if self.until is not None:
            from tb_memplugin.analysis.allocations import read_allocation, usage

            address, version = read_allocation(self.until)
            event = usage(trace, address, version, self.action, device).event
            if event < first:
                raise MemPluginError(
                    "This allocation is before the start of the range.",
                    where=f"--until {self.until}",
                    fix="Leave --start out.",
                )
            last = min(last, event)
        return first, last


def range_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for a range to a command, which receives them as `within`."""

    @functools.wraps(command)
    def with_range(
        *args: Any, start: str | None, end: str | None, until: str | None, action: Action, **options: Any
    ) -> None:
        command(*args, within=Range(start, end, until, action), **options)

    options = (
        click.option(
            "--start",
            metavar="TIME",
            help=(
                "Begin at this time: microseconds, like time_us in a snapshot, or seconds after the first "
                "event, like 1.5s."
            ),
        ),
        click.option("--end", metavar="TIME", help="End at this time."),
        click.option(
            "--until",
            metavar="ADDR[_VERSION]",
            help="End with this allocation; see the command usage for its form.",
        ),
        click.option(
            "--action",
            type=click.Choice(["alloc", "free"]),
            default="alloc",
            show_default=True,
            help="With --until: end with the allocation, or with its free.",
        ),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_range)


def _nanoseconds(trace: MemoryTrace, text: str | None, option: str, within_us: int = 0) -> int | None:
    """Return a time in epoch nanoseconds; a number of microseconds gets `within_us` nanoseconds more."""
    if text is None:
        return None
    parts = _TIME.fullmatch(text.strip())
    if parts is None:
        raise MemPluginError(
            f"{text[:80]!r} is not a time.",
            where=option,
            fix="Give microseconds, like time_us in a snapshot, or seconds after the first event, like 1.5s.",
        )
    if parts["us"]:
        return int(parts["us"]) * 1_000 + within_us
    first = int(trace.events.time_ns[0]) if len(trace.events) else 0
    seconds, _, decimals = parts["s"].partition(".")
    return first + int(seconds) * 1_000_000_000 + int(f"{decimals:0<9}")
