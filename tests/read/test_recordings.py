"""The recordings of tests/data, each held against the counters of the allocator that wrote it.

`tests/data/record.py` says what the programs do, and records them anew.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tb_memplugin.analysis.allocator import levels, pools
from tb_memplugin.analysis.annotations import stages
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, By, breakdown
from tb_memplugin.analysis.layout import layout
from tb_memplugin.analysis.moments import peak
from tb_memplugin.analysis.pool_names import pool_key, stream_key
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.loading import load
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase

DATA = Path(__file__).parents[1] / "data"


def numbers(version: str) -> list[int]:
    return [*map(int, version.split("."))]


VERSIONS = sorted(
    (file.parent.name.removeprefix("torch-") for file in DATA.glob("torch-*/truth.json")), key=numbers
)
ANNOTATED = [version for version in VERSIONS if numbers(version) >= [2, 5]]
"""PyTorch writes annotations into snapshots."""
LABELLED = [version for version in VERSIONS if numbers(version) >= [2, 10]]
"""PyTorch writes metadata of the user into snapshots."""
PROGRAMS = ("training", "profiled", "expandable", "out_of_memory", "pools", "streams", "wrapped", "devices")
ONE_GPU = {"2.11.0": "an H200"}
"""Versions that recorded on a machine with one GPU, a real one; the others had the stand-in."""
RECORDINGS = [
    (version, program)
    for version in VERSIONS
    for program in PROGRAMS
    if program != "devices" or version not in ONE_GPU
]


@cache
def truths(version: str) -> dict[str, Any]:
    return json.loads((DATA / f"torch-{version}" / "truth.json").read_text(encoding="utf-8"))["programs"]


@cache
def snapshot(version: str, program: str) -> MemoryTrace:
    return load(str(DATA / f"torch-{version}" / f"{program}.pickle.gz"))


@cache
def kineto(version: str) -> MemoryTrace:
    return load(str(DATA / f"torch-{version}" / "profiled.pt.trace.json.gz"))


def moments(version: str, program: str, device: int) -> list[tuple[int, dict[str, Any]]]:
    """The event after which each mark was set, with the counters then. The last is the end."""
    trace = snapshot(version, program)
    is_mark = (trace.events.kind == Kind.MARK) & (trace.events.device == device)
    marks = [*np.flatnonzero(is_mark).tolist(), len(trace.events) - 1]
    number = int(trace.devices[device].name.removeprefix("cuda:"))
    counted = [mark["devices"][number] for mark in truths(version)[program]["marks"]]
    return list(zip(marks, counted[-len(marks) :], strict=True))


def parts(trace: MemoryTrace, by: By, event: int) -> dict[str, int]:
    return {part.key: part.bytes for part in breakdown(trace, 0, event, by)}


def test_the_recordings_are_there() -> None:
    assert VERSIONS == ["2.1.2", "2.4.1", "2.6.0", "2.8.0", "2.10.0", "2.11.0", "2.13.0", "2.15.0"]


@pytest.mark.parametrize(("version", "program"), RECORDINGS)
def test_bytes_at_every_mark_are_what_the_allocator_counted(version: str, program: str) -> None:
    trace = snapshot(version, program)
    for device in range(len(trace.devices)):
        known = levels(trace, device)
        assert known.reserved is not None
        for event, counted in moments(version, program, device):
            assert known.active[event + 1] == counted["requested_bytes"]["now"]
            assert known.reserved[event + 1] == counted["reserved_bytes"]["now"]
            if program != "expandable":  # torch counts none of those as segments
                assert len(layout(trace, device, event).segments) == counted["segment"]["now"]


@pytest.mark.parametrize(("version", "program"), RECORDINGS)
def test_peaks_between_marks_are_what_the_allocator_counted(version: str, program: str) -> None:
    trace = snapshot(version, program)
    for device in range(len(trace.devices)):
        known = levels(trace, device)
        assert known.reserved is not None
        marked = moments(version, program, device)
        if program != "wrapped":
            marked.insert(0, (-1, {}))
        for (since, _), (event, counted) in pairwise(marked):
            assert known.active[since + 1 : event + 2].max() == counted["requested_bytes"]["peak"]
            assert known.reserved[since + 1 : event + 2].max() == counted["reserved_bytes"]["peak"]
        if program != "wrapped":
            highest = max(counted["requested_bytes"]["peak"] for _, counted in marked[1:])
            assert peak(trace, trace.devices[device].name).bytes == highest


@pytest.mark.parametrize(("version", "program"), RECORDINGS)
def test_rounded_bytes_at_the_end_are_what_the_allocator_counted(version: str, program: str) -> None:
    trace = snapshot(version, program)
    for device in range(len(trace.devices)):
        event, counted = moments(version, program, device)[-1]
        states = pools(trace, device, event)
        assert sum(state.rounded_bytes for state in states) == counted["active_bytes"]["now"]
        assert sum(state.active_bytes for state in states) == counted["requested_bytes"]["now"]
        assert sum(state.reserved_bytes or 0 for state in states) == counted["reserved_bytes"]["now"]
        assert all(state.rounded_exact for state in states)


@pytest.mark.parametrize("by", ALL_DIVISIONS)
@pytest.mark.parametrize(("version", "program"), RECORDINGS)
def test_parts_sum_to_the_whole_at_every_mark(version: str, program: str, by: By) -> None:
    trace = snapshot(version, program)
    for device in range(len(trace.devices)):
        for event, counted in moments(version, program, device):
            total = sum(part.bytes for part in breakdown(trace, device, event, by))
            assert total == counted["requested_bytes"]["now"]


@pytest.mark.parametrize(("version", "program"), RECORDINGS)
def test_no_free_lacks_its_allocation_and_no_block_lies_outside_a_segment(version: str, program: str) -> None:
    trace = snapshot(version, program)
    assert len(trace.allocations.unmatched_frees) == trace.allocations.unseen_frees == 0
    for device in range(len(trace.devices)):
        for event, _ in moments(version, program, device):
            assert len(layout(trace, device, event).misfits) == 0


@pytest.mark.parametrize(
    ("program", "categories"),
    [
        ("training", ("parameter", "optimizer_state", "gradient")),
        ("expandable", ("parameter", "optimizer_state")),
        ("wrapped", ("parameter", "optimizer_state")),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_model_and_its_optimizer_hold_has_the_bytes_of_its_tensors(
    version: str, program: str, categories: tuple[str, ...]
) -> None:
    trace = snapshot(version, program)
    by_category = parts(trace, "category", len(trace.events) - 1)
    holds = truths(version)[program]["holds"]
    assert {key: by_category.get(key, 0) for key in categories} == {key: holds[key] for key in categories}


@pytest.mark.parametrize("version", VERSIONS)
def test_stacks_have_the_frames_of_the_program_and_of_autograd(version: str) -> None:
    trace = snapshot(version, "training")
    allocated = trace.events.kind == Kind.ALLOC
    assert (trace.events.stack[allocated] >= 0).all()
    in_backward = allocated & (trace.events.phase == Phase.BACKWARD)
    texts = ["\n".join(trace.stack(row)) for row in trace.events.stack[in_backward].tolist()]
    assert any("torch::autograd::Engine" in text for text in texts)
    in_forward = allocated & (trace.events.phase == Phase.FORWARD)
    texts = ["\n".join(trace.stack(row)) for row in trace.events.stack[in_forward].tolist()]
    assert all("train_step record.py:" in text for text in texts)
    assert any("forward torch/nn/modules/linear.py:" in text for text in texts)


@pytest.mark.parametrize(("version", "program"), RECORDINGS)
def test_no_frame_has_an_absolute_path(version: str, program: str) -> None:
    frames = {frame for stack in snapshot(version, program).stacks for frame in stack}
    assert [frame for frame in frames if " /" in frame] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_no_name_in_a_profile_has_an_absolute_path(version: str) -> None:
    assert [name for name in kineto(version).operators if name.startswith("/")] == []
    assert [frame for stack in kineto(version).stacks for frame in stack if " /" in frame] == []


@pytest.mark.parametrize("version", ANNOTATED)
def test_bytes_at_the_end_of_annotations_are_what_the_allocator_counted(version: str) -> None:
    trace = snapshot(version, "training")
    ends: dict[str, list[int]] = {}
    for stage in stages(trace):
        if stage.stage == "END":
            ends.setdefault(stage.name, []).append(stage.bytes)
    for step, counted in enumerate(truths(version)["training"]["annotations"]):
        assert {name: ends[name][step] for name in counted} == counted
    assert len(ends["Optimizer.step#AdamW.step"]) == 2


@pytest.mark.parametrize("version", LABELLED)
def test_marked_modules_own_what_they_allocate(version: str) -> None:
    trace = snapshot(version, "training")
    named = {module.key for module in trace.modules if module.is_module}
    assert named == set(truths(version)["training"]["modules"])
    (forward,) = (stage for stage in stages(trace, ["forward"]) if stage.key == "forward_END(1)")
    by_module = parts(trace, "module", forward.event)
    tokens, width, float_bytes = 2048, 256, 4
    assert by_module["blocks.1.up"] == tokens * 4 * width * float_bytes
    assert by_module["blocks.1.norm"] == tokens * (width + 2) * float_bytes  # with each token's mean and rstd
    assert by_module["blocks.1"] == tokens * (4 * width + width) * float_bytes  # GELU, and the sum
    assert by_module["embed"] == tokens * width * float_bytes


@pytest.mark.parametrize("version", VERSIONS)
def test_steps_of_a_profile_are_what_the_allocator_counted(version: str) -> None:
    """A profiler's events are whole blocks, so they sum to allocated bytes."""
    trace = kineto(version)
    steps = step_stats(trace, trace.device_row("cuda:0"))
    counted = [step["devices"][0] for step in truths(version)["profiled"]["steps"]]
    assert [step.peak_bytes for step in steps] == [step["allocated_bytes"]["peak"] for step in counted]
    assert [step.end_bytes for step in steps] == [step["allocated_bytes"]["now"] for step in counted]
    reserved = [step["reserved_bytes"]["peak"] for step in counted]
    assert [step.peak_reserved_bytes for step in steps] == reserved


@pytest.mark.parametrize("version", VERSIONS)
def test_a_profile_names_modules_and_operators(version: str) -> None:
    trace = kineto(version)
    device = trace.device_row("cuda:0")
    top = peak(trace, "cuda:0")
    by_module = {part.key: part.bytes for part in breakdown(trace, device, top.event, "module")}
    assert by_module["Linear_0"] == by_module["Linear_2"] == 2048 * 1024 * 4  # the `up` of each block
    by_operator = {part.key: part.bytes for part in breakdown(trace, device, top.event, "operator")}
    assert by_operator["aten::gelu"] == 2 * 2048 * 1024 * 4
    assert by_operator["aten::embedding"] == 2048 * 256 * 4


@pytest.mark.parametrize("version", VERSIONS)
def test_a_profile_and_a_snapshot_of_the_same_steps_have_the_same_requests(version: str) -> None:
    """The profiler sees each requested block rounded up to 512 bytes."""
    from_history, from_profiler = snapshot(version, "profiled"), kineto(version)
    device = from_profiler.device_row("cuda:0")
    is_block = (from_profiler.events.kind == Kind.ALLOC) & (from_profiler.events.device == device)
    addresses = from_profiler.events.address[is_block].tolist()
    requested = from_history.events.kind == Kind.ALLOC
    assert from_history.events.address[requested].tolist() == addresses
    assert np.all(from_history.events.bytes[requested] <= from_profiler.events.bytes[is_block])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_profile_knows_the_parameters_and_the_state_from_before_it(version: str) -> None:
    """By the sizes of gradients, which the profiler rounds up to 512 bytes for each."""
    trace, holds = kineto(version), truths(version)["profiled"]["holds"]
    on_gpu = trace.start.device == trace.device_row("cuda:0")
    for category, tensors in ((Category.PARAMETER, 15), (Category.OPTIMIZER_STATE, 30)):
        size = int(trace.start.bytes[on_gpu & (trace.start.category == category)].sum())
        assert holds[category.key] <= size < holds[category.key] + 512 * tensors


@pytest.mark.parametrize("version", VERSIONS)
def test_a_profile_and_a_snapshot_of_the_same_steps_have_the_same_categories(version: str) -> None:
    """But the profile alone has where operators end, and not the call of `backward`, which makes ones."""
    from_history, from_profiler = snapshot(version, "profiled"), kineto(version)
    is_block = (from_profiler.events.kind == Kind.ALLOC) & (
        from_profiler.events.device == from_profiler.device_row("cuda:0")
    )
    in_profile = from_profiler.events.category[is_block]
    in_history = from_history.events.category[from_history.events.kind == Kind.ALLOC]
    assert not np.any(in_profile == Category.UNKNOWN)
    ones = from_profiler.operators.index("aten::ones_like")
    lasts = (in_profile != Category.TEMPORARY) & (from_profiler.events.operator[is_block] != ones)
    for category in (Category.ACTIVATION, Category.AUTOGRAD_DETAIL, Category.GRADIENT):
        assert np.array_equal(in_profile[lasts] == category, in_history[lasts] == category)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_pool_has_the_bytes_of_its_tensors(version: str) -> None:
    trace = snapshot(version, "pools")
    by_pool = parts(trace, "pool", len(trace.events) - 1)
    held = {pool_key(tuple(truth["pool"])): truth["bytes"] for truth in truths(version)["pools"]["pools"]}
    graph_state = by_pool.pop("default") - held.pop("default")
    assert by_pool == held
    assert graph_state in (0, 2 * 8)  # before 2.15: seed and offset of the graph's random numbers


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_graph_allocated_is_in_its_pool(version: str) -> None:
    trace = snapshot(version, "pools")
    by_name = parts(trace, "subcategory", len(trace.events) - 1)
    held = {tuple(truth["pool"]): truth["bytes"] for truth in truths(version)["pools"]["pools"]}
    of_graph = sum(size for (first, _), size in held.items() if first)
    assert sum(size for key, size in by_name.items() if key.endswith(": CUDA graph pool")) == of_graph > 0
    own = sum(size for (_, second), size in held.items() if second)
    assert sum(size for key, size in by_name.items() if key.endswith(": private pool")) == own


@pytest.mark.parametrize("version", VERSIONS)
def test_what_stays_beside_model_and_optimizer_is_cublas_workspace(version: str) -> None:
    """Without frames of C++, and among tensors of its size."""
    trace = snapshot(version, "expandable")
    truth = truths(version)["expandable"]
    end = truth["marks"][-1]["devices"][0]["requested_bytes"]["now"]
    workspaces = parts(trace, "category", len(trace.events) - 1).get("workspace", 0)
    assert workspaces == end - sum(truth["holds"].values())


@pytest.mark.parametrize("version", VERSIONS)
def test_each_stream_has_the_bytes_of_its_tensors(version: str) -> None:
    trace = snapshot(version, "streams")
    by_stream = parts(trace, "stream", len(trace.events) - 1)
    assert by_stream == {
        stream_key(truth["stream"]): truth["bytes"] for truth in truths(version)["streams"]["streams"]
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_what_another_stream_may_still_use_is_pending(version: str) -> None:
    _, (pending, counted), (completed, _) = moments(version, "streams", 0)
    lent = truths(version)["streams"]["pending_bytes"]
    known = levels(snapshot(version, "streams"), 0)
    assert (known.pending[pending + 1], known.pending[completed + 1]) == (lent, 0)
    waiting = counted["active_bytes"]["now"] - counted["allocated_bytes"]["now"]
    assert lent <= waiting < lent + 512  # rounded up


@pytest.mark.parametrize("version", VERSIONS)
def test_a_failure_is_what_the_observer_was_told(version: str) -> None:
    trace, truth = snapshot(version, "out_of_memory"), truths(version)["out_of_memory"]["oom"]
    (failure,) = trace.ooms
    assert failure.event == len(trace.events) - 1
    assert failure.free_bytes == truth["free_bytes"]
    # The observer is told the size of the segment that was wanted.
    requested = failure.requested_bytes
    segment = 20 << 20 if requested < 10 << 20 else -(-requested // (2 << 20)) * (2 << 20)
    assert truth["requested_bytes"] == segment


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wrapped_history_knows_what_was_alive_before_it(version: str) -> None:
    trace, truth = snapshot(version, "wrapped"), truths(version)["wrapped"]
    assert len(trace.events) == truth["entries"]
    assert len(moments(version, "wrapped", 0)) < len(truth["marks"])
    assert trace.live(0)[0] >= truth["holds"]["parameter"] + truth["holds"]["optimizer_state"]


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in ONE_GPU])
def test_devices_are_apart(version: str) -> None:
    trace = snapshot(version, "devices")
    assert [device.name for device in trace.devices] == ["cuda:0", "cuda:1"]
    assert [int(trace.live(device)[-1]) for device in (0, 1)] == [
        0,
        truths(version)["devices"]["second_bytes"],
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_expandable_segments_are_mapped_and_unmapped(version: str) -> None:
    kinds = Counter(snapshot(version, "expandable").events.kind.tolist())
    assert kinds[Kind.SEGMENT_MAP] > 0
    assert kinds[Kind.SEGMENT_UNMAP] > 0
    assert kinds[Kind.SEGMENT_ALLOC] == 0
