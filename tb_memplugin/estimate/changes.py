"""What could lower the peak of a step. Each is tried by an estimate of its own: no saving is guessed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from tb_memplugin.estimate.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.estimate.workload import Workload

FUSED = {"adamw": "adamw-fused", "adam": "adam-fused"}
SMALLER_STATE = {"adamw": "adafactor", "adamw-fused": "adafactor", "adam": "adafactor", "momentum": "sgd"}
"""Optimizers that do the same in one kernel, or that keep less for each parameter."""

SHARDED = ("parameter", "gradient", "optimizer_state", "temporary")
"""What `fully_shard` divides, by category; at the peak of a large model temporaries are the optimizer's."""

MOST_GPUS = 64
"""The most over which a model is sharded to see whether it fits then."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that saves memory: the options that make it, and the most that is reserved then; bytes."""

    what: str
    options: str
    saved_bytes: int
    peak_reserved_bytes: int
    fits: bool | None

    @property
    def label(self) -> str:
        """What a table calls it: its option, unless it is several."""
        if self.options.count("--") > 1:
            return self.what
        return f"{self.options} ({self.what})" if self.options.startswith("--mesh") else self.options


@dataclass(frozen=True, slots=True)
class Changes:
    """What was tried: changes that save memory, and (options, why) of what cannot be done.

    Single changes come first, the most saving first; then all of them together, and more GPUs.
    """

    saving: tuple[Change, ...]
    impossible: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change to try; `conf` are the settings of the allocator, `mesh` the ranks, None for one."""

    what: str
    options: str
    workload: Workload
    conf: str
    mesh: str | None = None


def candidates(workload: Workload, conf: str, takes: frozenset[str]) -> Iterator[Candidate]:
    """What is worth trying.

    Args:
        workload: the step as it is; the optimizer is None if the target brings its own.
        conf: settings of the allocator as they are.
        takes: which sizes the target follows.
    """
    for what, options, changed in _of_step(workload, takes):
        yield Candidate(what, options, changed, conf)
    if not AllocatorSettings.from_conf(conf).expandable_segments:
        kept = ",".join(part for part in conf.split(",") if part and "expandable_segments" not in part)
        other = f"{kept},expandable_segments:True".lstrip(",")
        yield Candidate("segments that grow", f"--alloc-conf {other}", workload, other)


def together(found: Sequence[Candidate], base: Workload) -> Candidate:
    """Several changes of one step at once; of two to the same option the later one."""
    options: dict[str, str] = {}
    workload, conf = base, ""
    for one in found:
        options[one.options.partition(" ")[0]] = one.options
        names = [field.name for field in fields(Workload)]
        changed = [name for name in names if getattr(one.workload, name) != getattr(base, name)]
        workload = replace(workload, **{name: getattr(one.workload, name) for name in changed})
        conf = one.conf
    return Candidate("all together", " ".join(options.values()), workload, conf)


def on_gpus(count: int, base: Workload, conf: str) -> Candidate:
    """The same step with the model sharded over GPUs, each with a batch of its own."""
    return Candidate(f"each of {count} GPUs", f"--mesh fsdp={count}", base, conf, f"fsdp={count}")


def _of_step(workload: Workload, takes: frozenset[str]) -> Iterator[tuple[str, str, Workload]]:
    batch = workload.batch or 1
    if "batch" in takes and batch > 1:
        yield "half the batch", f"--batch {batch // 2}", replace(workload, batch=batch // 2)
    if workload.dtype == "fp32":
        yield "numbers of two bytes", "--dtype bf16", replace(workload, dtype="bf16")
    if workload.inference:
        return
    if not workload.checkpointing:
        yield "activation checkpointing", "--checkpointing", replace(workload, checkpointing=True)
    for what, others in (("a fused optimizer", FUSED), ("less optimizer state", SMALLER_STATE)):
        if workload.optimizer in others:
            other = others[workload.optimizer]
            yield what, f"--optimizer {other}", replace(workload, optimizer=other)
