"""What blocks of a category are: logits, attention scores, buffers of collectives, pools of CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tb_memplugin.analysis.divisions import breakdown, informative
from tb_memplugin.analysis.peak_holders import peak_holders
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.labels import ALIVE_BEFORE, BUCKET
from tests.recorded_program import program
from tests.traces import trace

FSDP = "/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:9"


def at_the_end(history: MemoryTrace) -> dict[str, int]:
    parts = breakdown(history, 0, len(history.events) - 1, "subcategory")
    assert sum(part.bytes for part in parts) == history.live(0)[-1]
    return {part.key: part.bytes for part in parts}


def test_scores_of_every_step_and_logits_with_their_copies_have_names() -> None:
    """Scores of a step of 4 x 4 and of one of 2 x 2; of logits in bf16 the cast and the log-softmax."""
    lines = [
        line
        for size in (1600, 400)
        for line in (
            f"alloc {size} q{size} operator=aten::matmul module=attention category=activation",
            f"alloc {size} p{size} operator=aten::softmax module=attention category=activation",
            f"alloc 100 h{size} operator=aten::linear module=attention category=activation",
            f"alloc 200 logits{size} operator=aten::linear module=head category=activation",
            f"alloc 400 cast{size} operator=aten::to category=activation",
            f"alloc 400 loss{size} operator=aten::log_softmax category=activation",
        )
    ]
    history = trace("start 7 w category=parameter", "step 1", *lines[:6], "step 2", *lines[6:])
    assert at_the_end(history) == {
        "activation: attention scores": 2 * 1600 + 2 * 400,
        "activation: logits": 2 * (200 + 400 + 400),
        "activation": 2 * 100,
        "parameter": 7,
    }


def test_a_loss_and_its_scalars_are_not_all_logits() -> None:
    """With Python's frames alone, the log-softmax and the mean of a cross entropy have the same function."""
    stacks = {
        "head": ("linear /torch/nn/functional.py:3", "forward m.py:2"),
        "loss": ("cross_entropy /torch/nn/functional.py:9", "<module> train.py:4"),
        "scalar": ("<module> train.py:1",),
    }
    history = program(
        "alloc 4 learning_rate at=scalar",
        "alloc 640 logits at=head",
        "alloc 640 log_softmax at=loss",
        "alloc 4 mean at=loss",
        stacks=stacks,
    )
    assert at_the_end(history) == {"unknown: logits": 1280, "unknown": 8}


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("c10d::allreduce_", "all-reduce"),
        ("c10d::_allgather_base_", "all-gather"),
        ("_c10d_functional::reduce_scatter_tensor", "reduce-scatter"),
        ("c10d::alltoall_base_", "all-to-all"),
        ("c10d::broadcast_", "broadcast"),
        ("fsdp::all_gather_copy_in", "FSDP all-gather"),
        ("fsdp::chunk_cat", "FSDP reduce-scatter"),
    ],
)
def test_a_buffer_of_communication_has_the_name_of_its_collective(operator: str, name: str) -> None:
    history = trace(f"alloc 8 a operator={operator} category=communication", "alloc 2 b category=gradient")
    assert at_the_end(history) == {f"communication: {name}": 8, "gradient": 2}


def test_frames_and_labels_name_the_collective_too() -> None:
    stacks = {
        "gather": (f"foreach_all_gather {FSDP}", "forward m.py:1"),
        "reduce": (f"foreach_reduce {FSDP}", "backward m.py:1"),
        "own": ("all_gather /home/me/fsdp/train.py:9",),
    }
    named = f"alloc 1 d label='{BUCKET}, by its size'"
    history = program("alloc 8 a at=gather", "alloc 4 b at=reduce", "alloc 2 c at=own", named, stacks=stacks)
    history.allocations.category[:] = 10  # communication
    assert at_the_end(history) == {
        "communication: FSDP all-gather": 8,
        "communication: FSDP reduce-scatter": 4,
        "communication: all-gather": 2,
        "communication: DDP buckets": 1,
    }


def test_a_pool_of_cuda_graphs_is_told_from_one_that_a_program_made() -> None:
    pools = ((0, 0), (7, 0), (0, 3))
    history = program("alloc 8 a", "alloc 4 b pool=1", "alloc 2 c pool=2", pools=pools)
    assert at_the_end(history) == {"unknown": 8, "unknown: CUDA graph pool": 4, "unknown: private pool": 2}


def test_the_division_is_offered_where_anything_has_a_name() -> None:
    assert "subcategory" not in informative(trace("alloc 8 a operator=aten::add category=activation"), 0)
    named = trace("alloc 8 a operator=c10d::allreduce_ category=communication")
    assert "subcategory" in informative(named, 0)


def held() -> MemoryTrace:
    """A parameter, and of unknown category: three elements of two lists, a tensor, and one without a name."""
    return trace(
        "start 10 w category=parameter reason=reachable label=net.weight",
        "start 100 a reason=reachable label=replay[0]",
        "start 200 b reason=reachable label=replay[1]",
        "start 400 c reason=reachable label=batches['x'][2]",
        "start 800 d reason=reachable label=data",
        "start 1600 e reason=reachable",
        "alloc 3 f label=a_label_of_the_program",
    )


def test_what_a_variable_holds_is_named_by_it_the_elements_of_a_list_together() -> None:
    assert at_the_end(held()) == {
        "unknown: variable replay[*]": 100 + 200,
        "unknown: variable batches[*][*]": 400,
        "unknown: variable data": 800,
        "unknown": 1600 + 3,
        "parameter": 10,
    }


def test_what_no_variable_names_is_called_none() -> None:
    before = trace("start 5 a reason=reachable label=a", "alloc 1 b")
    assert at_the_end(replace(before, labels=(ALIVE_BEFORE,))) == {
        f"unknown: {ALIVE_BEFORE}": 5,
        "unknown": 1,
    }


def test_a_variable_holds_its_part_of_the_peak() -> None:
    holders = peak_holders(held(), 0)
    assert [(holder.name, holder.bytes, holder.blocks) for holder in holders.holders] == [
        ("unknown", 1603, 2),
        ("variable data", 800, 1),
        ("variable batches[*][*]", 400, 1),
        ("variable replay[*]", 300, 2),
        ("parameter", 10, 1),
    ]
