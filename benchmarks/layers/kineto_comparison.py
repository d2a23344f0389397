"""The tables on Kineto traces: what is read from one, beside what our handler knew of the same window."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from benchmarks.layers.comparison import Shares
from tb_memplugin.loading import load
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.tables import Bool, Int64, TensorMetadata

COLUMNS = (
    "category",
    "category at the peak",
    "module",
    "module at the peak",
    "tensor",
    "tensor at the peak",
    "alive before",
)


@dataclass(frozen=True)
class Pair:
    """The same blocks in two traces, by their row in `allocations`: read from a file, and recorded by us."""

    read: MemoryTrace
    known: MemoryTrace
    read_rows: Int64
    known_rows: Int64

    @property
    def bytes(self) -> Int64:
        return self.read.allocations.bytes[self.read_rows]


def compare(folder: Path, chosen: list[str]) -> None:
    """Print a table for each set of flags, and the largest confusions of categories."""
    files = sorted(folder.glob("*.json.gz"))
    for flags in sorted({path.name.split(".")[1] for path in files}):
        rows: list[list[Shares]] = []
        confused: Counter[tuple[str, str]] = Counter()
        print(f"\n{flags}\n\n| program | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|")
        for path in files:
            name, of_file, *_ = path.name.split(".")
            if of_file == flags and (not chosen or name in chosen):
                pair = paired(load(path), load(path.with_name(f"{name}.{flags}.mem")))
                rows.append(list(shares_of(pair)))
                confused += confusions(pair)
                print(f"| {name} | {' | '.join(shares.text() for shares in rows[-1])} |", flush=True)
        print(f"| **median** | {' | '.join(map(_median, zip(*rows, strict=True)))} |")
        print("\nlargest confusions (read, known, bytes):", confused.most_common(14))


def paired(read: MemoryTrace, known: MemoryTrace) -> Pair:
    """Match the allocations of two traces of one window by time, address and size."""
    columns = [{key: row for row, key in _allocations(trace)} for trace in (read, known)]
    both = [key for key in columns[0] if key in columns[1]]
    return Pair(
        read,
        known,
        np.array([columns[0][key] for key in both], np.int64),
        np.array([columns[1][key] for key in both], np.int64),
    )


def _allocations(trace: MemoryTrace) -> Iterator[tuple[int, tuple[int, int, int]]]:
    blocks, events = trace.allocations, trace.events
    rows = np.flatnonzero(blocks.born >= 0)
    born = blocks.born[rows]
    columns = events.time_ns[born], events.address[born], events.bytes[born]
    yield from zip(rows.tolist(), zip(*(column.tolist() for column in columns), strict=True), strict=True)


def shares_of(pair: Pair) -> Iterator[Shares]:
    """Yield the shares of each column of the table."""
    device = int(np.argmax([pair.read.live(row).max() for row in range(len(pair.read.devices))]))
    moment = int(np.argmax(pair.read.live(device))) - 1
    at_peak = np.isin(pair.read_rows, np.flatnonzero(pair.read.allocations.alive_at(moment, device)))
    for judge in (category, module, tensor):
        right, wrong = judge(pair)
        for rows in (np.ones(len(at_peak), bool), at_peak):
            size = pair.bytes[rows]
            yield Shares(int(size.sum()), int(size[right[rows]].sum()), int(size[wrong[rows]].sum()))
    yield alive_before(pair, device, moment)


def alive_before(pair: Pair, device: int, moment: int) -> Shares:
    """Compare the bytes of each category that were alive before the window, of those alive at a moment."""
    read, known = (_start_bytes(trace, device, moment) for trace in (pair.read, pair.known))
    del read[Category.UNKNOWN]
    right = sum(min(size, known[category]) for category, size in read.items())
    return Shares(sum(known.values()), right, sum(read.values()) - right)


def _start_bytes(trace: MemoryTrace, device: int, moment: int) -> Counter[int]:
    blocks = trace.allocations
    rows = blocks.alive_at(moment, device)
    count: Counter[int] = Counter()
    for row in rows[blocks.born[rows] < 0].tolist():
        count[int(blocks.category[row])] += int(blocks.bytes[row])
    return count


Judged = tuple[Bool, Bool]
"""Which blocks have the right answer, and which a wrong one."""


def category(pair: Pair) -> Judged:
    read = pair.read.allocations.category[pair.read_rows]
    known = pair.known.allocations.category[pair.known_rows]
    is_named = read != Category.UNKNOWN
    return is_named & (read == known), is_named & (read != known)


def confusions(pair: Pair) -> Counter[tuple[str, str]]:
    read = pair.read.allocations.category[pair.read_rows]
    known = pair.known.allocations.category[pair.known_rows]
    count: Counter[tuple[str, str]] = Counter()
    for mine, true, size in zip(read.tolist(), known.tolist(), pair.bytes.tolist(), strict=True):
        if mine != true:
            count[Category(mine).key, Category(true).key] += size
    return count


def module(pair: Pair) -> Judged:
    """A name such as `Linear_3` stands for the module that fits it best, each for one.

    A module that the model does not have, such as a loss made in a forward, stands for the one around it.
    """
    rows = pair.read.allocations.module[pair.read_rows].tolist()
    known = pair.known.allocations.module[pair.known_rows].tolist()
    truths = [_key(pair.known, row) for row in known]
    overlap: Counter[tuple[int, str]] = Counter()
    for row, truth, size in zip(rows, truths, pair.bytes.tolist(), strict=True):
        if _key(pair.read, row) is not None and truth is not None:
            overlap[row, truth] += size
    fqn: dict[int, str] = {}
    for (row, truth), _ in overlap.most_common():
        if row not in fqn and truth not in fqn.values():
            fqn[row] = truth
    for row, one in enumerate(pair.read.modules):  # parents come first
        if row not in fqn and one.parent in fqn:
            fqn[row] = fqn[one.parent]
    named = np.array([_key(pair.read, row) is not None for row in rows])
    right = named & np.array([fqn.get(row) == truth for row, truth in zip(rows, truths, strict=True)])
    return right, named & ~right


def _key(trace: MemoryTrace, row: int) -> str | None:
    return trace.modules[row].key if row >= 0 and trace.modules[row].is_module else None


def tensor(pair: Pair) -> Judged:
    """Dtype and number of elements, where both have a tensor.

    The shapes may differ: a profile in process has the view that a later operator received.
    """
    read, known = pair.read.allocations.tensor[pair.read_rows], pair.known.allocations.tensor[pair.known_rows]
    both = (read >= 0) & (known >= 0)
    mine = [_elements(pair.read.tensors[row]) if row >= 0 else None for row in read.tolist()]
    true = [_elements(pair.known.tensors[row]) if row >= 0 else None for row in known.tolist()]
    same = np.array([one == other for one, other in zip(mine, true, strict=True)], bool)
    return both & same, both & ~same


def _elements(tensor: TensorMetadata) -> tuple[str, int]:
    return tensor.dtype, prod(tensor.shape)


def _median(column: tuple[Shares, ...]) -> str:
    filled = [shares for shares in column if shares.total]
    if not filled:
        return "–"
    right, wrong = ([getattr(s, key) / s.total for s in filled] for key in ("right", "wrong"))
    return f"{statistics.median(right):.3f} / {statistics.median(wrong):.3f} (worst wrong {max(wrong):.3f})"
