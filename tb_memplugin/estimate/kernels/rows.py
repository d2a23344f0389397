"""Every row of the table of kernels. A second row for one operator and device is an error at import."""

from __future__ import annotations

from tb_memplugin.estimate.kernels import (
    attention_buffers,
    copies,
    indexing,
    losses,
    normalizations,
    recurrent,
    reductions,
    results,
    sorting,
)
from tb_memplugin.estimate.kernels.table import Kernel, Table

_FILES = (
    attention_buffers,
    copies,
    indexing,
    losses,
    normalizations,
    recurrent,
    reductions,
    results,
    sorting,
)

ROWS: tuple[Kernel, ...] = tuple(row for file in _FILES for row in file.KERNELS)

TABLES = {device_type: Table(ROWS, device_type) for device_type in ("cuda", "cpu")}
