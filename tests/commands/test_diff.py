import pytest

from tb_memplugin.store.writer import RunWriter
from tests.commands.files import real, refused, run, step_snapshot, stranger, told, write
from tests.server.conftest import BASELINE


@pytest.fixture
def base(tmp_path):
    return write(tmp_path / "base.pickle", step_snapshot(300))


@pytest.fixture
def other(tmp_path):
    return write(tmp_path / "other.pickle", step_snapshot(400))


def test_json_is_what_the_issue_says(base, other):
    assert told("diff", base, other, "--by", "line") == {
        "devices": [
            {
                "device": "cuda:0",
                "base_peak_bytes": 390,
                "other_peak_bytes": 490,
                "rows": [
                    {
                        "key": "model.py:7 (forward)",
                        "status": "grown",
                        "base_bytes": 300,
                        "other_bytes": 400,
                        "delta_bytes": 100,
                    },
                    {
                        "key": "optim.py:3 (step)",
                        "status": "same",
                        "base_bytes": 90,
                        "other_bytes": 90,
                        "delta_bytes": 0,
                    },
                ],
            }
        ]
    }


@pytest.mark.parametrize("by", ["category", "module", "stack", "line", "context", "pool"])
@pytest.mark.parametrize("top", [0, 1])
def test_deltas_sum_to_the_difference(base, other, by, top):
    (device,) = told("diff", other, base, "--by", by, "--top", top)["devices"]
    assert sum(row["delta_bytes"] for row in device["rows"]) == -100
    assert len(device["rows"]) <= 2


def test_rules_divide_too(base, other):
    (device,) = told("diff", base, other, "--rules", "Model=forward")["devices"]
    assert [(row["key"], row["delta_bytes"]) for row in device["rows"]] == [("Model", 100), ("unknown", 0)]


def test_devices_with_other_numbers_are_paired_and_both_named(base, tmp_path):
    second = write(tmp_path / "second.pickle", step_snapshot(300, device=1))
    (device,) = told("diff", base, second)["devices"]
    assert (device["device"], device["other_device"]) == ("cuda:0", "cuda:1")
    assert "cuda:0 against cuda:1" in run("diff", base, second).stdout


def test_a_snapshot_against_a_recorded_run(base, tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(BASELINE)
    devices = {device["device"]: device for device in told("diff", base, tmp_path / "run")["devices"]}
    assert {name: (one["base_peak_bytes"], one["other_peak_bytes"]) for name, one in devices.items()} == {
        "cuda:0": (390, 0),
        "cpu": (0, 560),
    }


def test_people_get_signs_and_a_total(base, other):
    shown = run("diff", base, other).stdout
    assert "cuda:0: peak 390 B, then 490 B" in shown
    assert "+100" in shown
    assert "total" in shown
    assert "-100" in run("diff", other, base).stdout


def test_a_device_that_one_side_lacks_is_refused(base, other):
    assert "cuda:5" in refused("diff", base, other, "--device", "cuda:5")


@real
@pytest.mark.parametrize("by", ["stack", "line", "category", "rule"])
def test_real_deltas_sum_to_the_difference(by):
    rules = ("--rules", "Forward=forward") if by == "rule" else ()
    found = told("diff", stranger("snapshots/20*"), stranger("snapshots/12*"), "--by", by, *rules)
    (device,) = found["devices"]
    assert (device["base_peak_bytes"], device["other_peak_bytes"]) == (3249143816, 108258676)
    assert sum(row["delta_bytes"] for row in device["rows"]) == 108258676 - 3249143816


@real
def test_what_only_the_other_side_has_is_added():
    rows = told("diff", stranger("snapshots/20*"), stranger("snapshots/12*"), "--by", "stack")["devices"][0][
        "rows"
    ]
    added = [row for row in rows if row["status"] == "added"]
    assert (
        sum(row["other_bytes"] for row in added) == 108258676
    )  # Mosaic misses what was there before: 99,486,724
