"""Tests of estimates against published peaks of real runs, from as much of the configuration as is public.

They are from nanotron's benchmark of llama-1B on eight H100 (huggingface/bench_cluster): "Peak allocated" and
"Peak reserved" of a rank, in MiB. docs/estimate_published.md says what is known about these runs.
"""

from __future__ import annotations

import pytest

from tb_memplugin.estimate.answer.estimation import Estimate
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.ranks import estimate_ranks
from tests.estimate.nanotron_llama import Row, train

MIB = 1 << 20

ROWS = (
    (Row(dp=1, tp=8, pp=1, batch=8, allocated=16891.31, reserved=17044), -0.16, 4.93),
    (Row(dp=1, tp=4, pp=2, batch=8, allocated=25707.36, reserved=26100), -0.05, -0.97),
    (Row(dp=1, tp=1, pp=8, batch=4, allocated=44034.23, reserved=44472), -0.01, -0.63),
    (Row(dp=2, tp=2, pp=2, batch=1, allocated=8570.26, reserved=9170), -0.16, -4.54),
)
"""Rows of the table, with the errors of the estimates in percent of allocated and of reserved bytes."""


def estimated(row: Row) -> Estimate:
    """Estimate the first rank of the first stage. Data parallelism only shards the optimizer."""
    return estimate_ranks(
        lambda estimator, mesh: train(row, estimator), f"tp={row.tp}", ranks=[0], gpu=GpuSpec.named("h100")
    ).worst.estimate


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")
@pytest.mark.parametrize(("row", "allocated", "reserved"), ROWS)
def test_nanotrons_table(row: Row, allocated: float, reserved: float) -> None:
    found = estimated(row)
    off = 100 * (found.peak_allocated_bytes / MIB / row.allocated - 1)
    assert off == pytest.approx(allocated, abs=0.05)
    assert abs(off) < 0.2
    assert 100 * (found.peak_reserved_bytes / MIB / row.reserved - 1) == pytest.approx(reserved, abs=0.3)


def test_stages_take_blocks_up_to_their_share_of_the_cost() -> None:
    """Of 24 blocks of 41.9 M and a head of 102.9 M, half is passed in block 14, an eighth in block 4."""
    assert [row.layers for row, _, _ in ROWS] == [24, 14, 4, 14]
