import io
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from rich.console import Console

from tb_memplugin import IterationReport
from tb_memplugin.analysis.advice_rules import RULES
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.commands.files import real, refused, run, step_snapshot, stranger, told, write
from tests.snapshots import block, segment, snapshot
from tests.step_figures import figures
from tests.traces import trace

HOSTILE = "a\x1b[31m[bold]<b>"


def grows(module):
    lines = [
        line
        for step in range(3)
        for line in (f"step {step}", f"alloc 100 x{step} module={module} operator=mm")
    ]
    return trace("start 70 w", *lines)


@pytest.fixture
def growing(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(grows("net"))
    return tmp_path / "run"


def test_json_has_every_finding_with_its_evidence_and_every_judgement(growing):
    document = told("advice", growing)
    (finding,) = document["findings"]
    assert (finding["kind"], finding["device"], finding["bytes"]) == ("growth", "cpu", 100)
    assert [(row["what"], row["bytes"]) for row in finding["evidence"]] == [("net · mm", 300)]
    assert finding["where"] == {
        "view": "allocations",
        "state": {"step": "2", "search": "net", "listed": "lifetime"},
    }
    verdicts = {one["kind"]: one["verdict"] for one in document["judgements"]}
    assert verdicts["growth"] == "found"
    assert verdicts.keys() == RULES.keys()


def test_people_get_who_fills_the_peak_the_finding_and_what_to_do(growing):
    shown = run("advice", growing).stdout
    assert shown.splitlines()[:4] == [
        "cpu: 370 B at the peak (step 2, event 2): unknown 100.0 %",
        "  300 B, 81.1 %  net: 3 blocks, unknown",
        "  70 B, 18.9 %  (not named): 1 block, unknown",
        "1 problem, no options; 6 rules could not be judged",
    ]
    assert "  100 B more with every step, 27.0 % of 370 B. problem, cpu: Memory grows step after" in shown
    assert "    To do: Find what still holds" in shown
    assert len(shown.splitlines()) <= 10


def test_details_have_the_evidence_and_where_to_look(growing):
    shown = run("advice", growing, "--details").stdout
    assert "problem, cpu, step 2: Memory grows step after step: net · mm keeps what it allocates." in shown
    assert "  100 B more with every step: 27.0 % of 370 B" in shown
    assert "to do: Find what still holds" in shown
    assert "in the tab: Allocations (step 2, search net, listed lifetime)" in shown


def test_the_holders_sum_to_the_peak(growing):
    (peak,) = told("advice", growing)["peaks"]
    assert (peak["device"], peak["bytes"], sum(one["bytes"] for one in peak["holders"])) == ("cpu", 370, 370)


def test_steps_that_a_monitor_watched_are_judged_alone(tmp_path):
    StepsWriter(str(tmp_path), "rank0", 0).write(figures(2 * (1000 + 100 * np.arange(1000))))
    document = told("advice", tmp_path)
    assert [(one["kind"], one["bytes"]) for one in document["findings"]] == [("growth", 100)]
    assert document["peaks"] == []


def test_names_cannot_steer_a_terminal(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(grows(HOSTILE))
    shown = run("advice", tmp_path / "run").stdout
    assert "\x1b" not in shown
    assert "[bold]<b>" in shown


def test_a_reserve_that_is_never_used(tmp_path):
    held = 200 << 20
    path = tmp_path / "held.pickle"
    path.write_bytes(pickle.dumps(snapshot([segment(block(4096, 300), total=held)], [])))
    document = told("advice", path)
    assert [(one["kind"], one["bytes"]) for one in document["findings"]] == [("unused_reserve", held - 300)]


def test_a_snapshot_of_one_step_gives_its_temporary_and_a_device_that_is_absent_is_refused(tmp_path):
    path = write(tmp_path / "step.pickle", step_snapshot())
    findings = told("advice", path)["findings"]
    assert [(finding["kind"], finding["bytes"]) for finding in findings] == [("large_temporary", 90)]
    assert "cuda:3" in refused("advice", path, "--device", "cuda:3")


STRANGERS = {
    "01": {
        ("checkpointing", "cuda:0"): 4_416_249_219,
        ("checkpointing", "cuda:1"): 58_293_128_036,
        ("checkpointing", "cuda:2"): 16_247_850_280,
        ("failed_request", "cuda:1"): 5_073_620_992,
        ("uneven_devices", "cuda:1"): 47_144_097_308,
    },
    "03": {
        ("attention_scores", "cuda:0"): 805_306_368,
        ("checkpointing", "cuda:0"): 2_069_647_356,
        ("optimizer_state", "cuda:0"): 1_692_733_440,
    },
    "07": {("optimizer_state", "cuda:0"): 13_627_238_400},
    "10": {("previous_result", "cuda:0"): 2_097_152_000},
    "12": {("checkpointing", "cuda:0"): 14_156_160},
    "14": {},
    "16": {},
    "19": {},
    "20": {("attention_scores", "cuda:0"): 3_215_327_232, ("fragmentation", "cuda:0"): 532_020_224},
    "23": {},
    "37": {},
    "53": {
        ("checkpointing", "cuda:0"): 11_184_506_880,
        ("kept_gradients", "cuda:0"): 7_992_940_800,
        ("optimizer_state", "cuda:0"): 7_992_940_800,
    },
    "57": {("unused_reserve", "cuda:0"): 1_451_582_464},
    "59": {},
}
"""The findings in strangers' snapshots, looked at by hand: docs/advice.md has the judgement."""


@real
@pytest.mark.parametrize("number", STRANGERS)
def test_what_is_said_of_a_strangers_snapshot(number):
    findings = told("advice", stranger(f"snapshots/{number}*"))["findings"]
    assert {(one["kind"], one["device"]): one["bytes"] for one in findings} == STRANGERS[number]


@real
def test_a_strangers_reserve_that_was_twice_what_was_ever_in_use():
    """The allocator's own counters in that file: 12,782,141,440 reserved all the time, 6,629,508,096 used."""
    (finding,) = told("advice", stranger("kineto/k1*"))["findings"]
    assert (finding["kind"], finding["device"]) == ("unused_reserve", "cuda:1")
    assert (finding["of_bytes"], finding["bytes"]) == (12_782_141_440, 12_782_141_440 - 6_629_508_096)


def leaking(folder, keep):
    """A run of IterationReport: each fifth iteration is a window of one step."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters())
    kept: deque[torch.Tensor] = deque(maxlen=keep)
    with IterationReport(
        model, 5, optimizer=optimizer, logdir=folder, worker_name="rank0", console=Console(file=io.StringIO())
    ) as report:
        for iteration in range(30):
            prediction = model(torch.rand(16 + iteration % 3, 64))
            optimizer.zero_grad()
            prediction.square().mean().backward()
            optimizer.step()
            kept.append(torch.ones(1000))
            report.record_stats()


def growth_of(folder):
    found = told("advice", folder)
    return next((one for one in found["findings"] if one["kind"] == "growth"), None)


def test_a_leak_that_only_windows_of_a_real_run_show_is_found_to_the_byte(tmp_path):
    leaking(tmp_path, keep=None)
    finding = growth_of(tmp_path)
    assert finding["bytes"] == 4000
    assert ("outside:ones · aten::ones", 4000) in [(row["what"], row["bytes"]) for row in finding["evidence"]]


def test_a_queue_that_is_full_and_batches_of_many_sizes_are_no_growth(tmp_path):
    leaking(tmp_path, keep=3)
    assert growth_of(tmp_path) is None
