"""Pickles that differ in bytes or tokens from a snapshot's, each read as columns and by `pickle`.

Run `python -m tests.read.snapshot.columns.mutants COUNT [SEED] [FILE]` for many.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.snapshot.columns.rest import read_columns
from tb_memplugin.read.snapshot.entries import FIELDS, EntryColumns
from tests.mutations.damage import bytes_damaged
from tests.snapshots import load_plain

PROTOCOLS = (2, 3, 4, 5)
KINDS = (0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8)
OPCODES = b"}](euast)N\x85\x86\x87\x88\x8902lq\x94dbRcQ\x8f\x90."


def entry_rows(count: int, begin: int = 0) -> Iterator[dict[str, Any]]:
    """Yield entries as PyTorch writes them: new texts, pairs and lists, shared names and frames."""
    frames = [{"name": f"f{row}", "filename": f"/a/{row % 3}.py", "line": row * 40} for row in range(20)]
    actions = ("alloc", "free_requested", "free_completed", "segment_alloc")
    stack: list[dict[str, Any]] = []
    empty, known = "", [list(frames[row : row + 7]) for row in range(6)]
    for row in range(begin, begin + count):
        if row % 3 == 0:
            stack = [frames[(row * 7 + place) % 20] for place in range(row % 9)]
        place = {"device_free": row << 20} if row % 97 == 50 else {"addr": (0x7F00 << 32) + row * 512}
        yield {
            "action": "oom" if row % 97 == 50 else actions[row % 4],
            **place,
            "size": 200 if row % 5 else row * 70_000,
            "stream": 0 if row % 11 else 0x5500_0000_0000 + row % 2,
            "time_us": 1_790_000_000_000_000 + row * 3,
            "compile_context": "".join(["N", "/", "A"]),
            "user_metadata": empty if row % 13 else "".join(["label ", str(row % 39)]),
            "pool_id": (row % 2, 0 * row),
            "frames": known[row % 6] if row % 17 == 0 else stack,
        }


def example(count: int = 300) -> dict[str, Any]:
    """Return a snapshot of two devices."""
    return {
        "segments": [],
        "device_traces": [list(entry_rows(count)), list(entry_rows(count // 3, count))],
        "allocator_settings": {"a": "b"},
        "external_annotations": [],
    }


def fault(raw: bytes) -> str | None:
    """Return how the columns of a pickle differ from what `pickle` reads; None if they do not.

    "left" if they were left to the safe reader.
    """
    columns = read_columns(io.BytesIO(raw), "a pickle", least_bytes=0)
    if columns is None:
        return "left"
    try:
        plain: Any = load_plain(raw, "a pickle")
    except UnreadableFileError as error:
        return f"pickle refuses: {error.what}"
    try:
        return difference(columns, plain)
    except RecursionError:
        return None  # it contains itself


def difference(columns: dict[str, Any], plain: Any) -> str | None:
    """Return where columns differ from the object that `pickle` reads; None if nowhere."""
    if list(columns) != list(plain) or len(columns["device_traces"]) != len(plain["device_traces"]):
        return "keys or devices"
    for key in columns:
        if key != "device_traces" and columns[key] != plain[key]:
            return key
    for ours, theirs in zip(columns["device_traces"], plain["device_traces"], strict=True):
        if not isinstance(ours, EntryColumns):
            if ours != theirs:
                return "a trace without runs"
            continue
        for field in FIELDS:
            column = ours.column(field)
            read = column.each()
            if list(read) != [entry.get(field) for entry in theirs] or (
                column.index is not None and len(set(column.index.tolist())) != len(column.values)
            ):
                return field
    return None


def tokens_of(raw: bytes) -> list[bytes]:
    """Return a pickle's tokens without frames."""
    places = [(opcode.name, at) for opcode, _, at in pickletools.genops(raw)]
    ends = [*(at for _, at in places[1:]), len(raw)]
    return [raw[at:end] for (name, at), end in zip(places, ends, strict=True) if name != "FRAME"]


def token_mutant(source: random.Random, tokens: list[bytes]) -> bytes:
    """Return a pickle with some tokens replaced, removed, doubled, exchanged or added."""
    new = list(tokens)
    gets = [at for at, token in enumerate(new) if token[:1] in (b"h", b"j")]
    for _ in range(source.choice((1, 1, 2, 3))):
        at, other = source.randrange(1, len(new)), source.randrange(1, len(new))
        kind = source.choice(KINDS)
        if kind == 0:
            new[at : at + 1] = []
        elif kind == 1:
            new[at:at] = [bytes([source.choice(OPCODES)])]
        elif kind == 2:
            length = source.choice((1, 2, 20, 60))
            new[at:at] = new[other : other + length]
        elif kind == 3:
            new[at], new[other] = new[other], new[at]
        elif kind == 4:
            new[at % len(new)] = b"j" + source.randrange(4000).to_bytes(4, "little")
        elif kind == 5:  # another object
            new[source.choice(gets) % len(new)] = new[source.choice(gets) % len(new)]
        elif kind == 6:  # a list that is shared gets one more frame
            number = b"j" + source.randrange(4000).to_bytes(4, "little")
            new[at:at] = [number, b"(", new[source.choice(gets) % len(new)], b"e"]
        elif kind == 7:  # a dict that is shared gets another value
            number = b"j" + source.randrange(4000).to_bytes(4, "little")
            new[at:at] = [number, b"(", new[gets[0] % len(new)], b"K\x05", b"u"]
        else:  # an object is pushed and popped
            new[at:at] = [b"j" + source.randrange(4000).to_bytes(4, "little"), b"0"]
    return b"".join(new)


def framed(raw: bytes) -> bytes:
    """Return a pickle with what follows its first two bytes in frames as Python writes them, cut anywhere."""
    parts = [raw[at : at + 5000] for at in range(2, len(raw), 5000)]
    return raw[:2] + b"".join(b"\x95" + len(part).to_bytes(8, "little") + part for part in parts)


def mutants(source: random.Random, raw: bytes, count: int) -> Iterator[bytes]:
    """Yield different pickles."""
    tokens = tokens_of(raw)
    for row in range(count):
        if row % 3 == 0:
            yield bytes_damaged(raw, source)
        else:
            mutant = token_mutant(source, tokens)
            yield framed(mutant) if row % 12 == 1 and raw[1] >= 4 else mutant


def main(count: int, seed: int, path: str | None) -> int:
    """Print how many mutants were read as columns, left to the safe reader, and wrong."""
    source, ends = random.Random(seed), Counter[str]()
    for protocol in PROTOCOLS:
        content = example() if path is None else load_plain(Path(path).read_bytes(), path)
        for mutant in mutants(source, pickle.dumps(content, protocol), count // len(PROTOCOLS)):
            end = fault(mutant) or "equal"
            ends[end] += 1
            if end not in ("equal", "left"):
                Path(f"/tmp/mutant-{sum(ends.values())}.pickle").write_bytes(mutant)
    sys.stdout.write(f"{dict(ends)}\n")
    return len(ends.keys() - {"equal", "left"})


if __name__ == "__main__":
    told = sys.argv[1:]
    sys.exit(main(int(told[0]), int(told[1]) if len(told) > 1 else 0, told[2] if len(told) > 2 else None))
