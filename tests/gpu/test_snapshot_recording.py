"""On CUDA the allocator's history joins the profile to the byte. Needs an NVIDIA GPU."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, schedule

from tb_memplugin import memory_trace_handler, record_on_oom
from tb_memplugin.analysis import peak
from tb_memplugin.record.history.merge import SOURCE
from tb_memplugin.store.reader import load_window
from tb_memplugin.trace import Kind, Phase
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


def is_on() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


def run(folder, name: str = "transformer", **options):
    """Train under the profiler with `snapshot=True`; the trace, and requested bytes at each step's end."""
    torch.manual_seed(0)
    model = MODELS[name]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    handler = memory_trace_handler(folder, "w", model=model, optimizer=optimizer, snapshot=True, **options)
    requested, states = [], []
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        profile_memory=True,
        on_trace_ready=handler,
    ) as prof:
        for _ in range(5):
            x, y = (t.cuda() for t in model.batch())
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            states.append(is_on())
            requested.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
            prof.step()
    (side_file,) = folder.rglob("*.mem")
    return load_window(str(side_file)), requested, states


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"))


def test_the_two_are_joined_and_every_profiled_event_is_found(seen):
    trace, _, _ = seen
    assert trace.source == SOURCE
    assert [note for note in trace.notes if "Both are kept" in note or "are not in" in note] == []


def test_live_bytes_are_the_allocators_requested_bytes(seen):
    trace, requested, _ = seen
    device = trace.device_row("cuda:0")
    _, end = trace.step_events(0)
    assert trace.live(device)[end] == requested[2]


def test_allocs_have_stacks_rounded_sizes_and_modules(seen):
    trace, _, _ = seen
    device = trace.device_row("cuda:0")
    forward = (
        (trace.events.device == device)
        & (trace.events.kind == Kind.ALLOC)
        & (trace.events.phase == Phase.FORWARD)
    )
    assert forward.any()
    assert (trace.events.stack[forward] >= 0).all()
    assert (trace.events.rounded[forward] >= trace.events.bytes[forward]).all()
    owned = [trace.modules[row].is_module for row in trace.events.module[forward].tolist()]
    assert sum(owned) >= len(owned) // 2


def test_segments_and_reserve_are_told(seen):
    trace, _, _ = seen
    assert len(trace.segments)
    assert trace.devices[trace.device_row("cuda:0")].reserved_at_start


def test_the_history_is_on_in_profiled_steps_alone(seen):
    _, _, states = seen
    assert states == [False, False, True, True, False]


def test_a_users_history_stays_on_with_what_it_holds(tmp_path):
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        kept = torch.empty(1000, device="cuda")
        before = len(torch.cuda.memory._snapshot()["device_traces"][0])
        trace, _, states = run(tmp_path)
        assert all(states)
        assert len(torch.cuda.memory._snapshot()["device_traces"][0]) > before
        assert trace.source == SOURCE
        del kept
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@pytest.mark.skipif(
    not hasattr(torch.cuda.memory, "_get_memory_metadata"), reason="this torch has no marks: 2.10 or newer"
)
def test_marks_are_given_back(seen):
    assert torch.cuda.memory._get_memory_metadata() == ""


def test_a_training_on_a_thread_that_the_profiler_does_not_see_is_the_history_alone(tmp_path):
    model = MODELS["cnn"]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        x, y = (tensor.cuda() for tensor in model.batch())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    handler = memory_trace_handler(tmp_path, "w", model=model, optimizer=optimizer, snapshot=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, on_trace_ready=handler):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
    (side_file,) = tmp_path.rglob("*.mem")
    trace = load_window(str(side_file))
    live = trace.live(trace.device_row("cuda:0"))
    assert int(live.max()) == stats["requested_bytes.all.peak"]
    assert int(live[-1]) == stats["requested_bytes.all.current"]
    assert "The profiler saw no allocation" in trace.notes[0]


def run_out() -> None:
    held = torch.empty(1 << 20, device="cuda")
    torch.empty(1 << 40, device="cuda")
    del held


def test_running_out_of_memory_is_recorded_and_raised(tmp_path):
    with record_on_oom(tmp_path) as recorder, pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        run_out()
    assert len(recorder.dumps) == 1
    (side_file,) = tmp_path.rglob("*.mem")
    (oom,) = load_window(str(side_file)).ooms
    assert oom.requested_bytes == 1 << 42  # floats of four bytes
    assert not is_on()


def test_what_filled_the_memory_has_the_names_of_the_programs_models(tmp_path):
    """Stacks do not tell the four linears apart. 256 rows of 1 KiB: 256 KiB for each output."""
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)) for _ in range(2))
    ).cuda()
    with record_on_oom(tmp_path) as recorder:
        recorder.program = lambda: ({"net": model}, ())
        output = model(torch.randn(256, 256, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, device="cuda")
    assert output.shape == (256, 256)
    (side_file,) = tmp_path.rglob("*.mem")
    parts = peak(load_window(str(side_file)), device="cuda:0").parts("module")
    weight, bias, row = 4 * 256 * 256, 4 * 256, 4 * 256
    assert {part.key: part.bytes for part in parts if part.key.startswith("net")} == {
        f"net.{outer}.{inner}": weight + bias + 256 * row for outer in (0, 1) for inner in (0, 1)
    }
