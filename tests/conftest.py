"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No test is timed: on a busy machine a first example takes as long as it takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
