"""The layout of a job's ranks in a mesh with named dimensions, such as dp=8,tp=2."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tb_memplugin.errors import MemPluginError

_DIMENSION = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]{1,7})\s*")
MOST_RANKS = 1 << 20
"""The largest number of ranks in a mesh."""

PIPELINE = "pp"
"""The dimension whose ranks are pipeline stages; each stage runs a different program."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks. The last dimension varies fastest, as in `torch.distributed.init_device_mesh`.

    Attributes:
        dimensions: (name, size) of each, from the outermost to the innermost.
    """

    dimensions: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions' names."""
        return tuple(name for name, _ in self.dimensions)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions' sizes."""
        return tuple(size for _, size in self.dimensions)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    def size(self, name: str) -> int:
        """Return the size of a dimension; 1 if the mesh does not have it."""
        return dict(self.dimensions).get(name, 1)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinate, one number for each dimension."""
        return tuple(map(int, np.unravel_index(rank, self.shape)))

    @property
    def corners(self) -> tuple[int, ...]:
        """The ranks that are first or last in every dimension, except that all stages (`pp`) are included.

        Torch shards into chunks of equal size, the last of which may be smaller or empty (`torch.chunk`). If
        all ranks run the same program, the corners include those with the most and the least memory. Pipeline
        stages run different programs.
        """
        ends = [range(size) if name == PIPELINE else sorted({0, size - 1}) for name, size in self.dimensions]
        return tuple(np.ravel_multi_index(np.ix_(*ends), self.shape).ravel().tolist())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dimensions)


def parse_mesh(text: str) -> Mesh:
    """Parse a mesh such as `dp=8,tp=2`.

    Raises:
        MemPluginError: the text has another form, a name appears twice, a size is 0, or there are too many
            ranks.
    """
    return checked_mesh(Mesh(tuple(_dimensions(text))), text)


def checked_mesh(mesh: Mesh, text: str) -> Mesh:
    """Return the mesh if it is valid. `text` names it in errors.

    Raises:
        MemPluginError: a name appears twice, a size is 0, or there are no or too many ranks.
    """
    fix = "Write name=size for each dimension, as in dp=8,tp=2."
    if len(set(mesh.names)) < len(mesh.names):
        raise MemPluginError(f"A dimension appears twice in the mesh {text[:80]!r}.", where="mesh", fix=fix)
    if not mesh.dimensions or min(mesh.shape) < 1 or mesh.world_size > MOST_RANKS:
        raise MemPluginError(
            f"The mesh {text[:80]!r} has {mesh.world_size if mesh.dimensions else 0:,} ranks.",
            where="mesh",
            fix=f"{fix} A mesh has 1 to {MOST_RANKS:,} ranks.",
        )
    return mesh


def _dimensions(text: str) -> Iterator[tuple[str, int]]:
    for part in text.split(","):
        match = _DIMENSION.fullmatch(part)
        if match is None:
            raise MemPluginError(
                f"The mesh {text[:80]!r} cannot be read at {part[:40]!r}.",
                where="mesh",
                fix="Write name=size for each dimension, as in dp=8,tp=2.",
            )
        yield match[1], int(match[2])
