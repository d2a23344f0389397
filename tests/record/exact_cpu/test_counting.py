"""The counter of the CPU's allocator against known tensors and a second counter; threads, forks, refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tb_memplugin.record.compiling import CACHE_VARIABLE

ORACLE = Path(__file__).with_name("oracle.c")

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


FIGURES = """
from collections import namedtuple
from tb_memplugin.record.exact_cpu import counting
Figures = namedtuple("Figures", "live_bytes peak_bytes live_blocks unknown_frees unknown_bytes lost")
def figures():
    return Figures(*counting._figures(counting._library()))
"""


def run(program: str, cache: Path, **environment: str) -> list[str]:
    """Return the lines that a new process prints, in which counting begins after `import torch`."""
    begin = "import torch\nfrom tb_memplugin.record.exact_cpu.counting import *\n" + FIGURES
    done = subprocess.run(
        [sys.executable, "-c", begin + program],
        env={**os.environ, CACHE_VARIABLE: os.fspath(cache), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_compiler
def test_live_bytes_and_peaks_are_the_tensors_own(cache):
    lines = run(
        """
start_counting()
kept = torch.zeros(1000)
first = begin_window()
large = torch.empty(50_000, dtype=torch.uint8); del large
second = begin_window()
small = torch.empty(10, dtype=torch.float64)
inner = second.stop()
kept = None
outer = first.stop()
for window, one in ((second, inner), (first, outer)):
    print(one.start_bytes, one.peak_bytes, one.end_bytes, one.is_exact, one.since_first)
    print([size for _, _, size in window.blocks()], one.calls["bytes"].tolist(), one.calls["unknown"].sum())
print(figures())
small = None
print(figures().live_bytes)
""",
        cache,
    )
    assert lines == [
        "4000 4080 4080 True True",
        "[4000] [80] 0",
        "4000 54000 80 True True",
        "[4000] [50000, -50000, 80, -4000] 0",
        "Figures(live_bytes=80, peak_bytes=4080, live_blocks=1, unknown_frees=0, unknown_bytes=0, lost=0)",
        "0",
    ]


@needs_compiler
def test_tensors_from_before_are_counted_where_python_reaches_them(cache):
    """What cross_entropy keeps for its backward is not: its frees are those of unknown blocks."""
    lines = run(
        """
import numpy
before = torch.zeros(250)
numpys = torch.from_numpy(numpy.zeros(1 << 20))
logits = torch.ones(64, 256, requires_grad=True)
loss = torch.nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.int64))
start_counting()
window = begin_window()
print(figures().live_bytes)
loss = None
counted = window.stop()
print(counted.since_first, sorted(counted.calls["bytes"][counted.calls["unknown"] == 0].tolist()))
unknown = -counted.calls["bytes"][counted.calls["unknown"] == 1]
print(0 <= unknown.max() - 64 * 256 * 4 < 64, figures().unknown_bytes == unknown.sum())
""",
        cache,
    )
    assert lines == [str(1000 + 64 * 256 * 4 + 64 * 8 + 4), "False [-512, -4]", "True True"]


@needs_compiler
def test_many_threads_at_once_lose_nothing(cache):
    """Each thread keeps tensors of sizes of its own; half of all are freed by another thread."""
    lines = run(
        """
import random, threading
start_counting()
window = begin_window()
kept = [[] for _ in range(8)]
def work(number):
    rng = random.Random(number)
    for count in range(4000):
        kept[number].append(torch.empty(rng.randrange(1, 5000), dtype=torch.uint8))
        if count % 2:
            other = kept[rng.randrange(8)]
            try: other.pop(rng.randrange(max(len(other) // 2, 1)))
            except IndexError: pass
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
counted = window.stop()
print(counted.end_bytes == sum(t.nbytes for ts in kept for t in ts), counted.is_exact)
print(counted.calls["bytes"].sum() == counted.end_bytes, (counted.calls["bytes"] > 0).sum())
again = begin_window()
print(len(again.address) == sum(map(len, kept)), again.bytes.sum() == counted.end_bytes)
kept.clear()
print(figures().live_bytes, figures().live_blocks)
""",
        cache,
    )
    assert lines == ["True True", "True 32000", "True True", "0 0"]


@needs_compiler
def test_a_training_is_counted_as_by_a_second_counter(cache, tmp_path):
    oracle = tmp_path / "oracle.so"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", str(ORACLE), "-o", str(oracle), "-ldl", "-lpthread"], check=True
    )
    lines = run(
        """
import ctypes
oracle = ctypes.CDLL(None)
oracle.oracle_live.restype = oracle.oracle_peak.restype = ctypes.c_int64
start_counting()
model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    window = begin_window()
    oracle.oracle_reset()
    start = oracle.oracle_live()
    model(torch.randn(8, 32, 64)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    counted = window.stop()
    print((counted.start_bytes, counted.peak_bytes, counted.end_bytes)
        == (start, oracle.oracle_peak(), oracle.oracle_live()), counted.peak_bytes > 1_000_000)
""",
        cache,
        LD_PRELOAD=str(oracle),
    )
    assert lines == ["True True"] * 3


@needs_compiler
def test_children_of_a_fork_count_on_and_the_parent_does_not_notice(cache):
    """A thread allocates all the time, so that a fork may happen in the middle of a call."""
    lines = run(
        """
import os, threading
start_counting()
kept, on = torch.zeros(1000), True
def work():
    while on: torch.empty(100)
thread = threading.Thread(target=work); thread.start()
codes = set()
for _ in range(40):
    child = os.fork()
    if not child:
        before = figures()
        mine = torch.zeros(500)
        grew = figures().live_bytes - before.live_bytes
        os._exit(0 if grew == 2000 or before.lost else 1)
    codes.add(os.waitpid(child, 0)[1])
on = False; thread.join()
print(codes, figures().live_bytes, figures().lost)
""",
        cache,
    )
    assert lines == ["{0} 4000 0"]


@needs_compiler
def test_it_is_compiled_once(tmp_path):
    run("start_counting()", tmp_path)
    (library,) = tmp_path.iterdir()
    written = library.stat().st_mtime_ns
    run("start_counting()", tmp_path, CC="no-such-compiler")
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [written]


@needs_compiler
def test_what_a_killed_build_left_goes_with_the_next(tmp_path):
    cache, compiler = tmp_path / "cache", tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nkill -9 $PPID\n")
    compiler.chmod(0o755)
    with pytest.raises(AssertionError):
        run("start_counting()", cache, CC=os.fspath(compiler))
    (left,) = cache.iterdir()
    run("start_counting()", cache)
    assert not left.exists()
    assert len(list(cache.iterdir())) == 1


REFUSED = """
from tb_memplugin import MemPluginError
{before}
try: start_counting()
except MemPluginError as error: print(str(error).replace(chr(10), " "))
print(is_counting(), torch.ones(3).sum().item())
"""


@needs_compiler
def test_without_a_compiler_the_error_says_what_to_install(tmp_path):
    text, still = run(REFUSED.format(before=""), tmp_path, CC="no-such-compiler")
    assert "no C compiler was found" in text
    assert "gcc or clang" in text
    assert "no-such-compiler" in text
    assert still == "False 3.0"


@needs_compiler
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_text("not a folder")
    text, still = run(REFUSED.format(before=""), path)
    assert CACHE_VARIABLE in text
    assert still == "False 3.0"


@needs_compiler
def test_an_allocator_that_is_not_seen_is_refused_and_torch_goes_on(cache):
    """Another library has the slots, as a build of torch with its own malloc would have none."""
    hidden = "from tb_memplugin.record.exact_cpu import counting; counting._sees_a_tensor = lambda _: False"
    text, still = run(REFUSED.format(before=hidden), cache)
    assert "cannot be counted" in text
    assert still == "False 3.0"


def test_other_systems_are_refused(cache):
    before = "import sys; sys.platform = 'win32'"
    text, still = run(REFUSED.format(before=before), cache)
    assert "on Linux" in text
    assert still == "False 3.0"
