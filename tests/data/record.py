"""Record the snapshots and profiles of tests/data anew, with what the allocator's own counters say.

    python -m tests.gpu.standin tests/data/record.py      # in an environment with torch's CUDA wheel, and gcc

The files come into a folder of the version of PyTorch that runs. Nothing of tb_memplugin is imported.
Every program runs in a process of its own. It marks moments with a snapshot, which the history keeps as an
entry, and writes the counters of `torch.cuda.memory_stats()` at each mark, with peaks since the mark before.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

COUNTERS = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "segment")
MODULE_MARK = "tb_memplugin.module="
"""What tb_memplugin's recorder writes before the FQN of a module (PyTorch 2.10 and newer take such marks)."""
WORDS, WIDTH, TOKENS = 1000, 256, 2048

Truth = dict[str, Any]
Snapshot = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Marks:
    """Moments of a recording, with the counters of each device."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.truths: list[Truth] = []
        self.reset()

    def reset(self) -> None:
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)

    def add(self, name: str) -> Snapshot:
        """Mark this moment; the snapshot that does it, whose own history ends before the mark."""
        self.truths.append({"name": name, "devices": counters()})
        self.reset()
        return torch.cuda.memory._snapshot()


def counters() -> list[Truth]:
    """What the allocator counts now and counted at most since the last reset, by device."""
    by_device = []
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        by_device.append(
            {
                name: {
                    "now": stats[name]["all"]["current"],
                    "peak": stats[name]["all"]["peak"],
                    "small_pool": stats[name]["small_pool"]["current"],
                }
                for name in COUNTERS
            }
        )
    return by_device


def start_history(entries: int = 100_000, stacks: str = "python") -> None:
    torch.cuda.memory._record_memory_history(max_entries=entries, stacks=stacks)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages of tensors that are on a GPU."""
    return sum(x.untyped_storage().nbytes() for x in tensors if x is not None and x.is_cuda)


def mark_modules(model: nn.Module) -> None:
    """Mark what a module's forward allocates with its FQN."""
    set_metadata = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    if set_metadata is None:
        return
    open_modules = [""]

    def enter(fqn: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_modules.append(MODULE_MARK + fqn)
            set_metadata(open_modules[-1])

        return hook

    def leave(*_: Any) -> None:
        open_modules.pop()
        set_metadata(open_modules[-1])

    for fqn, module in model.named_modules():
        module.register_forward_pre_hook(enter(fqn))
        module.register_forward_hook(leave)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int = TOKENS) -> dict[str, int]:
    """One step; the requested bytes at the end of each of its annotations."""
    requested = {}

    def count(annotation: str) -> None:
        stats = torch.cuda.memory_stats_as_nested_dict()
        requested[annotation] = stats["requested_bytes"]["all"]["current"]

    with record_function("batch"):
        x = torch.zeros(tokens, dtype=torch.long, device="cuda")
    count("batch")
    with record_function("forward"):
        loss = F.cross_entropy(model(x), x)
    count("forward")
    with record_function("backward"):
        loss.backward()
    count("backward")
    optimizer.step()
    optimizer.zero_grad()
    return requested


def model_on_gpu() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model().cuda()
    return model, torch.optim.AdamW(model.parameters())


def holdings(model: nn.Module, optimizer: torch.optim.Optimizer) -> Truth:
    """Bytes of the storages that a training holds, measured on its tensors."""
    state = [x for values in optimizer.state.values() for x in values.values()]
    return {
        "parameter": storage_bytes(model.parameters()),
        "gradient": storage_bytes(x.grad for x in model.parameters()),
        "optimizer_state": storage_bytes(state),
    }


def training(marks: Marks) -> tuple[Snapshot, Truth]:
    """Two steps from the process's start, with native frames and marked modules."""
    start_history(stacks="all")
    model, optimizer = model_on_gpu()
    mark_modules(model)
    marks.add("model")
    annotations = [train_step(model, optimizer)]
    marks.add("step 0")
    annotations.append(train_step(model, optimizer))
    modules = [fqn for fqn, _ in model.named_modules()]
    truth = {"holds": holdings(model, optimizer), "modules": modules, "annotations": annotations}
    return marks.add("step 1"), truth


def profiled(marks: Marks) -> tuple[Snapshot, Truth]:
    """Two profiled steps after two others, so that memory is alive before the window."""
    model, optimizer = model_on_gpu()
    steps, snapshot = [], {}
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        profile_memory=True,
        with_stack=True,
        record_shapes=True,
        on_trace_ready=write_profile,
    ) as profiler:
        for number in range(4):
            if number == 2:
                start_history()
                marks.reset()
            train_step(model, optimizer)
            if number >= 2:
                steps.append({"number": number, "devices": counters()})
                snapshot = marks.add(f"step {number}")
            profiler.step()
    return snapshot, {"holds": holdings(model, optimizer), "steps": steps}


def write_profile(profiler: profile) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "profile.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8"))
    for name in ("traceName", "host_name"):
        trace.pop(name, None)
    text = json.dumps(without_paths(trace), separators=(",", ":"))
    write_compressed(output() / "profiled.pt.trace.json.gz", text.encode())


def expandable(marks: Marks) -> tuple[Snapshot, Truth]:
    """Segments that grow and shrink: larger steps after small ones, and what is unused given back."""
    start_history()
    model, optimizer = model_on_gpu()
    for tokens in (TOKENS, 4 * TOKENS):
        train_step(model, optimizer, tokens)
        marks.add(f"{tokens} tokens")
    torch.cuda.empty_cache()
    marks.add("emptied")
    train_step(model, optimizer)
    return marks.add("after"), {"holds": holdings(model, optimizer)}


def out_of_memory(marks: Marks) -> tuple[Snapshot, Truth]:
    """Batches that grow until one does not fit; the snapshot is that of the observer, at the failure."""
    start_history()
    failures: list[tuple[Snapshot, Truth]] = []

    def observe(_: int, requested: int, capacity: int, free: int) -> None:
        truth = {"requested_bytes": requested, "capacity_bytes": capacity, "free_bytes": free}
        failures.append((marks.add("failure"), truth))

    torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]  # CUDA builds have it
    model, optimizer = model_on_gpu()
    tokens = TOKENS
    while not failures:
        try:
            train_step(model, optimizer, tokens)
        except torch.cuda.OutOfMemoryError:
            break
        marks.add(f"{tokens} tokens")
        tokens *= 2
    snapshot, truth = failures[0]
    return snapshot, {"oom": {**truth, "count": torch.cuda.memory_stats()["num_ooms"]}}


def pools(marks: Marks) -> tuple[Snapshot, Truth]:
    """A CUDA graph's private pool and, since PyTorch 2.5, a `MemPool`."""
    start_history()
    outside = torch.empty(300_000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_graph = [torch.empty(1_000_000, device="cuda"), torch.empty(100, device="cuda")]
        torch.empty(700_000, device="cuda")
    truths = [
        {"pool": [0, 0], "bytes": storage_bytes([outside])},
        {"pool": list(graph.pool()), "bytes": storage_bytes(of_graph)},
    ]
    marks.add("graph")
    if hasattr(torch.cuda, "MemPool"):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            of_pool = [torch.empty(2_500_000, device="cuda"), torch.empty(5, device="cuda")]
        truths.append({"pool": list(pool.id), "bytes": storage_bytes(of_pool)})
    return marks.add("end"), {"pools": truths}


def streams(marks: Marks) -> tuple[Snapshot, Truth]:
    """Blocks of two streams; one is freed while the other stream may still use it, so its free waits."""
    start_history()
    side = torch.cuda.Stream()
    kept = [torch.empty(400_000, device="cuda")]
    with torch.cuda.stream(side):
        kept_by_side = [torch.empty(900_000, device="cuda"), torch.empty(33, device="cuda")]
        lent = torch.empty(500_000, device="cuda")
    marks.add("allocated")
    lent.record_stream(torch.cuda.current_stream())
    pending = storage_bytes([lent])
    del lent
    marks.add("pending")
    kept.append(torch.empty(7, device="cuda"))
    snapshot = marks.add("completed")
    truths = [
        {"stream": 0, "bytes": storage_bytes(kept)},
        {"stream": side.cuda_stream, "bytes": storage_bytes(kept_by_side)},
    ]
    return snapshot, {"streams": truths, "pending_bytes": pending}


def wrapped(marks: Marks) -> tuple[Snapshot, Truth]:
    """A history of 300 entries, which keeps the last of four steps."""
    start_history(entries=300)
    model, optimizer = model_on_gpu()
    for step in range(3):
        train_step(model, optimizer)
        marks.add(f"step {step}")
    train_step(model, optimizer)
    snapshot = marks.add("step 3")
    return snapshot, {"holds": holdings(model, optimizer), "entries": 300}


def devices(marks: Marks) -> tuple[Snapshot, Truth]:
    """Two GPUs."""
    start_history()
    first = torch.empty(600_000, device="cuda:0")
    second = [torch.empty(1_200_000, device="cuda:1"), torch.empty(9, device="cuda:1")]
    marks.add("both")
    del first
    snapshot = marks.add("one")
    return snapshot, {"second_bytes": storage_bytes(second)}


PROGRAMS: dict[str, Callable[[Marks], tuple[Snapshot, Truth]]] = {
    program.__name__: program
    for program in (training, profiled, expandable, out_of_memory, pools, streams, wrapped, devices)
}
SETTINGS = {
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "out_of_memory": {"STANDIN_BYTES": str(700 << 20)},
    "devices": {"STANDIN_DEVICES": "2"},
}
"""What the environment of a program has more."""

PYTHON = re.compile(r"/\S*/lib/python3\.\d+/(site-packages/)?")
ABSOLUTE = re.compile(r"(?<![\w.-])/\S*/")


def without_paths(value: Any) -> Any:
    """Return the same with file names that begin below site-packages, or have no folder."""
    if isinstance(value, str):
        return ABSOLUTE.sub("", PYTHON.sub("", value)) if "/" in value else value
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, list) else value


def write_compressed(file: Path, content: bytes) -> None:
    file.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))


def output() -> Path:
    return Path(__file__).parent / f"torch-{torch.__version__.split('+')[0]}"


def record(name: str) -> None:
    snapshot, truth = PROGRAMS[name](marks := Marks())
    write_compressed(output() / f"{name}.pickle.gz", pickle.dumps(without_paths(snapshot)))
    sys.stdout.write(json.dumps({**truth, "marks": marks.truths}))


def main() -> None:
    output().mkdir(exist_ok=True)
    truths: Truth = {"torch": torch.__version__, "programs": {}}
    for name in PROGRAMS:
        # Native frames are named by the library that has them: debug information is not read.
        environment = {**os.environ, "TORCH_DISABLE_ADDR2LINE": "1", "TORCH_SYMBOLIZE_MODE": "dladdr"}
        command = [sys.executable, "tests/data/record.py", name]
        done = subprocess.run(
            command, env={**environment, **SETTINGS.get(name, {})}, check=True, stdout=subprocess.PIPE
        )
        truths["programs"][name] = json.loads(done.stdout)
    text = json.dumps(truths, separators=(",", ":")).replace('{"name"', '\n{"name"')
    (output() / "truth.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1]) if len(sys.argv) > 1 else main()
