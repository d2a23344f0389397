"""Find the largest batch that fits with few estimates: memory grows almost linearly with the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tb_memplugin.errors import MemPluginError

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
        most: the largest batch to try.

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
