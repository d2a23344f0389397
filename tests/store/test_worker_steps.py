"""The steps of a worker, watched and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.proto.recording_pb2 import DeviceStats, StepMetadata
from tb_memplugin.store.worker_steps import worker_steps
from tb_memplugin.trace.notes import STEPS_JOINED, Note
from tests.step_figures import figures


@pytest.mark.parametrize(
    ("recorded", "steps", "counts", "peaks"),
    [
        ({}, [2, 6, 9], [1, 4, 3], [10, 40, 30]),
        ({5: 7, 6: 8}, [2, 4, 5, 6, 9], [1, 2, 1, 1, 3], [10, 40, 7, 8, 30]),
        ({5: 7, 6: 40}, [2, 5, 6, 9], [1, 1, 1, 3], [10, 7, 40, 30]),
    ],
    ids=["none recorded", "the peak was before the recorded ones", "the peak is a recorded one"],
)
def test_steps_that_a_monitor_joined_count_as_many_and_their_peak_is_not_lost(
    recorded: Mapping[int, int], steps: list[int], counts: list[int], peaks: list[int]
) -> None:
    """A monitor has rows of step 2, of 3 to 6, and of 7 to 9."""
    joined = (Note("steps were joined", STEPS_JOINED),)
    watched = replace(figures([10, 40, 30]), steps=np.array([2, 6, 9]), notes=joined)
    metadata = [StepMetadata(step=step, devices=[DeviceStats(device="cuda:0")]) for step in recorded]
    for step, peak in zip(metadata, recorded.values(), strict=True):
        step.devices[0].stats.peak_bytes = peak
    (rank,) = worker_steps("rank0", metadata, watched)
    assert rank.steps.tolist() == steps
    assert rank.counts.tolist() == counts
    assert rank.allocated.tolist() == peaks
    assert rank.step_count == sum(counts)
