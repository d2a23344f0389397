"""No error of `record_on_oom` replaces the out-of-memory error, or is raised without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tb_memplugin.record.history.allocators import HistorySwitch
from tb_memplugin.record.oom import OomRecorder
from tests.allocators import StandIn
from tests.faults.sweep import FAILING, Session, Training, sweep


class OomSession(Session):
    """A recorder on a stand-in for a GPU, on which memory runs out in each window."""

    boundary = ("record/oom.py:_struck",)
    most_warnings = FAILING  # one for each time that memory ran out: it names the file of that time
    second_warning = (  # the folder stays claimed, another one is used
        "store/worker_folder.py:__init__",
    )

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self.gpu, self.recorder = StandIn(), OomRecorder(str(folder), "w")
        self.recorder.begin([self.gpu.as_allocator()], switch=HistorySwitch())

    def window(self) -> None:
        before = len(self.recorder.dumps)
        self.training.step()
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 900 bytes"):
            self.gpu.ask(900)
        if len(self.recorder.dumps) > before:
            self.windows.append(self.gpu.recording)

    def close(self) -> None:
        self.recorder.close()
        assert not self.gpu.recording


def test_an_error_in_any_function_leaves_the_out_of_memory_error_as_it_is(tmp_path):
    fired, problems = sweep(OomSession, tmp_path)
    assert problems == []
    assert fired > 50
