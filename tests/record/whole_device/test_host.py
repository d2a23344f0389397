"""What fills the host: files of a small /proc and /sys, and a real training with worker processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tb_memplugin.record.whole_device import host
from tb_memplugin.record.whole_device.host import HeapFree, host_free, host_memory, memory_limit
from tb_memplugin.trace import DevicePart

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")


@pytest.fixture
def root(tmp_path) -> Path:
    """1,000 MiB: 300 free, 200 of files; process 7 has 50, its children 8 and 9 have 20 and 5."""
    write(
        tmp_path,
        {
            "proc/meminfo": sizes(MemTotal=1000, MemFree=300, Buffers=10, Cached=230, Shmem=40),
            "proc/7/status": "Name:\tpython\n" + sizes(RssAnon=45, RssFile=99, RssShmem=5),
            "proc/7/cgroup": "0::/jobs/one\n",
            "proc/7/task/7/children": "8 ",
            "proc/7/task/71/children": "",
            "proc/8/smaps_rollup": "5-7 ---p 0 00:00 0 [rollup]\n" + sizes(Rss=70, Private_Dirty=20),
            "proc/8/task/8/children": "9 10 ",  # 10 has ended
            "proc/9/smaps_rollup": sizes(Rss=60, Private_Clean=3, Private_Dirty=5),
        },
    )
    (tmp_path / "proc/self").symlink_to("7")
    return tmp_path


def write(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def sizes(**mebibytes: int) -> str:
    return "".join(f"{name}:  {size << 10} kB\n" for name, size in mebibytes.items())


def in_mib(memory) -> dict[str, float]:
    return {part.key: size / MIB for part, size in memory.parts.items()}


def test_without_a_limit_the_whole_is_the_machine(root):
    memory = host_memory(root)
    assert (memory.total, memory.is_limit) == (1000 * MIB, False)
    assert in_mib(memory) == {"process": 50, "children": 25, "files": 200, "free": 300}


def test_the_tightest_limit_of_all_groups_above_is_the_whole(root):
    top = "sys/fs/cgroup"
    write(
        root,
        {
            f"{top}/jobs/one/memory.max": "max\n",
            f"{top}/jobs/memory.max": f"{400 * MIB}\n",
            f"{top}/jobs/memory.current": f"{350 * MIB}\n",
            f"{top}/jobs/memory.stat": f"anon 7\nfile {90 * MIB}\nshmem {30 * MIB}\n",
            f"{top}/memory.max": f"{800 * MIB}\n",
        },
    )
    memory = host_memory(root)
    assert (memory.total, memory.is_limit) == (400 * MIB, True)
    assert in_mib(memory) == {"process": 50, "children": 25, "files": 60, "free": 50}


def test_a_limit_of_the_first_version_of_cgroups(root):
    top = "sys/fs/cgroup/memory"
    write(
        root,
        {
            # The path is the host's. In this container the group is the top.
            "proc/7/cgroup": "3:cpu,cpuacct:/docker/a\n2:memory:/docker/a\n0::/\n",
            f"{top}/memory.limit_in_bytes": f"{500 * MIB}",
            f"{top}/memory.usage_in_bytes": f"{450 * MIB}",
            f"{top}/memory.stat": f"cache 1\ntotal_cache {80 * MIB}\ntotal_shmem {20 * MIB}\n",
        },
    )
    memory = host_memory(root)
    assert (memory.total, memory.is_limit) == (500 * MIB, True)
    assert in_mib(memory) == {"process": 50, "children": 25, "files": 60, "free": 50}


def test_a_limit_above_the_machine_is_none(root):
    write(root, {"sys/fs/cgroup/jobs/one/memory.max": f"{1001 * MIB}"})
    assert memory_limit(root) is None


def test_children_are_left_out_where_nobody_asks_for_them(root):
    assert "children" not in in_mib(host_memory(root, children=False))


def test_children_whose_pages_take_too_long_to_walk_are_not_known(root, monkeypatch):
    monkeypatch.setattr(host, "LONGEST_WALK_S", -1)
    assert "children" not in in_mib(host_memory(root))


def test_the_free_bytes_of_a_step_are_those_of_the_machine_or_of_its_limit():
    free, total = host_free() or (0, 0)
    memory = host_memory()
    assert total == memory.total
    assert abs(free - memory.parts[DevicePart.FREE]) < 500 * MIB  # others run beside this


TRAINING = """
import gc, json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from torch.profiler import profile
from tb_memplugin import memory_trace_handler

class Numbers(Dataset):
    kept = None
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if self.kept is None:
            gc.freeze()
            self.kept = torch.ones(40 << 18)  # 40 MiB that each worker has alone
        return torch.ones(8)

def private(process):
    lines = Path(f"/proc/{process}/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))

def anonymous(process):
    lines = Path(f"/proc/{process}/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    handler = memory_trace_handler(sys.argv[1], "worker", model=model)
    batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True))
    next(batches), next(batches), next(batches)
    with profile(profile_memory=True, on_trace_ready=handler):
        model(next(batches)).sum().backward()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    print(json.dumps({"children": [private(child) for child in children], "own": anonymous("self")}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_workers_of_a_data_loader_count_what_they_have_alone(tmp_path):
    """Beside sums over /proc/PID/smaps, page range by page range."""
    from tb_memplugin.analysis.whole_device import whole_of
    from tb_memplugin.loading import load

    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    truth = json.loads(result.stdout.splitlines()[-1])
    assert len(truth["children"]) == 2
    assert min(truth["children"]) > 40 * MIB
    (file,) = (tmp_path / "runs").rglob("*.mem")
    trace = load(file)
    whole = {of.moment.key: of for of in whole_of(trace, trace.device_row("cpu"))}
    start, end = dict(whole["start"].parts), dict(whole["end"].parts)
    assert DevicePart.CHILDREN not in start
    assert end[DevicePart.CHILDREN] == pytest.approx(sum(truth["children"]), rel=0.1)
    assert end[DevicePart.PROCESS] == pytest.approx(truth["own"], rel=0.1)
    for of in whole.values():
        assert of.total == int(Path("/proc/meminfo").read_text().split()[1]) << 10 or of.is_limit


HEAP = """
import ctypes
from tb_memplugin.record.whole_device.host import HeapFree
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc.argtypes = [ctypes.c_size_t]
blocks = []
for _ in range(64):
    blocks.append(libc.malloc(1 << 20))
    libc.malloc(64)  # lives on, so that its neighbours cannot go back to the system
before = HeapFree().read()
for block in blocks:
    libc.free(block)
print(HeapFree().read() - before)
"""


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")), reason="glibc"
)
def test_blocks_freed_between_others_are_free_in_the_heap():
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(64 * MIB),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }
    result = subprocess.run(
        [sys.executable, "-c", HEAP], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert int(result.stdout) == pytest.approx(64 * MIB, abs=MIB)


def test_after_a_reading_of_the_heap_comes_a_pause(monkeypatch):
    """A walk of 5 ms is followed by 500 ms without one, a walk of 10 us by 100 ms."""
    clock = iter([0.0, 0.005, 0.504, 0.506, 0.50601, 0.60, 0.6061, 0.6062])
    monkeypatch.setattr(host, "_mallinfo2", lambda: lambda: SimpleNamespace(fordblks=7))
    monkeypatch.setattr(host, "perf_counter", lambda: next(clock))
    heap = HeapFree()
    assert [heap.read() for _ in range(5)] == [7, None, 7, None, 7]
