"""Module calls from a log of crossings: who runs at a time, who owns an autograd node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64

Crossing = tuple[int, int, int, int]
"""(epoch ns, row of the entered module or -1 - row of the left one, sequence number, thread ident)."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The module calls of one thread: `row`, `start_ns`, `end_ns`, `depth`, `parent`, one row a call.

    Between two boundaries the innermost call is the same: `innermost[b]` is its row, -1 for none,
    from boundary b (at `boundary_ns[b]`, when the next autograd node was to be numbered
    `boundary_sequence[b]`) up to the next.
    """

    row: Int32
    start_ns: Int64
    end_ns: Int64
    depth: Int32
    boundary_ns: Int64
    boundary_sequence: Int64
    innermost: Int64

    def __len__(self) -> int:
        return len(self.row)

    def at(self, time_ns: Int64) -> Int64:
        """The innermost call running at each time, -1 for none."""
        return self._look_up(np.searchsorted(self.boundary_ns, time_ns, side="right") - 1)

    def owning(self, sequence: Int64) -> Int64:
        """The innermost call whose [enter, exit) holds each autograd sequence number, -1 for none."""
        found = np.searchsorted(self.boundary_sequence, sequence, side="right") - 1
        return np.where(sequence >= 0, self._look_up(found), -1)

    def module_of(self, call: Int64) -> Int64:
        """The module's row of each call, -1 where there is no call."""
        return np.where(call >= 0, np.append(self.row, -1)[call], -1).astype(np.int64)

    def _look_up(self, boundary: Int64) -> Int64:
        return np.where(boundary >= 0, np.append(self.innermost, -1)[boundary], -1).astype(np.int64)


def calls_from(log: Iterable[Crossing], end_ns: int) -> Calls:
    """Replay one thread's crossings; calls still open at `end_ns` end there."""
    row: list[int] = []
    start: list[int] = []
    end: list[int] = []
    depth: list[int] = []
    times: list[int] = []
    sequences: list[int] = []
    innermost: list[int] = []
    open_calls: list[int] = []
    for time_ns, entered, sequence, _ in log:
        if entered >= 0:
            depth.append(len(open_calls))
            open_calls.append(len(row))
            row.append(entered)
            start.append(time_ns)
            end.append(end_ns)
        else:
            if not any(row[call] == -1 - entered for call in reversed(open_calls)):
                continue  # entered before the window began
            while open_calls:
                call = open_calls.pop()
                end[call] = time_ns
                if row[call] == -1 - entered:
                    break
        times.append(time_ns)
        sequences.append(sequence)
        innermost.append(open_calls[-1] if open_calls else -1)
    return Calls(
        np.array(row, np.int32),
        np.array(start, np.int64),
        np.array(end, np.int64),
        np.array(depth, np.int32),
        np.array(times, np.int64),
        np.maximum.accumulate(np.array(sequences, np.int64)) if sequences else np.empty(0, np.int64),
        np.array(innermost, np.int64),
    )


def by_thread(log: Sequence[Crossing], first_thread: int) -> dict[int, list[Crossing]]:
    """The crossings of each thread ident; `first_thread` is always there."""
    threads: dict[int, list[Crossing]] = {first_thread: []}
    for crossing in log:
        threads.setdefault(crossing[3], []).append(crossing)
    return threads


def crossings_from_spans(row: Sequence[int], start_ns: Int64, end_ns: Int64) -> list[Crossing]:
    """A log as the hooks would have written it, from spans that nest (sequence numbers unknown: 0)."""
    marks = [
        (int(start), 1, -int(end), module) for module, start, end in zip(row, start_ns, end_ns, strict=True)
    ]
    marks += [
        (int(end), 0, -int(start), -1 - module)
        for module, start, end in zip(row, start_ns, end_ns, strict=True)
    ]
    return [(time, module, 0, 0) for time, _, _, module in sorted(marks)]
