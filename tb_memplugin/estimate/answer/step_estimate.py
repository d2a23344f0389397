"""Estimate one step of a target on a GPU. Each estimate builds and runs the target anew on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.changes import (
    MOST_GPUS,
    SHARDED,
    Candidate,
    Change,
    Changes,
    MaxBatch,
    Need,
    candidates,
    max_batch,
    on_gpus,
    together,
)
from tb_memplugin.estimate.answer.config_target import ConfigTarget
from tb_memplugin.estimate.answer.estimator import MemoryEstimator
from tb_memplugin.estimate.answer.script import (
    LIMIT_S,
    STEPS,
    Ending,
    Program,
    StartsRanks,
    as_one_rank,
    import_libraries,
    run_program,
)
from tb_memplugin.estimate.answer.workload import Ran, Target, Workload, run
from tb_memplugin.estimate.ranks.mesh import PIPELINE, parse_mesh
from tb_memplugin.estimate.ranks.pipeline import Pipelining, run_stage
from tb_memplugin.estimate.ranks.rank_estimates import RankEstimates, estimate_ranks
from tb_memplugin.estimate.ranks.sharded_model import EXPERTS, even_routing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tb_memplugin.estimate.answer.estimation import Estimate
    from tb_memplugin.estimate.gpu_spec import GpuSpec


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The estimate of a step; for several ranks, that of the worst rank.

    `workload` is the one that was run; its optimizer is None if the target brought its own. `ranks` is None
    for a single rank.
    """

    target: str
    workload: Workload
    gpu: GpuSpec
    estimate: Estimate
    notes: tuple[str, ...]
    ranks: RankEstimates | None = None


def estimate_program(
    program: Program,
    gpu: GpuSpec,
    *,
    conf: str = "",
    hints: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    limit_s: int = LIMIT_S,
    logdir: str | None = None,
) -> StepEstimate:
    """Run a program on fake tensors, unchanged, and estimate its memory; of several ranks as rank 0.

    Raises:
        MemPluginError: the program failed, or cannot run on fake tensors.
    """
    import_libraries()
    endings: list[Ending] = []

    def run_in(estimator: MemoryEstimator, _mesh: object = None) -> None:
        if logdir is not None:
            estimator.keep_stacks()
        with as_one_rank(program) as notes:
            endings.append(run_program(program, estimator, steps=steps, limit_s=limit_s))
        endings[-1].notes.extend(notes)

    options: dict[str, Any] = {"gpu": gpu, "conf": conf, "hints": hints}
    ranks = None
    if program.ranks is not None:
        ranks = estimate_ranks(run_in, program.ranks, (0,), **options)
        estimate = ranks.worst.estimate
        if logdir is not None:
            ranks.save(logdir)
    else:
        try:
            with MemoryEstimator(device="cuda", **options) as estimator:
                run_in(estimator)
        except StartsRanks as begun:
            program = replace(program, ranks=begun.ranks, ranks_per_node=begun.ranks)
            return estimate_program(program, steps=steps, limit_s=limit_s, logdir=logdir, **options)
        estimate = estimator.estimate()
        if logdir is not None:
            estimator.save(logdir)
    estimate = replace(estimate, phases=highest(estimate.phases))
    notes = (f"{endings[0].why}.", *endings[0].notes, *estimate.notes)
    return StepEstimate(program.name, Workload(inference=not endings[0].steps), gpu, estimate, notes, ranks)


@dataclass(frozen=True, slots=True)
class StepEstimator:
    """Estimates one target on one GPU, or on each GPU of a mesh such as `dp=8,tp=2`.

    `conf` is the text of PYTORCH_CUDA_ALLOC_CONF; `hints` are those of hints.py; `ranks` are the ranks of the
    mesh to run, None for its corners. `tell` is called with the options of each size and change before it is
    estimated.
    """

    target: Target
    gpu: GpuSpec
    conf: str = ""
    mesh: str | None = None
    pipelining: Pipelining = field(default_factory=Pipelining)
    hints: Mapping[str, Any] | None = None
    ranks: tuple[int, ...] | None = None
    tell: Callable[[str], object] = str

    def step(self, workload: Workload, *, conf: str | None = None, logdir: str | None = None) -> StepEstimate:
        """Estimate a step. `conf` overrides `self.conf`; the trace is written to `logdir` if that is given.

        Raises:
            MemPluginError: the target cannot be built or run at this size, or on a mesh.
        """
        self._refuse_a_pipeline_in_vain()
        estimated = self._alone if self.mesh is None else self._ranks
        result = estimated(workload, self.conf if conf is None else conf, logdir)
        return replace(result, estimate=replace(result.estimate, phases=highest(result.estimate.phases)))

    def _alone(self, workload: Workload, conf: str, logdir: str | None) -> StepEstimate:
        with MemoryEstimator(device="cuda", gpu=self.gpu, conf=conf, hints=self.hints) as estimator:
            ran = run(self.target, workload, estimator)
        if logdir is not None:
            estimator.save(logdir)
        estimate = estimator.estimate()
        return StepEstimate(self.target.name, ran.workload, self.gpu, estimate, (*ran.notes, *estimate.notes))

    def _ranks(self, workload: Workload, conf: str, logdir: str | None) -> StepEstimate:
        if "mesh" not in self.target.takes and not self._stage_ranks:
            raise MemPluginError(
                f"{self.target.name} has no parameter named mesh, so it can only be divided into "
                "pipeline stages.",
                where="--mesh",
                fix=(
                    "Use --mesh pp=4 or pp=4,dp=2. Or give the function a parameter named mesh, and shard "
                    "the model in it as your job does."
                ),
            )
        ran: list[Ran] = []

        def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> None:
            if self._stage_ranks:
                ran.append(run_stage(self.target, workload, estimator, mesh, self.pipelining))
            else:
                ran.append(run(self.target, workload, estimator, mesh))

        hints, routing = self._routing(workload)
        ranks = estimate_ranks(build, self.mesh or "", self.ranks, gpu=self.gpu, conf=conf, hints=hints)
        if logdir is not None:
            ranks.save(logdir)
        worst = ranks.worst.estimate
        notes = (*ran[0].notes, *routing, *worst.notes)
        return StepEstimate(self.target.name, ran[0].workload, self.gpu, worst, notes, ranks)

    def _routing(self, workload: Workload) -> tuple[Any, tuple[str, ...]]:
        """Return hints and notes on how tokens are sent to ranks, where experts are divided over ranks."""
        mesh = parse_mesh(self.mesh or "")
        if not isinstance(self.target, ConfigTarget) or EXPERTS not in mesh.names:
            return self.hints, ()
        size, tensors = self.target.settled(workload), mesh.size("tp")
        at_once = (size.batch or 1) // self._least_batch if workload.batch else 1
        tokens = max(at_once, 1) * (size.seq or 1) / tensors
        hints, note = even_routing(self.target.config, tokens, mesh.size(EXPERTS) * tensors, self.hints)
        return hints, (note,)

    def changes(self, base: StepEstimate) -> Changes:
        """Estimate the changes that could lower the reserved memory of a step, the largest saving first.

        If the step does not fit and no single change makes it fit, all changes together are added, and
        sharding over the fewest GPUs (2, 4, 8, ...) on which a config's model would fit. Changes that save
        nothing are left out. Changes that are impossible for this target are returned with the reason.
        """
        changes: list[Change] = []
        possible: list[Candidate] = []
        impossible = []
        for candidate in candidates(base.workload, self.conf, self.target.takes):
            try:
                changes.append(self._saved_by(candidate, base))
            except MemPluginError as error:
                impossible.append((candidate.options, error.what))
                continue
            possible.append(candidate)
        saving = sorted(
            (change for change in changes if change.saved_bytes > 0), key=lambda change: -change.saved_bytes
        )
        if base.estimate.fits is False and not any(change.fits for change in saving):
            with suppress(MemPluginError):  # an impossible change is no advice
                if len(possible) > 1:
                    saving.append(self._saved_by(together(possible, base.workload), base))
            with suppress(MemPluginError):
                if self.mesh is None and isinstance(self.target, ConfigTarget):
                    saving.append(self._sharded(base, base.workload))
                    recomputing = self._sharded(base, replace(base.workload, checkpointing=True))
                    if recomputing.what != saving[-1].what:  # it takes fewer GPUs
                        saving.append(recomputing)
        return Changes(tuple(saving), tuple(impossible))

    def _saved_by(self, candidate: Candidate, base: StepEstimate) -> Change:
        self.tell(candidate.options)
        largest_shard = (0,)
        alone = candidate.mesh is None
        estimator = self if alone else replace(self, mesh=candidate.mesh, ranks=largest_shard)
        other = estimator.step(candidate.workload, conf=candidate.conf).estimate
        saved = base.estimate.peak_reserved_bytes - other.peak_reserved_bytes
        return Change(candidate.name, candidate.options, saved, other.peak_reserved_bytes, other.fits)

    def _sharded(self, base: StepEstimate, workload: Workload) -> Change:
        """Shard over enough GPUs for the sharded part to fit beside the rest, then over more if needed."""
        sharded = sum(size for name, size in base.estimate.breakdown if name in SHARDED)
        room, gpus = self.gpu.usable_bytes - (base.estimate.peak_reserved_bytes - sharded), 2
        while gpus < MOST_GPUS and sharded > gpus * room:
            gpus *= 2
        while True:
            change = self._saved_by(on_gpus(gpus, workload, self.conf), base)
            if change.fits or gpus >= MOST_GPUS:
                return change
            gpus *= 2

    def max_batch(self, base: StepEstimate) -> MaxBatch:
        """Find the largest batch with which a step fits, all else being equal.

        Raises:
            MemPluginError: the target has no batch parameter.
        """
        self.refuse_without_batch()
        estimates = {base.workload.batch: base.estimate}

        def need_of(batch: int) -> Need:
            self.tell(f"--batch {batch}")
            estimate = estimates.get(batch) or self.step(replace(base.workload, batch=batch)).estimate
            return Need(estimate.peak_reserved_bytes, bool(estimate.fits))

        unit = self._least_batch
        result = max_batch(lambda count: need_of(unit * count), self.gpu.usable_bytes)
        return MaxBatch(unit * result.batch, tuple((unit * count, need) for count, need in result.needs))

    def refuse_without_batch(self) -> None:
        """Raise before anything runs if the largest batch of the target cannot be found.

        Raises:
            MemPluginError: the target has no batch parameter.
        """
        if "batch" not in self.target.takes:
            raise MemPluginError(
                f"{self.target.name} has no parameter named batch, so the largest batch cannot be found.",
                where="--find-max-batch",
                fix="Give the function a parameter named batch.",
            )

    @property
    def _least_batch(self) -> int:
        """The number of which every batch is a multiple: the micro-batches of a pipeline, 1 without one."""
        return self.pipelining.micro_batches_on(self._stage_ranks) if self._stage_ranks else 1

    def _refuse_a_pipeline_in_vain(self) -> None:
        """Raise if a schedule or micro-batches are given that would have no effect."""
        if self.pipelining != Pipelining() and not self._stage_ranks:
            raise MemPluginError(
                "--schedule and --micro-batches are for a pipeline, and none is divided here.",
                where="--schedule" if self.pipelining.micro_batches is None else "--micro-batches",
                fix="Add --mesh pp=4, or leave the option out.",
            )

    @property
    def _stage_ranks(self) -> int:
        """The number of ranks for which the estimator cuts pipeline stages out of the target.

        It is 0 if there is no pipeline, or if the target makes the stages.
        """
        is_cut = isinstance(self.target, ConfigTarget) or "mesh" not in self.target.takes
        sizes = dict(parse_mesh(self.mesh).dimensions) if is_cut and self.mesh is not None else {}
        return sizes.get(PIPELINE, 0)


def highest(phases: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return the highest value of each phase over its repetitions, in order of first appearance."""
    names = dict.fromkeys(name for name, _ in phases)
    return tuple((name, max(peak for other, peak in phases if other == name)) for name in names)
