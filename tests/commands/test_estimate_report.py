"""What the table of changes says."""

import pytest

from tb_memplugin.commands.estimate_report import fits_text
from tb_memplugin.estimate.answer.changes import Change

GIB = 1 << 30


@pytest.mark.parametrize(
    ("fits", "reserved", "told"),
    [(True, 80 * GIB, "yes"), (True, 80 * GIB + 1, "just"), (False, 81 * GIB, "no"), (None, 1, "?")],
)
def test_a_step_that_fits_by_giving_its_cache_back_is_told_apart(fits, reserved, told):
    change = Change("half the batch", "--batch 1", GIB, reserved, fits)
    assert fits_text(change, usable_bytes=80 * GIB) == told
