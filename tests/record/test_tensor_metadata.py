"""What tensor is in each block: of a profile, of MemoryTracer, of an estimate."""

from __future__ import annotations

from time import time_ns
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tb_memplugin import MemoryEstimator, MemoryTracer
from tb_memplugin.analysis.divisions import breakdown, informative, parts_of
from tb_memplugin.analysis.moments import peak, tensor_name
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.record.storages import sight
from tb_memplugin.record.tensor_metadata import dense, made_tensors, seen_tensors
from tb_memplugin.trace import Category, MemoryTrace, TensorMetadata
from tb_memplugin.trace.replay import blocks_at
from tests.traces import EPOCH, MICROSECOND, trace
from tests.training import MODELS, train

CPU = 0


def tensor(dtype: str, *shape: int) -> TensorMetadata:
    strides = [int(np.prod(shape[place + 1 :])) for place in range(len(shape))]
    return TensorMetadata(dtype, shape, tuple(strides))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (tensor("float32", 8, 2048), "float32 [8, 2048]"),
        (tensor("int64"), "int64 []"),
        (TensorMetadata("bfloat16", (2, 3), (1, 2)), "bfloat16 [2, 3] strides [1, 2]"),
        (TensorMetadata("bfloat16", (4, 1), (1, 9)), "bfloat16 [4, 1]"),  # a stride that is never stepped
        (TensorMetadata("bool", (0, 3), (7, 7)), "bool [0, 3]"),
    ],
)
def test_a_tensor_is_shown_with_strides_only_where_these_are_not_the_usual_ones(
    metadata: TensorMetadata, text: str
) -> None:
    assert str(metadata) == text


def test_the_tensor_of_a_block_is_the_whole_one_and_of_equal_ones_the_first() -> None:
    recorded = trace("start 64 w", "alloc 40 a", "alloc 12 b", "free a", "alloc 8 c")
    blocks = recorded.allocations
    w, a, b, c = blocks.address.tolist()
    times = [EPOCH - 1, *(EPOCH + MICROSECOND * (event + 1) for event in range(4))]
    part, whole, reshaped = tensor("float32", 5), tensor("float32", 10), tensor("float32", 2, 5)
    found, table = seen_tensors(
        [
            (times[0], w, tensor("float16", 32)),
            (times[1], a, part),
            (times[2], a, whole),
            (times[2], a, reshaped),
            (times[4], a, tensor("int8", 40)),  # a is free by then
            (times[3], b, tensor("float32", 4)),  # 16 bytes do not fit in 12
        ],
        blocks,
        recorded.events.time_ns,
    )
    assert [table[row] if row >= 0 else None for row in found] == [tensor("float16", 32), whole, None, None]
    assert c > b


def test_a_result_that_does_not_fit_its_block_is_not_its_tensor() -> None:
    expanded = (torch.float32, torch.Size([100, 4]), (0, 1))
    plain = (torch.float32, torch.Size([4]), (1,))
    found, table = made_tensors([expanded, plain, None], np.array([16, 16, 16]))
    assert [str(table[row]) if row >= 0 else None for row in found] == [None, "float32 [4]", None]


def three_dtypes(ones: Any = torch.ones) -> list[torch.Tensor]:
    """400 bytes of float32, 200 of bfloat16 and 800 of int64, each an operator's input at the end."""
    a = ones(4, 25)
    b = a.to(torch.bfloat16)
    c = a.to(torch.int64)
    for each in (a, b, c):
        each.abs_()
    return [a, b, c]


def profiled(run: Any, **options: Any) -> MemoryTrace:
    recorder, made = WindowRecorder({}, [], finds_all=False), []
    watch(recorder)

    def ready(prof: profile) -> None:
        window = recorder.take()
        assert window is not None
        made.append(trace_from_profile(prof, window))

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, on_trace_ready=ready, **options):
        kept = run()
    del kept
    return made[0]


def by_dtype(recorded: MemoryTrace) -> dict[str, int]:
    return {part.key: part.bytes for part in peak(recorded, "cpu", largest=0).parts("dtype")}


DTYPES = {"int64": 800, "float32": 400, "bfloat16": 200}


def test_bytes_by_dtype_in_a_profile_with_shapes() -> None:
    assert by_dtype(profiled(three_dtypes, record_shapes=True)) == DTYPES


def test_what_no_operator_received_is_not_known() -> None:
    recorded = profiled(lambda: (three_dtypes(), torch.empty(50)), record_shapes=True)
    assert by_dtype(recorded) == {**DTYPES, "(not known)": 200}
    assert "dtype" in informative(recorded, CPU)


def test_without_shapes_only_what_model_and_optimizer_hold_is_known() -> None:
    recorded = profiled(three_dtypes)
    assert by_dtype(recorded) == {"(not known)": 1400}
    assert "dtype" not in informative(recorded, CPU)


def test_bytes_by_dtype_of_the_tracer() -> None:
    tracer, model = MemoryTracer(device="cpu"), nn.Linear(2, 2)
    with tracer.trace(model):
        three_dtypes()
    recorded = tracer.trace_result()
    made = np.flatnonzero(recorded.allocations.born >= 0)
    assert {part.key: part.bytes for part in parts_of(recorded, made, "dtype")} == DTYPES
    start = {str(recorded.tensors[row]) for row in recorded.start.tensor.tolist() if row >= 0}
    assert {"float32 [2, 2]", "float32 [2]"} <= start  # the model's weight and bias


def test_bytes_by_dtype_of_an_estimate() -> None:
    with MemoryEstimator(device="cpu") as estimator:
        kept = three_dtypes()
    del kept
    assert by_dtype(estimator.trace_result()) == DTYPES


class Results(TorchDispatchMode):
    """An oracle of its own: what each operator returned, and where and when."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if type(each) is torch.Tensor and each.numel():
                where = each.untyped_storage().data_ptr()
                self.rows.append((time_ns(), where, str(each.dtype), each.numel() * each.element_size()))
        return out


@pytest.mark.parametrize("name", ["cnn", "transformer", "lstm"])
def test_each_known_tensor_is_one_that_an_operator_returned_there(name: str) -> None:
    oracle = Results()
    with oracle:
        (only,) = train(MODELS[name](), record_shapes=True)
    recorded, blocks = only.trace, only.trace.allocations
    time, address, dtypes, sizes = zip(*oracle.rows, strict=True)
    returned: dict[int, set[tuple[str, int]]] = {}
    seen_at = np.searchsorted(recorded.events.time_ns, np.array(time), side="right") - 1
    rows = blocks_at(np.array(address, np.uint64), seen_at, blocks)
    for row, dtype, size in zip(rows.tolist(), dtypes, sizes, strict=True):
        returned.setdefault(row, set()).add((dtype.removeprefix("torch."), size))
    checked = 0
    for row in np.flatnonzero(blocks.tensor >= 0).tolist():
        known = recorded.tensors[blocks.tensor[row]]
        size = int(np.prod(known.shape)) * getattr(torch, known.dtype).itemsize
        if row in returned and blocks.born[row] >= 0:
            assert (known.dtype, size) in returned[row], tensor_name(recorded, row)
            assert size == max(size for _, size in returned[row] if size <= blocks.bytes[row])
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("name", MODELS)
def test_at_the_peak_only_memory_inside_kernels_and_a_little_besides_is_not_known(name: str) -> None:
    (only,) = train(MODELS[name](), record_shapes=True)
    live, blocks = only.trace.live(CPU), only.trace.allocations
    event = int(live.argmax()) - 1
    assert sum(part.bytes for part in breakdown(only.trace, CPU, event, "dtype")) == live.max()
    unknown = blocks.alive_at(event, CPU)
    unknown = unknown[(blocks.tensor[unknown] < 0) & (blocks.category[unknown] != Category.TEMPORARY)]
    assert blocks.bytes[unknown].sum() <= 0.03 * live.max()


def test_a_tensor_without_strides_is_not_described():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert dense(nested) is None
    assert 20 in {seen.bytes for seen in sight([(nested, Category.INPUT, -1, "x")])}
