"""What could lower the peak of a step. Each is tried by an estimate of its own: no saving is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tb_memplugin.estimate.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.estimate.workload import Workload

FUSED = {"adamw": "adamw-fused", "adam": "adam-fused"}
SMALLER_STATE = {"adamw": "adafactor", "adamw-fused": "adafactor", "adam": "adafactor", "momentum": "sgd"}
"""Optimizers that do the same in one kernel, or that keep less for each parameter."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that saves memory: the options that make it, and the most that is reserved then; bytes."""

    what: str
    options: str
    saved_bytes: int
    peak_reserved_bytes: int
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Changes:
    """What was tried: changes that save memory, the most first, and (options, why) of what cannot be done."""

    saving: tuple[Change, ...]
    impossible: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change to try; `conf` are the settings of the allocator."""

    what: str
    options: str
    workload: Workload
    conf: str


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
