"""A small pickle takes little memory, whatever it claims. Each runs where there is hardly any."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys

import pytest

from tb_memplugin.read.snapshot import pickle_reader
from tb_memplugin.read.snapshot.safe_pickle import read_pickle

HUGE = struct.pack("<I", 0xF0000000)
FRAMED = b"Nr" + HUGE + b"."
PICKLES = {
    "LONG_BINPUT": b"\x80\x02Nr" + HUGE + b".",
    "LONG_BINPUT, not quite as large": b"\x80\x02Nr" + struct.pack("<I", 300_000_000) + b".",
    "PUT": b"Np4000000000\n.",
    "PUT with blanks and underscores": b"Np  +4_000_000_000\n.",
    "in a frame": b"\x80\x04\x95" + struct.pack("<Q", len(FRAMED)) + FRAMED,
    "after texts full of the opcode": b"\x80\x04\x8c\xff" + b"r" * 255 + b"0" + FRAMED,
    **{f"at a chunk's edge {by}": b"\x80\x02K\x010" + b"N0" * ((1 << 19) - by) + FRAMED for by in range(6)},
    **{f"at a chunk's odd edge {by}": b"\x80\x02" + b"N0" * ((1 << 19) - by) + FRAMED for by in range(6)},
    "sets, 216 bytes a byte": b"\x80\x04" + b"\x8f" * (8 << 20) + b".",
}
TRY = """
import resource, sys
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.snapshot.safe_pickle import read_pickle
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_pickle(sys.stdin.buffer.read(), "a.pickle")
except UnreadableFileError as error:
    assert "more memory than there is" not in error.what, error
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_would_fill_the_memory_is_refused(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRY], input=PICKLES[name], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) < 700  # MiB


@pytest.mark.parametrize("chunk", [7, 64, 4096])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_bytes_that_look_like_the_opcodes_come_back(
    chunk: int, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_reader, "CHUNK_BYTES", chunk)
    value = [["r" * n, f"p{n}00000000", n * 0x7272727272, {"\x95": n}] for n in range(60)]
    raw = [b"r\xff\xff\xff\xff" * n + b"\x95" + b"\0" * 8 for n in range(60)] if protocol > 2 else []
    assert read_pickle(pickle.dumps([value, raw], protocol), "a.pickle")[0] == [value, raw]
