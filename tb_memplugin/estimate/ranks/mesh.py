"""How the ranks of a job are laid out: named dimensions, such as dp=8,tp=2."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tb_memplugin.errors import MemPluginError

_DIMENSION = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]{1,7})\s*")
MOST_RANKS = 1 << 20
"""The largest world that can be asked for."""

PIPELINE = "pp"
"""The dimension whose ranks are stages of a pipeline, each another program."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, the last dimension the fastest, as `torch.distributed.init_device_mesh` counts them.

    Attributes:
        dimensions: (name, size) from the outermost to the innermost.
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
        """How many ranks there are."""
        return math.prod(self.shape)

    def size(self, name: str) -> int:
        """The size of a dimension; 1 for one that is not there."""
        return dict(self.dimensions).get(name, 1)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands, a number for each dimension."""
        found = []
        for size in reversed(self.shape):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))

    @property
    def corners(self) -> tuple[int, ...]:
        """The ranks that are first or last in every dimension, and all of a pipeline (`pp`).

        Torch shards in chunks of one size, of which the last may be smaller or empty (`torch.chunk`): where
        all ranks run the same program, the most and the least are among these. Stages run each their own.
        """
        ends = [range(size) if name == PIPELINE else sorted({0, size - 1}) for name, size in self.dimensions]
        return tuple(sorted(self._rank(place) for place in itertools.product(*ends)))

    def _rank(self, place: tuple[int, ...]) -> int:
        rank = 0
        for size, here in zip(self.shape, place, strict=True):
            rank = rank * size + here
        return rank

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dimensions)


def parse_mesh(text: str) -> Mesh:
    """Read `dp=8,tp=2`.

    Raises:
        MemPluginError: it is not written like that, a name stands there twice, or it is too large.
    """
    return checked_mesh(Mesh(tuple(_dimensions(text))), text)


def checked_mesh(mesh: Mesh, text: str) -> Mesh:
    """The mesh, if it can be.

    Raises:
        MemPluginError: a name stands there twice, a size is 0, or there are too many ranks.
    """
    fix = "Write name=size for each dimension, as in dp=8,tp=2."
    if len(set(mesh.names)) < len(mesh.names):
        raise MemPluginError(f"A dimension stands twice in the mesh {text[:80]!r}.", where="mesh", fix=fix)
    if not mesh.dimensions or min(mesh.shape) < 1 or mesh.world_size > MOST_RANKS:
        raise MemPluginError(
            f"The mesh {text[:80]!r} has {mesh.world_size if mesh.dimensions else 0:,} ranks.",
            where="mesh",
            fix=f"{fix} There must be 1 to {MOST_RANKS:,}.",
        )
    return mesh


def _dimensions(text: str) -> Iterator[tuple[str, int]]:
    for part in text.split(","):
        found = _DIMENSION.fullmatch(part)
        if found is None:
            raise MemPluginError(
                f"The mesh {text[:80]!r} cannot be read at {part[:40]!r}.",
                where="mesh",
                fix="Write name=size for each dimension, as in dp=8,tp=2.",
            )
        yield found[1], int(found[2])
