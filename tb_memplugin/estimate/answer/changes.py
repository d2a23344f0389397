"""Changes that could lower the peak of a step. Each one is estimated separately: no saving is guessed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from tb_memplugin.estimate.answer.workload import Workload
from tb_memplugin.simulator.allocator_settings import AllocatorSettings

FUSED = {"adamw": "adamw-fused", "adam": "adam-fused"}
SMALLER_STATE = {"adamw": "adafactor", "adamw-fused": "adafactor", "adam": "adafactor", "momentum": "sgd"}
"""For an optimizer: the same one in a fused kernel, and one that keeps less state for each parameter."""

SHARDED = ("parameter", "gradient", "optimizer_state", "temporary")
"""Categories whose memory `fully_shard` divides. Temporaries at a large model's peak are the optimizer's."""

MOST_GPUS = 64
"""The largest number of GPUs over which a model is sharded to see whether it then fits."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that saves memory.

    `options` are the command-line options that make it; `saved_bytes` is how much lower the peak of reserved
    memory is with it, and `peak_reserved_bytes` that peak.
    """

    what: str
    options: str
    saved_bytes: int
    peak_reserved_bytes: int
    fits: bool | None

    @property
    def label(self) -> str:
        """The name in a table: the option, or `what` where there are several options."""
        if self.options.count("--") > 1:
            return self.what
        return f"{self.options} ({self.what})" if self.options.startswith("--mesh") else self.options


@dataclass(frozen=True, slots=True)
class Changes:
    """The result of the trials: changes that save memory, and (options, reason) of those that are impossible.

    Single changes come first, the one that saves the most at the top; then all of them together; then more
    GPUs.
    """

    saving: tuple[Change, ...]
    impossible: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change to try. `conf` holds the allocator settings, `mesh` the mesh of ranks; None for one rank."""

    name: str
    options: str
    workload: Workload
    conf: str
    mesh: str | None = None


def candidates(workload: Workload, conf: str, takes: frozenset[str]) -> Iterator[Candidate]:
    """Yield the changes that are worth trying.

    Args:
        workload: the current step; its optimizer is None if the target brings its own.
        conf: the current allocator settings.
        takes: the sizes that the target can change.
    """
    for name, options, changed in _of_step(workload, takes):
        yield Candidate(name, options, changed, conf)
    if not AllocatorSettings.from_conf(conf).expandable_segments:
        kept = ",".join(part for part in conf.split(",") if part and "expandable_segments" not in part)
        other = f"{kept},expandable_segments:True".lstrip(",")
        yield Candidate("expandable segments", f"--alloc-conf {other}", workload, other)


def together(parts: Sequence[Candidate], base: Workload) -> Candidate:
    """Combine several changes of one step. Where two set the same option, the later one counts."""
    options: dict[str, str] = {}
    workload, conf = base, ""
    in_16_bits = any(part.workload.dtype != base.dtype for part in parts)
    for part in parts:
        if in_16_bits and part.workload.autocast != base.autocast:
            continue  # it has no effect then
        options[part.options.partition(" ")[0]] = part.options
        names = [field.name for field in fields(Workload)]
        changed = [name for name in names if getattr(part.workload, name) != getattr(base, name)]
        workload = replace(workload, **{name: getattr(part.workload, name) for name in changed})
        conf = part.conf
    return Candidate("all together", " ".join(options.values()), workload, conf)


def on_gpus(count: int, base: Workload, conf: str) -> Candidate:
    """Return the same step with the model sharded over `count` GPUs, each with its own batch."""
    options = f"--mesh fsdp={count}" + (" --checkpointing" if base.checkpointing else "")
    return Candidate(f"on each of {count} GPUs", options, base, conf, f"fsdp={count}")


def _of_step(workload: Workload, takes: frozenset[str]) -> Iterator[tuple[str, str, Workload]]:
    batch = workload.batch or 1
    if "batch" in takes and batch > 1:
        yield "half the batch", f"--batch {batch // 2}", replace(workload, batch=batch // 2)
    if workload.dtype == "fp32":
        name = "16-bit parameters" if workload.inference else "training in 16 bits: small updates are lost"
        yield name, "--dtype bf16", replace(workload, dtype="bf16", autocast=None)
    if workload.inference:
        return
    if workload.dtype in (None, "fp32") and workload.autocast is None:
        yield "autocast", "--autocast bf16", replace(workload, autocast="bf16")
    if not workload.free_output:
        yield "del output before backward", "--free-output", replace(workload, free_output=True)
    if not workload.checkpointing:
        yield "activation checkpointing", "--checkpointing", replace(workload, checkpointing=True)
    for name, replacements in (("a fused optimizer", FUSED), ("less optimizer state", SMALLER_STATE)):
        if workload.optimizer in replacements:
            other = replacements[workload.optimizer]
            yield name, f"--optimizer {other}", replace(workload, optimizer=other)
