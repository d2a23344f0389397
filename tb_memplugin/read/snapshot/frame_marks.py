"""Derive categories and phases from frame names. Used last, because names change between versions.

The innermost marks of a stack decide, so a forward inside an optimizer's closure is a forward, and a module
that runs again inside a backward is recomputed. The names are those of PyTorch 2.0 to 2.10; a frame that
matches no pattern has no mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from tb_memplugin.trace import Category, Phase
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.kinds import ColumnEnum


class Mark(ColumnEnum):
    """The meaning of one frame."""

    NOTHING = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    ZERO_GRAD = 4
    RECOMPUTE = 5
    COMMUNICATION = 6
    WORKSPACE = 7
    INPUT = 8
    PARAMETER = 9
    GRADIENT = 10
    OPTIMIZER_STATE = 11
    STARTUP = 12
    """Initialisers, whose allocations are neither parameters nor activations."""
    CACHE = 13
    CLOSURE = 14
    """What an optimizer's step calls for the loss: what is outside of it says nothing."""


UNDECIDED = (Mark.NOTHING, Mark.CLOSURE)
"""The marks that say nothing of a phase."""

CATEGORIES = {
    Mark.COMMUNICATION: Category.COMMUNICATION,
    Mark.WORKSPACE: Category.WORKSPACE,
    Mark.INPUT: Category.INPUT,
    Mark.PARAMETER: Category.PARAMETER,
    Mark.GRADIENT: Category.GRADIENT,
    Mark.OPTIMIZER_STATE: Category.OPTIMIZER_STATE,
    Mark.CACHE: Category.CACHE,
}
"""The category of an allocation whose innermost mark is the key."""

PHASES = {
    Mark.FORWARD: Phase.FORWARD,
    Mark.BACKWARD: Phase.BACKWARD,
    Mark.RECOMPUTE: Phase.BACKWARD,
    Mark.GRADIENT: Phase.BACKWARD,
    Mark.OPTIMIZER: Phase.OPTIMIZER,
    Mark.OPTIMIZER_STATE: Phase.OPTIMIZER,
}

_OPTIMIZERS = (
    r"(torch|bitsandbytes|torchao|torch_optimizer|pytorch_optimizer|dion)/optim(izers?)?/|apex/optimizers/"
    r"|apex/contrib/optimizers/|deepspeed/ops/(adam|adagrad|lamb|lion)/|transformer_engine/pytorch/optimizers/"
    r"|megatron/core/optimizer/"
)

# Patterns for file and function, which must match completely; the first matching pair decides.
_PYTHON: tuple[tuple[Mark, str, str], ...] = (
    (Mark.NOTHING, r".*torch/optim/(lr_scheduler|swa_utils)\.py", r".*"),
    (Mark.ZERO_GRAD, r".*", r"zero_grad"),
    (
        Mark.OPTIMIZER_STATE,
        rf"(.*/)?({_OPTIMIZERS}).*",
        r"_init_group|init_state|_init_state|load_state_dict",
    ),
    (Mark.OPTIMIZER, rf"(.*/)?({_OPTIMIZERS}).*", r"(?!__init__|add_param_group|state_dict).*"),
    (
        Mark.COMMUNICATION,
        r".*torch/distributed/(fsdp/_fully_shard|_composable/fsdp)/(_fsdp_collectives|_fsdp_common)\.py",
        r".*",
    ),
    (
        Mark.COMMUNICATION,
        r".*torch/distributed/(fsdp/_fully_shard|_composable/fsdp)/_fsdp_param\.py",
        r"(init|alloc)_all_gather_outputs|init_unsharded_param|all_gather_inputs|alloc_storage",
    ),
    (
        Mark.COMMUNICATION,
        r".*torch/distributed/fsdp/(_flat_param|flat_param|_runtime_utils)\.py",
        r"_alloc_padded_unsharded_flat_param|_all_gather_flat_param|_reduce_grad|_get_reduce_scatter_tensors",
    ),
    (Mark.PARAMETER, r".*torch/distributed/fsdp/.*", r"_init_sharded_param|_init_param_handle_from_module"),
    (
        Mark.COMMUNICATION,
        r".*torch/(distributed/(distributed_c10d|_functional_collectives)|nn/parallel/comm|cuda/nccl)\.py",
        r".*",
    ),
    (
        Mark.COMMUNICATION,
        r".*torch/nn/parallel/distributed\.py",
        r"_ddp_init_helper|_sync_(module_states|buffers|module_buffers)",
    ),
    (Mark.COMMUNICATION, r".*torch/distributed/utils\.py", r"_sync_(module_states|params_and_buffers)"),
    (Mark.RECOMPUTE, r".*torch/utils/checkpoint\.py", r"recompute_fn|unpack_hook|_recompute\w*|backward"),
    (Mark.INPUT, r".*torch/utils/data/(dataloader|_utils/\w+)\.py", r".*"),
    (
        Mark.INPUT,
        r".*(accelerate/utils/operations|lightning(_fabric|/fabric)/utilities/apply_func)\.py",
        r"_?send_to_device|move_data_to_device|batch_to",
    ),
    (
        Mark.INPUT,
        r".*(transformers/(tokenization_utils_base|feature_extraction_utils)|torch_geometric/data/\w+)\.py",
        r"to|cuda|apply|apply_|_?stores?_to",
    ),
    (
        Mark.CACHE,
        r".*transformers/cache_utils\.py",
        r"update|(lazy|early)_initialization|reorder_cache|batch_(repeat_interleave|select_indices)",
    ),
    (Mark.STARTUP, r".*torch/nn/init\.py", r".*"),
    (Mark.STARTUP, r".*", r"reset_parameters"),
    (Mark.PARAMETER, r".*torch/nn/modules/module\.py", r"_apply|convert|to|cuda|to_empty"),
    (Mark.PARAMETER, r".*torch/nn/modules/\w+\.py", r"__init__"),
    (
        Mark.PARAMETER,
        r".*(transformers/(modeling_utils|core_model_loading)|accelerate/utils/modeling|diffusers/models/\w+)\.py",
        r"from_pretrained|_load\w*|load_\w+|set_module_tensor_to_device",
    ),
    (Mark.PARAMETER, r".*", r"_?(init|load|create|allocate)_(all_)?weights?(_list)?"),
    (Mark.FORWARD, r".*torch/nn/modules/module\.py", r"_(wrapped_)?call_impl|_slow_forward"),
    (Mark.FORWARD, r".*torch/nn/functional\.py", r".*"),
    (Mark.FORWARD, r".*", r"forward"),
    (Mark.CLOSURE, r".*", r"closure"),
    (Mark.BACKWARD, r".*", r"backward|_engine_run_backward"),
)
# A part of the function's name, which is looked for first because that is quick, and a pattern to find in it.
_NATIVE: tuple[tuple[Mark, str, str], ...] = (
    (Mark.WORKSPACE, "CUDABlas", r"getCUDABlasLtWorkspace|getCurrentCUDABlasHandle|CUDABlasLtWorkspace"),
    (
        Mark.WORKSPACE,
        "orkspace",
        r"getNewWorkspace|allocate_workspace|at::native::Workspace::|get_workspace_size_and_alloc",
    ),
    (Mark.COMMUNICATION, "c10d::", r"(?<![^ (*&])c10d::"),
    (Mark.GRADIENT, "AccumulateGrad::", r"(?<![^ (*&])torch::autograd::AccumulateGrad::"),
    (
        Mark.BACKWARD,
        "torch::autograd::",
        r"(?<![^ (*&])torch::autograd::((Engine|python::PythonEngine|PyNode)::|generated::\w*Backward)",
    ),
)
_OF_FILE = [re.compile(file) for _, file, _ in _PYTHON]
_OF_NATIVE = [(mark, part, re.compile(function)) for mark, part, function in _NATIVE]


def mark_of(text: str) -> Mark:
    """Return the mark of a frame's text."""
    frame = read_frame(text)
    if not frame.is_python:
        name = frame.function
        return next(
            (mark for mark, part, marked in _OF_NATIVE if part in name and marked.search(name)), Mark.NOTHING
        )
    match = _functions_in(frame.file.replace("\\", "/")).fullmatch(frame.function.replace("\\", "/"))
    return _PYTHON[int(str(match.lastgroup)[1:])][0] if match else Mark.NOTHING


@lru_cache(1 << 12)
def _functions_in(file: str) -> re.Pattern[str]:
    """Return the pattern of the functions in a file that have a mark; the names of its groups are rows."""
    rows = [row for row, pattern in enumerate(_OF_FILE) if pattern.fullmatch(file)]
    return re.compile("|".join(f"(?P<r{row}>{_PYTHON[row][2]})" for row in rows))


def judged(marks: Sequence[Mark]) -> tuple[Category, Phase, Mark]:
    """Return what a stack's marks (innermost first, without `NOTHING`) say about its allocations.

    Returns:
        The category, `UNKNOWN` if only the phase is known; the phase, `OTHER` if it is not known; and the
        mark that determines the phase, `RECOMPUTE` for a forward that runs again inside a backward.
    """
    marks = marks[: [*marks, Mark.CLOSURE].index(Mark.CLOSURE) + 1]
    if not marks:
        return Category.UNKNOWN, Phase.OTHER, Mark.NOTHING
    category = CATEGORIES.get(marks[0], Category.UNKNOWN)
    phase_marks = [mark for mark in marks if mark in PHASES]
    if not phase_marks or marks[0] in (Mark.PARAMETER, Mark.STARTUP, Mark.ZERO_GRAD):
        return category, Phase.OTHER, marks[0]
    mark = phase_marks[0]
    around = set(phase_marks[1:])
    if mark == Mark.FORWARD and Mark.RECOMPUTE in around:
        mark = Mark.RECOMPUTE
    elif mark == Mark.FORWARD and Mark.BACKWARD in around:
        mark = Mark.BACKWARD
    return category, PHASES[mark], mark
