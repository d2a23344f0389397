"""Estimate the ranks of a distributed job one after the other, all in this process.

This process acts as each rank, with torch's fake process group, whose collectives transfer nothing. Python
objects are carried between ranks: a rank that receives an object before its sender has run is stopped with
`Waiting`, and run again from the start once the object was sent. This works for programs that send the same
objects each time.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.estimation import Estimate
from tb_memplugin.estimate.answer.estimator import WORKER, MemoryEstimator
from tb_memplugin.estimate.program.communication import Underway
from tb_memplugin.estimate.ranks.mesh import PIPELINE, Mesh, checked_mesh, parse_mesh
from tb_memplugin.estimate.run.patches import Patches, do_nothing
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import MemoryTrace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Build = Callable[[MemoryEstimator, "DeviceMesh"], object]
"""`build(estimator, mesh)` builds and trains as one rank; its result stays alive until the estimate ends."""


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """The estimate of one rank. `coordinate` is its place in the mesh, one number for each dimension."""

    rank: int
    coordinate: tuple[int, ...]
    estimate: Estimate
    trace: MemoryTrace


@dataclass(frozen=True, slots=True)
class RankEstimates:
    """The estimates of the ranks that were run, in order of rank."""

    mesh: Mesh
    ranks: tuple[RankEstimate, ...]

    @property
    def worst(self) -> RankEstimate:
        """The rank that reserves the most; among equals, the one that allocates the most, then the first."""
        return max(
            self.ranks,
            key=lambda estimated: (
                estimated.estimate.peak_reserved_bytes,
                estimated.estimate.peak_allocated_bytes,
                -estimated.rank,
            ),
        )

    def of(self, rank: int) -> RankEstimate:
        """Return the estimate of one rank.

        Raises:
            MemPluginError: the rank was not estimated.
        """
        for estimated in self.ranks:
            if estimated.rank == rank:
                return estimated
        ranks = ", ".join(str(estimated.rank) for estimated in self.ranks[:20])
        raise MemPluginError(
            f"Rank {rank} was not estimated; these ranks were: {ranks}.", where="RankEstimates"
        )

    def save(self, logdir: str | os.PathLike[str]) -> None:
        """Write each rank's trace for the Memory tab of `tensorboard --logdir <logdir>`.

        Raises:
            MemPluginError: the folder cannot be written.
        """
        for estimated in self.ranks:
            RunWriter(os.fspath(logdir), f"{WORKER}_rank{estimated.rank}").write(estimated.trace)


def estimate_ranks(
    build: Build, mesh: Mesh | int | str, ranks: Iterable[int] | None = None, **options: Any
) -> RankEstimates:
    """Estimate ranks of a job, one after the other, with torch's fake process group.

    Args:
        build: called for each rank inside a `MemoryEstimator`, with the estimator and a mesh.
            `torch.distributed` is initialized for that rank: FSDP2, DDP, tensor and pipeline parallelism and
            collectives work. It is called again if it needs shapes that another pipeline stage sends later.
        mesh: the ranks, as a `Mesh`, as text such as "dp=8,tp=2", or as a number for one dimension named dp.
        ranks: the ranks to estimate; by default the corners of the mesh, see `Mesh.corners`.
        options: arguments of `MemoryEstimator`, such as device, gpu, conf and hints.

    Raises:
        MemPluginError: the mesh or a rank is not valid, this process already has a process group, or ranks
            wait for objects that no rank sends.

    Example:
        >>> def build(estimator, mesh):
        ...     model = fully_shard(Model().cuda(), mesh=mesh["dp"])
        ...     model(estimator.create_fake_tensor(8, 1024)).sum().backward()
        ...     return model
        >>> estimate_ranks(build, "dp=8", gpu="h100").worst.estimate.peak_allocated_bytes
    """
    laid_out = _mesh(mesh)
    wanted = laid_out.corners if ranks is None else tuple(sorted(set(ranks)))
    if not wanted or wanted[0] < 0 or wanted[-1] >= laid_out.world_size:
        raise MemPluginError(
            f"These ranks are not in the mesh {laid_out}: {list(wanted)[:8]}.",
            where="estimate_ranks",
            fix=f"Name ranks from 0 to {laid_out.world_size - 1}.",
        )
    if laid_out.size(PIPELINE) > 1:
        importlib.import_module("torch.distributed.pipelining")  # its plugin applies only if it is imported
    return RankEstimates(laid_out, _in_turns(build, laid_out, wanted, options))


def _in_turns(
    build: Build, mesh: Mesh, wanted: Sequence[int], options: dict[str, Any]
) -> tuple[RankEstimate, ...]:
    """Run the ranks. A rank that waits for another rank's letter is run again once that letter is sent."""
    post, turns, waiting = Post(), deque(wanted), dict[int, Waiting]()
    estimates: dict[int, RankEstimate] = {}
    while turns and not estimates.keys() >= set(wanted):
        rank = turns.popleft()
        try:
            estimates[rank] = _estimated(build, mesh, rank, options, post)
        except Waiting as wait:
            waiting[rank], sender = wait, wait.letter[0]
            if sender not in turns and sender not in waiting and sender not in estimates:
                turns.append(sender)
        ready = [other for other, wait in waiting.items() if post.has(wait.letter)]
        for other in ready:
            del waiting[other]
        turns.extendleft(reversed(ready))
    if not estimates.keys() >= set(wanted):
        raise _never_sent(waiting)
    return tuple(estimates[rank] for rank in wanted)


def _never_sent(waiting: dict[int, Waiting]) -> MemPluginError:
    waits = [f"rank {rank} for rank {wait.letter[0]}" for rank, wait in sorted(waiting.items())]
    return MemPluginError(
        f"Ranks wait for objects that are never sent: {', '.join(waits[:8])}.",
        where="estimate_ranks",
        fix=(
            "Send everything that is received, in the same order. In a pipeline, give input_args and "
            "output_args to every PipelineStage or to none."
        ),
    )


def _mesh(mesh: Mesh | int | str) -> Mesh:
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    return checked_mesh(Mesh((("dp", mesh),)) if isinstance(mesh, int) else mesh, str(mesh))


def _estimated(build: Build, mesh: Mesh, rank: int, options: dict[str, Any], post: Post) -> RankEstimate:
    from torch.distributed.device_mesh import init_device_mesh

    with fake_group(rank, mesh.world_size, post), MemoryEstimator(**options) as estimator:
        kept = build(
            estimator, init_device_mesh(estimator.device.type, mesh.shape, mesh_dim_names=mesh.names)
        )
    del kept
    return RankEstimate(rank, mesh.coordinate(rank), estimator.estimate(), estimator.trace_result())


Letter = tuple[int, int, int]
"""(sender, receiver, number): the number counts the letters from this sender to this receiver, from 0."""


class Waiting(BaseException):
    """Raised where a rank needs a letter that was not sent yet.

    A BaseException, so that the program's `except Exception` does not catch it.
    """

    def __init__(self, letter: Letter) -> None:
        super().__init__(letter)
        self.letter = letter


class Post:
    """The objects that the ranks of a job have sent so far."""

    def __init__(self) -> None:
        self._sent: dict[Letter, list[Any]] = {}
        self._rank = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def begin(self, rank: int) -> None:
        """Begin the program of a rank, or begin it again."""
        self._rank = rank
        self._counts.clear()

    def send(self, receiver: int, objects: list[Any]) -> None:
        """Send objects from the running rank."""
        self._sent[self._next(self._rank, receiver)] = list(objects)

    def receive(self, sender: int) -> list[Any]:
        """Return the next objects that a sender sent to the running rank.

        Raises:
            Waiting: the letter was not sent yet.
        """
        letter = self._next(sender, self._rank)
        if letter not in self._sent:
            raise Waiting(letter)
        return self._sent[letter]

    def has(self, letter: Letter) -> bool:
        """Return whether a letter was sent."""
        return letter in self._sent

    def _next(self, sender: int, receiver: int) -> Letter:
        number = self._counts[sender, receiver]
        self._counts[sender, receiver] += 1
        return (sender, receiver, number)


OLDEST_TORCH = "2.13"
"""The fake process group, meshes and FSDP2 do not work together in 2.6; versions in between are untested."""

_KEPT = ("group_desc", "use_local_synchronization")
"""Keyword arguments that a program's `new_group` call passes on; the backend and its options are dropped."""


@contextmanager
def fake_group(rank: int, world_size: int, post: Post) -> Iterator[None]:
    """Make this process a rank of a job until the `with` block ends.

    Args:
        rank, world_size: the values that `torch.distributed` reports.
        post: carries the objects that ranks send each other.

    Raises:
        MemPluginError: PyTorch has no torch.distributed or is too old, or a process group exists already.
        Waiting: inside the block, where the program receives an object that was not sent yet.
    """
    if not dist.is_available():
        raise MemPluginError(
            "Estimating several ranks needs torch.distributed, which this build of PyTorch does not have.",
            where="estimate_ranks",
            fix="Use a build that has it, or estimate one rank with MemoryEstimator.",
        )
    if torch.torch_version.TorchVersion(torch.__version__) < OLDEST_TORCH:
        raise MemPluginError(
            f"Estimating several ranks needs PyTorch {OLDEST_TORCH} or newer; this is {torch.__version__}.",
            where="estimate_ranks",
            fix="Upgrade PyTorch, or estimate one rank with MemoryEstimator.",
        )
    if dist.is_initialized():
        raise MemPluginError(
            f"This process is already rank {dist.get_rank()} of a process group.",
            where="estimate_ranks",
            fix="Estimate in another process, or call torch.distributed.destroy_process_group() first.",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook, patches = sys.excepthook, Patches()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        _forget_other_ranks()
        _stay_fake(patches)
        _hold_what_is_on_its_way(patches)
        post.begin(rank)
        _carry_objects(patches, post)
        yield
    finally:
        patches.undo()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook  # init_process_group put the rank's name into it
        _forget_other_ranks()


def _stay_fake(patches: Patches) -> None:
    """Make calls of `new_group` with any backend, and of `init_process_group`, keep the fake group."""
    original: Any = distributed_c10d.new_group

    @functools.wraps(original)
    def new_group(ranks: Any = None, *_: Any, **keywords: Any) -> Any:
        kept = {name: keywords[name] for name in _KEPT if name in keywords}
        return original(ranks, **kept)

    for owner in (dist, distributed_c10d):
        patches.set(owner, "new_group", new_group)
        patches.set(owner, "init_process_group", do_nothing)


def _hold_what_is_on_its_way(patches: Patches) -> None:
    """Make the fake group's works keep their tensors alive, as other groups' works do.

    See SendWork and RecvWork in ProcessGroupGloo.hpp.
    """
    for name in ("send", "recv", "allreduce"):
        patches.set(dist.ProcessGroup, name, _holding(getattr(dist.ProcessGroup, name)))


def _holding(call: Any) -> Any:
    def run(group: Any, tensors: Sequence[torch.Tensor], *args: Any, **keywords: Any) -> Underway:
        call(group, tensors, *args, **keywords)
        return Underway(tensors)

    return run


def _carry_objects(patches: Patches, post: Post) -> None:
    """Deliver objects to the ranks that they are sent to: pipeline stages exchange shapes that way.

    Objects that a rank collects from all are assumed to be like its own.
    """

    def all_gather(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            all_gather(object_gather_list, obj)

    def send(
        object_list: list[Any], dst: Any = None, group: Any = None, *_: Any, group_dst: Any = None, **__: Any
    ) -> None:
        post.send(_global(dst, group, group_dst), object_list)

    def receive(
        object_list: list[Any], src: Any = None, group: Any = None, *_: Any, group_src: Any = None, **__: Any
    ) -> int:
        sender = _global(src, group, group_src)
        object_list[:] = post.receive(sender)
        return sender

    for owner in (dist, distributed_c10d):
        patches.set(owner, "send_object_list", send)
        patches.set(owner, "recv_object_list", receive)
        patches.set(owner, "all_gather_object", all_gather)
        patches.set(owner, "gather_object", gather)
        patches.set(owner, "broadcast_object_list", do_nothing)


def _global(rank: int | None, group: Any, group_rank: int | None) -> int:
    """Return the global rank for a rank that is given globally or within a group.

    Raises:
        MemPluginError: neither is given.
    """
    if rank is not None:
        return rank
    if group_rank is None:
        raise MemPluginError(
            "The program receives an object from any rank, but an estimate cannot know which rank that is.",
            where="recv_object_list",
            fix="Name the sender: src=... or group_src=...",
        )
    return dist.get_global_rank(group or distributed_c10d._get_default_group(), group_rank)


def _forget_other_ranks() -> None:
    """Clear DTensor's caches, which hold sharding results with the coordinates of one rank."""
    from torch.distributed.tensor import DTensor, _random

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    _random._rng_tracker = None
