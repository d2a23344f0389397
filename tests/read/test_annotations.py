"""Steps of a file: what may come from a stranger is brought into a form that has one answer."""

from __future__ import annotations

from tb_memplugin.read.annotations import with_different_starts
from tb_memplugin.trace import Step


def test_of_steps_that_begin_together_the_first_is_kept() -> None:
    steps = [Step(3, 10, 20), Step(4, 10, 30), Step(5, 30, 40)]
    assert with_different_starts(steps) == (Step(3, 10, 20), Step(5, 30, 40))
