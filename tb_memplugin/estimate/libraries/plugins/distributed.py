"""torch.distributed: calls without a process group, meshes and DTensor, FSDP, and pipeline schedules."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.run.patches import do_nothing, replaced
from tb_memplugin.record.torch_private.dispatch import without_modes

_IN_PLACE = ("all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "barrier", "monitored_barrier")
_INTO_OUTPUT = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single"),
    *("gather", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter"),
)
_POINT_TO_POINT = ("send", "isend", "irecv")
_OBJECTS = ("broadcast_object_list", "send_object_list", "recv_object_list")
_TOLD: dict[str, Callable[..., Any]] = {
    "get_rank": lambda *_, **__: 0,
    "get_world_size": lambda *_, **__: 1,
    "get_backend": lambda *_, **__: "fake",
    "get_global_rank": lambda *_, **__: 0,
    "recv": lambda *_, **__: 0,
}
"""Functions that return a value, and the values for the only rank."""


class Done:
    """The work of a collective that is already complete."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """Return True at once: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a finished future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class LoneGroup:
    """A process group with only this process."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0


class Operation:
    """A stand-in for `torch.distributed.P2POp`, which accepts only torch's own functions."""

    def __init__(self, op: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self.op, self.tensor = op, tensor


class Distributed:
    """The plugin for torch.distributed without a process group: calls that transfer nothing, for one rank.

    With it, code that calls collectives runs in a plain `MemoryEstimator`. Inside `estimate_ranks`, or if the
    program has its own process group, torch's own calls run instead.
    """

    name = "torch.distributed"

    def applies(self) -> bool:
        """Return whether torch.distributed is available and no process group exists."""
        return dist.is_available() and not dist.is_initialized()

    def patch(self) -> AbstractContextManager[None]:
        """Replace the calls; results are the output tensors that the caller allocated."""
        calls: dict[str, Callable[..., Any]] = dict.fromkeys((*_IN_PLACE, *_INTO_OUTPUT), _collective)
        calls |= dict.fromkeys(_POINT_TO_POINT, _point_to_point)
        calls |= dict.fromkeys(_OBJECTS, do_nothing)
        calls |= {"batch_isend_irecv": _batch, "all_gather_object": do_nothing, **_TOLD}
        calls |= {"P2POp": Operation, "new_group": lambda *_, **__: LoneGroup()}
        calls = {name: _unless_there_is_a_group(name, call) for name, call in calls.items()}
        return replaced(*((dist, name, call) for name, call in calls.items() if hasattr(dist, name)))


def _unless_there_is_a_group(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a replaced call to use torch's own if the program creates a process group in the estimate."""
    original = getattr(dist, name, None)
    is_initialized = dist.is_initialized

    def run(*args: Any, **keywords: Any) -> Any:
        if original is not None and is_initialized():
            return original(*args, **keywords)
        return call(*args, **keywords)

    return run


def _collective(*args: Any, async_op: bool = False, **_: Any) -> Done | None:
    """Do nothing: input and output are the caller's tensors. Return a work if the call is asynchronous."""
    return Done() if async_op or any(argument is True for argument in args) else None


def _point_to_point(*_: Any, **__: Any) -> Done:
    return Done()


def _batch(operations: Any) -> list[Done]:
    return [Done() for _ in operations]


_READS_RANKS = (
    *("_compute_coordinate_on_dim", "_create_flatten_mesh", "_create_sub_mesh", "_create_unflatten_mesh"),
    *("_get_all_submeshes", "_get_mesh_tensor_from_full_mesh", "_init_process_groups"),
    *("_setup_world_group_and_device", "from_group", "mesh"),
)
"""Members of DeviceMesh (torch 2.13) that compute with the tensor of its ranks."""


class DeviceMeshes:
    """The plugin for DeviceMesh and DTensor, which tensor parallelism and FSDP2 use.

    Their bookkeeping uses real tensors, and is not counted as device memory. A `DeviceMesh` keeps its ranks
    in a small CPU tensor and reads its values, which a fake tensor does not have. DTensor finds out shapes by
    running each operator once on fake tensors of the whole size, which no rank ever allocates.
    """

    name = "torch.distributed.tensor"

    def applies(self) -> bool:
        """Return whether this process is a rank, as in `estimate_ranks`. If not, skip a second of imports."""
        return dist.is_available() and dist.is_initialized()

    def patch(self) -> AbstractContextManager[None]:
        """Make meshes use real tensors, and do not count the tensors with which DTensor finds out shapes."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (DeviceMesh, name, _really) for name in _READS_RANKS
        ]
        changes += [(DeviceMesh, "__init__", _with_real_ranks)]
        changes += [(ShardingPropagator, "_propagate_tensor_meta_non_cached", _really)]
        return replaced(
            *(
                (owner, name, _wrapped(vars(owner)[name], around))
                for owner, name, around in changes
                if name in vars(owner)
            )
        )


def _wrapped(member: Any, around: Callable[[Any], Any]) -> Any:
    """Return a function, static or class method, or property with a wrapped function."""
    if isinstance(member, staticmethod | classmethod):
        return type(member)(around(member.__func__))
    return property(around(member.fget)) if isinstance(member, property) else around(member)


def _really(method: Any) -> Any:
    """Wrap a method to run without the estimate's mode: its tensors are real, or fake but not counted."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return method(*args, **kwargs)

    return run


def _with_real_ranks(init: Any) -> Any:
    """Wrap `DeviceMesh.__init__` to replace a fake tensor of ranks by a real one.

    `init_device_mesh` passes 0, 1, 2, ... in a tensor that is fake in an estimate.
    """

    @functools.wraps(init)
    def run(mesh: Any, *args: Any, **kwargs: Any) -> None:
        ranks = kwargs.get("_rank_map")
        with without_modes():
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int, device="cpu")
            init(mesh, *args, **kwargs)

    return run


_MESHES = "_get_post_forward_mesh_info"
"""The function that makes the mesh of `reshard_after_forward=n`, by its name in two modules."""


class FullySharded:
    """The plugin for `fully_shard` (FSDP2), and for the error of `FullyShardedDataParallel` on a CPU.

    FSDP2 compares addresses to find replaced shards, but fake tensors have no addresses. FSDP1 runs unchanged
    in an estimate for a GPU. On a CPU it does not run, as in reality.
    """

    name = "torch.distributed.fsdp"

    def applies(self) -> bool:
        """Return whether this process is a rank, as in `estimate_ranks`. If not, skip a second of imports."""
        return dist.is_available() and dist.is_initialized()

    def patch(self) -> AbstractContextManager[None]:
        """Keep FSDP2 from resetting shards that did not change, and let it move fake models to the GPU.

        It would pad a smaller shard a second time (`FSDPParam.reset_sharded_param`). Meshes of
        `reshard_after_forward=n` keep real ranks.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        begin: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
        fully: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
        older: Any = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")

        original: Any = FSDPParam.reset_sharded_param

        @functools.wraps(original)
        def reset_sharded_param(shard: Any) -> None:
            if not _unchanged(shard):
                original(shard)

        return replaced(
            (FSDPParam, "reset_sharded_param", reset_sharded_param),
            (begin, "_move_states_to_device", _moving_fakes(begin._move_states_to_device)),
            *((home, _MESHES, _really(getattr(home, _MESHES))) for home in (begin, fully)),
            (older, "_init_device_handle", _requiring_gpu(older._init_device_handle)),
        )


def _moving_fakes(original: Any) -> Any:
    """Wrap FSDP2's move of a model to its device: assigning to `.data` keeps a fake tensor's device."""

    @functools.wraps(original)
    def run(parameters: list[Any], buffers: list[Any], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            if isinstance(tensor, FakeTensor) and tensor.device not in (device, torch.device("meta")):
                moved: Any = tensor.to(device)
                tensor.data = moved
                tensor.fake_device = moved.fake_device
        original(parameters, buffers, device)

    return run


def _requiring_gpu(find_device: Any) -> Any:
    """Wrap FSDP1's search for a GPU to raise a MemPluginError if there is none."""

    @functools.wraps(find_device)
    def run(*args: Any, **keywords: Any) -> Any:
        try:
            return find_device(*args, **keywords)
        except RuntimeError as error:
            raise MemPluginError(
                f"FullyShardedDataParallel (FSDP1) runs only on a GPU: {error}",
                where="FullyShardedDataParallel",
                fix="Use torch.distributed.fsdp.fully_shard (FSDP2), or estimate with device='cuda'.",
            ) from error

    return run


def _unchanged(shard: Any) -> bool:
    """Whether the module's parameter is still the shard's own, in the same memory."""
    info = shard._module_info
    parameter = getattr(info.module, info.param_name)
    if parameter is not shard.sharded_param or shard.pin_memory:
        return False
    mine, its = shard._sharded_param_data, parameter._local_tensor
    return bool(mine.untyped_storage()._cdata == its.untyped_storage()._cdata)


_SCHEDULES = "torch.distributed.pipelining.schedules"

_VOTES = ("_warmup_p2p", "_initialize_pipeline_distributed_state")
"""The names of the method that holds the vote: until PyTorch 2.14, and since 2.15."""

_RELEASES = "_output_slot_is_releasable"
"""The name of the method that decides whether an output is freed once it is sent: since 2.15."""

_PLAIN = torch.empty(0, device="cpu")
"""Stands for an output, of which that method only reads the type."""


class Pipelining:
    """The plugin for torch.distributed.pipelining, which must be imported before the estimate begins.

    Its schedules run unchanged, except for two decisions that depend on real tensors. Before its first step,
    a schedule lets its stages vote whether all of them were given the shapes of their inputs and outputs
    (`PipelineStage(input_args=..., output_args=...)`). If not, the first micro-batch is run once to find the
    shapes, which stages send each other as Python objects: see `Post` in rank_estimates.py. Since PyTorch
    2.15, a stage frees an output once it is sent, but only if it is a plain tensor.
    """

    name = "torch.distributed.pipelining"

    def applies(self) -> bool:
        """Return whether its schedules are imported."""
        return _SCHEDULES in sys.modules

    def patch(self) -> AbstractContextManager[None]:
        """Let the stages of this rank vote alone, and treat fake tensors as the plain ones they stand for."""
        schedules: Any = importlib.import_module(_SCHEDULES)
        schedule, stage = schedules._PipelineSchedule, schedules._PipelineStageBase
        # A method that this version of PyTorch does not have is added, and never called.
        return replaced(
            *((schedule, name, _vote) for name in _VOTES),
            (stage, _RELEASES, _as_if_plain(getattr(stage, _RELEASES, None))),
        )


def _vote(_schedule: Any, stages: Sequence[Any], has_backward: bool, *_: Any) -> None:
    """Vote with this rank's stages only: the other ranks are assumed to vote the same.

    Otherwise a rank would wait for shapes that no rank sends. Since 2.15 the replaced method also makes a
    process group for each pair of stages, if the user wants that; here the group of all stages is used.
    """
    for stage in stages:
        stage.p2p_per_edge = False
    modes: Any = importlib.import_module("torch.distributed.pipelining._utils").InferenceMode
    with_meta = [stage for stage in stages if hasattr(stage, "_user_meta")]
    dynamic = any(modes.needs_dynamic(stage._user_meta, has_backward) for stage in with_meta)
    for stage in with_meta:
        stage._inference_mode = modes.DYNAMIC if dynamic else modes.STATIC


def _as_if_plain(original: Any) -> Callable[..., Any]:
    """Return a method that decides on a fake tensor as the original does on a plain one."""

    def decide(stage: Any, output: Any) -> Any:
        return original(stage, _PLAIN if type(output) is FakeTensor else output)

    return decide
