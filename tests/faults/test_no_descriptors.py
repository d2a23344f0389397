"""A process that has used up its file descriptors gets one warning, and keeps what was written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("resource", reason="limits on descriptors are POSIX")

PROGRAM = """
import json, resource, sys
from torch.profiler import profile, schedule
from tb_memplugin import MemoryMonitor, memory_trace_handler
from tb_memplugin.store.reader import read_recordings
from tests.faults.sweep import Training, messages

logdir, who, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
training = Training()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def step(number):
    if number == at:  # no new descriptor fits below the limit, whatever a thread closes meanwhile
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    training.step()

with messages() as seen:
    if who == "monitor":
        recorder = MemoryMonitor(logdir, "w", device="process", flush_seconds=1000)
        for number in range(8):
            step(number)
            recorder.step()
            recorder.flush()
        close = recorder.close
    else:
        handler = memory_trace_handler(logdir, "w", model=training.model)
        plan = schedule(wait=0, warmup=1, active=1)
        with profile(profile_memory=True, on_trace_ready=handler, schedule=plan) as recorder:
            for number in range(8):
                step(number)
                recorder.step()
        close = lambda: None
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    close()
found = read_recordings(logdir)
steps = [step.metadata.step for step in found.steps]
steps += [number for watched in found.watched for number in watched.figures.steps.tolist()]
print(json.dumps([training.losses, steps, seen.texts, [str(each) for each in found.problems]]))
"""


def outcome(logdir, who, at):
    """The losses of eight steps, the steps that are readable, the warnings, and the problems of reading."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(logdir), who, str(at)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the process is read from /proc")
@pytest.mark.parametrize(("who", "at", "written"), [("monitor", 2, [0, 1]), ("handler", 4, [1, 3])])
def test_there_is_one_warning_that_says_what_to_do(tmp_path, who, at, written):
    losses, steps, warnings, problems = outcome(tmp_path / "logdir", who, at)
    assert losses == outcome(tmp_path / "other", who, -1)[0]
    assert (steps, problems) == (written, [])
    (warning,) = warnings
    assert "ulimit -n" in warning
