"""The largest batch that fits, found with few estimates: memory grows almost in a line with the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tb_memplugin.errors import MemPluginError

MOST = 1 << 20
"""The largest batch that is looked for."""

SHARE = 64
"""How far beyond a batch that fits the next try is at least: this part of it, then twice as far."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a batch takes in all, bytes, and whether it fits."""

    bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest batch that fits; 0 if not even one sample does.

    Attributes:
        batch: it fits, and `batch + 1` was seen not to; or it is the most that was looked for.
        needs: what every batch that was tried took, in the order of batches.
    """

    batch: int
    needs: tuple[tuple[int, Need], ...]

    @property
    def estimates(self) -> int:
        """How many estimates it took."""
        return len(self.needs)


def max_batch(need_of: Callable[[int], Need], limit_bytes: int, most: int = MOST) -> MaxBatch:
    """Close in on the largest batch that fits.

    The next batch to try is where the line through the two nearest ones meets the limit, or halfway where
    that did not halve what is in question. The answer is not from that line: it and the next larger batch are
    both estimated. A batch that fits is taken to mean that all smaller do.

    Args:
        need_of: the estimate of one batch.
        limit_bytes: what may be reserved; it only guides the search.
        most: the largest batch to try.

    Raises:
        MemPluginError: `most` is less than 1.
    """
    if most < 1:
        raise MemPluginError(f"A batch of {most} is none.", where="--find-max-batch")
    seen: dict[int, Need] = {}
    fits, fails, batch, stride = 0, most + 1, 1, 0
    while fails - fits > 1:
        question = fails - fits
        need = seen[batch] = need_of(batch)
        fits, fails = (batch, fails) if need.fits else (fits, batch)
        aim = _on_the_line(seen, fits, fails, limit_bytes)
        if fails not in seen:
            stride = max(2 * stride, 1, fits // SHARE) if len(seen) > 2 else 0
            batch = min(max(aim, fits + stride), most)
        else:
            batch = aim if fails - fits <= question // 2 else (fits + fails) // 2
    return MaxBatch(fits, tuple(sorted(seen.items())))


def _on_the_line(seen: dict[int, Need], fits: int, fails: int, limit_bytes: int) -> int:
    """Where the line through the two nearest batches meets the limit, strictly between `fits` and `fails`."""
    tried = sorted(seen)
    if len(tried) == 1:
        return min(2, fails - 1)
    left, right = (fits, fails) if fails in seen and fits in seen else tried[-2:]
    growth = (seen[right].bytes - seen[left].bytes) / (right - left)
    guess = left + int((limit_bytes - seen[left].bytes) / growth) if growth > 0 else 8 * fits
    return min(max(guess, fits + 1), fails - 1)
