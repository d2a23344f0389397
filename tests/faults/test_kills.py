"""A few random kills of each writer; `python -m tests.faults.kills 500` does more."""

from __future__ import annotations

import os

import pytest

from tests.faults.kills import WRITERS, kill


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_writer_had_written_when_it_was_killed_is_there(name):
    assert kill(name, 6, seed=1) == []
