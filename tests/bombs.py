"""Small files that would fill the memory or take hours, each by another way.

`python -m tests.bombs [NAME or FILE…]` reads each in a child process and prints the peak of its memory above
its start, its computing time and what it says. With `--untrusted` it reads them with
`load(..., untrusted=True)`.
"""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tb_memplugin.proto.recording_pb2 import Chunk, Column, DeviceInfo, Footer, Names, StepInfo
from tb_memplugin.store.columns import BLOCK_ROWS
from tb_memplugin.store.envelope import EnvelopeWriter
from tb_memplugin.store.windows import DTYPES
from tests.snapshots import block, entries, segment

MB = 1_000_000
MOST_BYTES = 6 << 30
"""What a child may allocate: a bomb that is not refused ends there, not in the machine's memory."""

ENTRY = entries("alloc 4096 1")[0]
MARK = {"name": "n" * 4000, "stage": "START", "device": 0, "time_us": 1}


def unpacked(pattern: bytes, count: int, begin: bytes = b"[", end: bytes = b"1]") -> bytes:
    """Return a gzip file of `begin`, about `count` patterns and `end`, in members of a megabyte."""
    each = MB // len(pattern)
    return gzip.compress(begin) + gzip.compress(pattern * each) * (count // each) + gzip.compress(end)


def shared_rows(key: str, count: int) -> bytes:
    """Return a pickle in which `count` rows of a snapshot's field are one list of `count` entries."""
    return pickle.dumps({"segments": [], key: [[ENTRY] * count] * count}, protocol=4)


def wide_segment(keys: int, count: int) -> bytes:
    """Return a pickle whose host segments are one segment with very many keys, very often."""
    wide = {**segment(block(4096, 1)), **{str(key): 0 for key in range(keys)}}
    return pickle.dumps({"segments": [], "host_segments": [wide] * count}, protocol=4)


def constant_columns(rows: int = 1 << 20) -> bytes:
    """Return a side file whose columns all have as many rows as a small file may have, and no bytes."""
    stream = io.BytesIO()
    envelope = EnvelopeWriter(stream)
    absent = {"operator", "module", "label", "stack", "forward", "stream", "pool", "context", "tensor"}
    columns = [
        Column(
            name=name,
            rows=rows,
            chunks=[
                Chunk(rows=BLOCK_ROWS, base=(1 << 64) - 1 if name.partition(".")[2] in absent else 0)
                for _ in range(rows // BLOCK_ROWS)
            ],
        )
        for name in DTYPES
    ]
    names = Names(module_keys=[b"m"], module_parents=[-1], module_classes=[b"c"], annotation_names=[b"a"])
    chunk = envelope.add(Chunk(), names.SerializeToString())
    step, device = StepInfo(number=0, start_ns=0, end_ns=10), DeviceInfo(name=b"cuda:0")
    envelope.finish(Footer(devices=[device], steps=[step], columns=columns, names=chunk))
    return stream.getvalue()


BOMBS: dict[str, Callable[[], bytes]] = {
    "gzip of empty lists": lambda: unpacked(b"[],", 500 * MB),
    "gzip of empty objects": lambda: unpacked(b"{},", 500 * MB),
    "gzip of objects": lambda: unpacked(b'{"":0},', 200 * MB),
    "gzip of numbers": lambda: unpacked(b"1234567,", 180 * MB),
    "gzip of texts": lambda: unpacked(b'"ab",', 300 * MB),
    "gzip of blanks": lambda: unpacked(b" ", 1500 * MB),
    "gzip of a wide text": lambda: unpacked(b"a", 1500 * MB, '["\U0001f600'.encode(), b'"]'),
    "gzip of brackets": lambda: unpacked(b"[", 1500 * MB),
    "gzip of sets": lambda: unpacked(b"\x8f", 1000 * MB, b"\x80\x04", b"."),
    "gzip of Nones": lambda: unpacked(b"N0", 500 * MB, b"\x80\x04", b"N."),
    "gzip in gzip": lambda: gzip.compress(unpacked(b"[],", 500 * MB)),
    "empty lists": lambda: b"[" + b"[]," * (20 * MB) + b"1]",
    "as many lists as are allowed": lambda: b"[" + b"[]," * (10 * MB) + b"1]",
    "as many objects as are allowed": lambda: b"[" + b'{"":0},' * (4 * MB) + b"1]",
    "different keys": lambda: b"{" + b",".join(b'"%x":0' % key for key in range(5 * MB)) + b"}",
    "objects": lambda: b"[" + b'{"":[]},' * (8 * MB) + b"1]",
    "blanks": lambda: b"[" + b" " * (200 * MB) + b"1]",
    "key and key": lambda: b"{" + b'"":[],' * (10 * MB) + b'"":1}',
    "pickle of sets": lambda: b"\x80\x04" + b"\x8f" * (8 * MB) + b".",
    "pickle of dicts": lambda: b"\x80\x04]" + b"}a" * (20 * MB) + b".",
    "pickle of memo": lambda: b"\x80\x04]" + b"\x94" * (30 * MB) + b".",
    "pickle of doubled": lambda: b"\x80\x04](N" + b"2" * (30 * MB) + b"e.",
    "pickle of a huge number": lambda: (
        b"\x80\x02\x8b" + struct.pack("<i", 20 * MB) + b"\x7f" * (20 * MB) + b"."
    ),
    "pickle of a lying number": lambda: b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x7f" * 1000,
    "pickle of a lying text": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"a" * 1000,
    "pickle of lying bytes": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b"a" * 1000,
    "pickle of a digit line": lambda: b"L" + b"9" * (30 * MB) + b"L\n.",
    "pickle of shared pinned entries": lambda: shared_rows("host_traces", 700_000),
    "pickle of shared device entries": lambda: shared_rows("device_traces", 700_000),
    "pickle of copied pinned segments": lambda: wide_segment(100_000, 700_000),
    "pickle of shared segments": lambda: pickle.dumps([segment(*[block(4096, 1)] * 700_000)] * 700_000, 4),
    "pickle of shared blocks": lambda: pickle.dumps([segment(*[block(4096, 1)] * 1_500_000)], 4),
    "pickle of shared annotations": lambda: pickle.dumps(
        {"segments": [], "external_annotations": [MARK] * 1_500_000}, 4
    ),
    "side file of constant columns": constant_columns,
    "side file of more rows": lambda: constant_columns(1 << 22),
    "zip": lambda: b"PK\x03\x04" + b"\0" * 1000,
    "zstandard": lambda: b"\x28\xb5\x2f\xfd" + b"\0" * 1000,
}

_READ = """
import resource, sys, re, time
from tb_memplugin import MemPluginError, load
import tb_memplugin.loading
def status(name):
    return int(re.search(name + r":\\s+([0-9]+)", open("/proc/self/status").read())[1]) << 10
begin = status("VmRSS")
resource.setrlimit(resource.RLIMIT_DATA, (MOST + status("VmData"), resource.RLIM_INFINITY))
told = "read"
try:
    load(sys.argv[1], **OPTIONS)
except MemPluginError as error:
    told = f"{type(error).__name__}: {error.what}"
except MemoryError:
    told = "MemoryError, at the measurement's end"
who = max(status("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
used = sum(sum(resource.getrusage(r)[:2]) for r in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(who - begin, used, told[:230].replace(chr(10), " "))
"""


def measured(path: Path, options: str = "{}") -> tuple[int, float, str]:
    """Return the peak bytes above the start, the CPU seconds, and what reading a file in a child says."""
    code = _READ.replace("OPTIONS", options).replace("MOST", str(MOST_BYTES))
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        return -1, -1.0, f"ended with {done.returncode}: {done.stderr[-300:]}"
    grown, used, told = done.stdout.strip().split(" ", 2)
    return int(grown), float(used), told


def main(arguments: list[str]) -> Iterator[str]:
    """Yield a line for each bomb: its size, its reader's peak memory and computing time, and the answer."""
    options = "dict(untrusted=True)" if "--untrusted" in arguments else "{}"
    named = [name for name in arguments if not name.startswith("-")] or list(BOMBS)
    with tempfile.TemporaryDirectory() as folder:
        for name in named:
            path = Path(folder, "bomb") if name in BOMBS else Path(name)
            if name in BOMBS:
                path.write_bytes(BOMBS[name]())
            grown, used, told = measured(path, options)
            yield f"{name:33}{path.stat().st_size / MB:8.3f} MB {grown / MB:8.0f} MB {used:6.1f} s  {told}\n"


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        sys.stdout.write(line)
        sys.stdout.flush()
