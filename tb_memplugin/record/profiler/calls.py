"""Module calls from a log of crossings: which call runs at a time, and which made an autograd node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.record.modules import Crossing
from tb_memplugin.trace.tables import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class Calls:
    """The module calls of one thread: the columns `row`, `start_ns`, `end_ns` and `depth`, one row per call.

    A boundary is the start or end of a call; between two boundaries the innermost call is the same.
    `innermost[b]` is the index of that call from boundary b up to the next, -1 for none. Boundary b is at
    `boundary_ns[b]`; the next autograd node made after it gets the number `boundary_sequence[b]`.
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
        """Return the innermost call that runs at each time, -1 for none."""
        return self._look_up(np.searchsorted(self.boundary_ns, time_ns, side="right") - 1)

    def owning(self, sequence: Int64) -> Int64:
        """Return the innermost call during which each autograd sequence number was given, -1 for none."""
        return self._look_up(np.searchsorted(self.boundary_sequence, sequence, side="right") - 1)

    def module_of(self, call: Int64) -> Int64:
        """Return the module's row of each call, -1 for no call (-1)."""
        return np.append(self.row, -1).astype(np.int64)[call]

    def made_nodes(self, call: Int64) -> Bool:
        """Return whether the thread made autograd nodes during each call; also where its end is not known."""
        if not len(call):
            return np.zeros(0, bool)
        begin = np.searchsorted(self.boundary_ns, self.start_ns[call], side="left")
        end = np.searchsorted(self.boundary_ns, self.end_ns[call], side="right") - 1
        unended: Bool = self.boundary_ns[end] < self.end_ns[call]
        return unended | (self.boundary_sequence[end] > self.boundary_sequence[begin])

    def _look_up(self, boundary: Int64) -> Int64:
        return np.append(self.innermost, -1)[boundary]  # -1, for before the first, takes the last


def calls_from(log: Iterable[Crossing], end_ns: int) -> Calls:
    """Return the calls in one thread's crossings; calls that are still open end at `end_ns`."""
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
            left = -1 - entered
            if left not in (row[call] for call in reversed(open_calls)):
                continue  # entered before the window began
            while open_calls:
                call = open_calls.pop()
                end[call] = time_ns
                if row[call] == left:
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
    """Return the crossings by thread ident; `first_thread` always has an entry."""
    threads: dict[int, list[Crossing]] = {first_thread: []}
    for crossing in log:
        threads.setdefault(crossing[3], []).append(crossing)
    return threads


def crossings_from_spans(row: Sequence[int], start_ns: Int64, end_ns: Int64) -> list[Crossing]:
    """Return nested spans as a log like the hooks write it, with sequence number 0 (not known)."""
    marks = [
        (int(start), 1, -int(end), module) for module, start, end in zip(row, start_ns, end_ns, strict=True)
    ]
    marks += [
        (int(end), 0, -int(start), -1 - module)
        for module, start, end in zip(row, start_ns, end_ns, strict=True)
    ]
    return [(time, module, 0, 0) for time, _, _, module in sorted(marks)]
