"""Estimate the ranks of a distributed job one after the other, all in this process."""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.estimation import Estimate
from tb_memplugin.estimate.answer.estimator import WORKER, MemoryEstimator
from tb_memplugin.estimate.ranks.fake_group import Post, Waiting, fake_group
from tb_memplugin.estimate.ranks.mesh import PIPELINE, Mesh, checked_mesh, parse_mesh
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
