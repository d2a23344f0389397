"""Changes that could lower the peak of a step, and the largest batch that fits; each is estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from tb_memplugin.errors import MemPluginError
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


MOST = 1 << 20
"""The largest batch that is tried."""

SHARE = 64
"""Until a batch fails, tries grow by at least 1/SHARE of the last one, and by twice the previous step."""


@dataclass(frozen=True, slots=True)
class Need:
    """The total bytes that a batch takes, and whether it fits."""

    bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest batch that fits; 0 if not even one sample does.

    Attributes:
        batch: the largest batch that fits; `batch + 1` was estimated and does not fit, or exceeds `most`.
        needs: (batch, need) of every batch that was estimated, by size of the batch.
    """

    batch: int
    needs: tuple[tuple[int, Need], ...]

    @property
    def estimates(self) -> int:
        """The number of estimates that the search took."""
        return len(self.needs)


def max_batch(need_of: Callable[[int], Need], limit_bytes: int, most: int = MOST) -> MaxBatch:
    """Search for the largest batch that fits.

    The next batch to try is where the line through the two nearest ones meets the limit, or the middle if
    the last try did not halve the open interval. The result does not rely on that line: the batch and the
    next larger one are both estimated. If a batch fits, all smaller ones are assumed to fit.

    Args:
        need_of: returns the estimate of one batch.
        limit_bytes: bytes that may be reserved; this only guides the search.

    Raises:
        MemPluginError: `most` is less than 1.
    """
    if most < 1:
        raise MemPluginError(f"{most} is not a batch size.", where="--find-max-batch")
    needs: dict[int, Need] = {}
    fits, fails, batch, stride = 0, most + 1, 1, 0
    while fails - fits > 1:
        question = fails - fits
        need = needs[batch] = need_of(batch)
        fits, fails = (batch, fails) if need.fits else (fits, batch)
        aim = _on_the_line(needs, fits, fails, limit_bytes)
        if fails not in needs:
            stride = max(2 * stride, 1, fits // SHARE) if len(needs) > 2 else 0
            batch = min(max(aim, fits + stride), most)
        else:
            batch = aim if fails - fits <= question // 2 else (fits + fails) // 2
    return MaxBatch(fits, tuple(sorted(needs.items())))


def _on_the_line(needs: dict[int, Need], fits: int, fails: int, limit_bytes: int) -> int:
    """Return the batch at which the line through the two nearest ones meets the limit.

    It is strictly between `fits` and `fails`.
    """
    tried = sorted(needs)
    if len(tried) == 1:
        return min(2, fails - 1)
    left, right = (fits, fails) if fails in needs and fits in needs else tried[-2:]
    growth = (needs[right].bytes - needs[left].bytes) / (right - left)
    guess = left + int((limit_bytes - needs[left].bytes) / growth) if growth > 0 else 8 * fits
    return min(max(guess, fits + 1), fails - 1)
