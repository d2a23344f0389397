import itertools
import uuid

import fsspec
import pytest

from tb_memplugin.proto import recording_pb2
from tb_memplugin.server.routes import step
from tb_memplugin.store.writer import RunWriter
from tests.server.conftest import BASELINE
from tests.server.tab import Tab
from tests.traces import trace


def keys_and_bytes(parts):
    return {part["key"]: part["bytes"] for part in parts}


def test_a_note_of_an_older_version_is_its_text():
    assert step._note_shape(recording_pb2.Note(text="Half of it is a guess.")) == {
        "code": "other",
        "level": "info",
        "bytes": None,
        "device": "",
        "text": "Half of it is a guess.",
    }


def test_step_tells_the_peak_in_every_division(tab, baseline):
    answer = tab.get("step", **baseline)
    peak = answer["peak"]
    assert (peak["bytes"], peak["time_ns"], peak["event"], peak["phase"]) == (560, 3_500, 3, "backward")
    assert (peak["operator"], peak["module"]) == ("aten::mm", "layer")
    assert keys_and_bytes(peak["by_category"]) == {"parameter": 400, "activation": 100, "gradient": 60}
    assert keys_and_bytes(peak["by_module"]) == {"layer": 560}
    assert peak["by_module"][0]["categories"] == {"parameter": 400, "activation": 100, "gradient": 60}
    assert keys_and_bytes(peak["by_operator"]) == {"(before the window)": 400, "aten::mm": 160}
    assert keys_and_bytes(peak["by_phase"]) == {"before": 400, "forward": 100, "backward": 60}
    text = "Something is not exact."
    note = {"code": "unseen_frees", "level": "info", "bytes": 60, "device": "cpu", "text": text}
    assert answer["notes"] == [note]
    assert (answer["account"]["level"], answer["account"]["moments"]) == ("not_recorded", [])
    assert answer["source"]["torch"] == "2.13.0"
    assert answer["source"]["side_file_present"] is True
    assert answer["source"]["side_file"] == "demo/baseline/rank0/plugins/tb_memplugin/window-000000.mem"
    assert answer["source"]["epoch_ns"] == "1763000000000000000"


def test_the_largest_blocks_come_with_their_lives(tab, baseline):
    largest = tab.get("step", **baseline)["peak"]["largest"]
    assert largest[0] == {
        "bytes": 400,
        "category": "parameter",
        "module": "layer",
        "operator": None,
        "phase": "before",
        "name": "layer.weight",
        "born_ns": None,
        "freed_ns": None,
        "module_confidence": 100,
        "tensor": None,
        "address": "0x1000",
        "why": "parameter (layer.weight): the recording does not say why",
    }
    assert (largest[1]["born_ns"], largest[1]["freed_ns"], largest[1]["operator"]) == (500, 4_500, "aten::mm")


def test_what_a_step_leaves_is_held_against_the_first_that_can_be_compared(tmp_path):
    window = {
        step: f"step {step}\nalloc 10 a device={{}}\nstep {step + 1}\nalloc {step} b device={{}}".split("\n")
        for step in (1, 5)
    }
    for device in ("cpu", "cuda:0"):
        writer = RunWriter(str(tmp_path / device[:4]), "rank0")
        for lines in window.values():
            writer.write(trace(*(line.format(device) for line in lines)))
    tab = Tab(tmp_path)

    def first_end(run, step, device):
        return tab.get("step", run=run, worker="rank0", step=step, device=device)["first_end"]

    assert first_end("cuda", 1, "cuda:0") is None
    assert {step: first_end("cuda", step, "cuda:0")["step"] for step in (2, 5, 6)} == {2: 1, 5: 1, 6: 1}
    assert first_end("cuda", 6, "cuda:0")["end_bytes"] == 10
    assert first_end("cpu", 5, "cpu") is None, "on the CPU a profile begins at nothing"
    assert first_end("cpu", 6, "cpu") == {"step": 5, "end_bytes": 10}


def test_a_curve_has_the_exact_peak_in_any_width(tab, baseline):
    for width in (1, 2, 5, 7, 100, 4_000):
        answer = tab.get("curve", **baseline, px=width)
        assert (answer["px"], len(answer["max"]), answer["t0"], answer["t1"]) == (width, width, 0, 5_000)
        assert max(answer["max"]) == answer["peak"]["bytes"] == 560
        assert answer["max"][answer["peak"]["column"]] == 560
        assert [sum(column) for column in zip(*answer["stacks"], strict=True)] == answer["max"]


def test_a_curve_by_hand(tab, baseline):
    answer = tab.get("curve", **baseline, px=5)
    assert answer["min"] == [400, 500, 500, 500, 460]
    assert answer["max"] == [500, 520, 520, 560, 560]
    stacks = dict(zip(answer["keys"], answer["stacks"], strict=True))
    assert stacks["parameter"] == [400] * 5
    assert stacks["temporary"] == [0, 20, 20, 0, 0]
    assert answer["reserved"] is None
    assert answer["peak"] == {"time_ns": 3_500, "bytes": 560, "column": 3, "event": 3}
    assert answer["exact"] is True


def test_over_events_each_is_as_wide_as_every_other(tab, baseline):
    answer = tab.get("curve", **baseline, over="event", px=10)
    assert (answer["over"], answer["t0"], answer["t1"]) == ("event", 0, 5)
    assert (answer["first_event"], answer["last_event"]) == (0, 4)
    assert answer["max"] == [500, 500, 520, 520, 520, 500, 560, 560, 560, 460]
    assert answer["min"] == [400, 500, 500, 520, 500, 500, 500, 560, 460, 460]
    assert answer["peak"] == {"time_ns": 3_500, "bytes": 560, "column": 6, "event": 3}
    again = tab.get("curve", **{**baseline, "step": 6}, over="event")
    assert (again["t0"], again["t1"], again["peak"]["bytes"], again["peak"]["event"]) == (5, 6, 467, 5)


def test_over_events_a_device_without_any_is_flat(tmp_path):
    lines = ("step 1", "alloc 64 k device=cuda:0", "alloc 1 a", "step 2", "alloc 2 b", "free b")
    RunWriter(str(tmp_path / "r"), "rank0").write(trace(*lines))
    answer = Tab(tmp_path).get("curve", run="r", worker="rank0", step=2, device="cuda:0", over="event", px=4)
    assert (answer["t0"], answer["t1"], answer["first_event"], answer["last_event"]) == (2, 4, -1, -1)
    assert answer["min"] == answer["max"] == [64] * 4
    assert answer["peak"]["bytes"] == 64


def test_a_curve_names_its_stretch_on_both_axes(tab, baseline):
    by_time = tab.get("curve", **baseline, t0=1_000, t1=3_000)
    by_event = tab.get("curve", **baseline, over="event", t0=1, t1=3)
    assert (by_time["times"], by_time["events"]) == ([1_000, 3_000], [1, 3])
    assert (by_event["times"], by_event["events"]) == ([1_500, 2_500], [1, 3])


def test_lanes_over_events_hold_what_happened_in_them(tab, baseline):
    answer = tab.get("lanes", **baseline, over="event")
    spans = [(span["name"], span["start_ns"], span["end_ns"]) for span in answer["steps"] + answer["phases"]]
    assert spans == [("Step 5", 0, 5), ("Step 6", 5, 6), *PHASES_IN_EVENTS]
    outer, inner = answer["modules"]
    assert [(span["name"], span["start_ns"], span["end_ns"]) for span in outer] == [
        ("layer", 0, 3),
        ("layer", 3, 5),
    ]
    assert [(span["name"], span["start_ns"], span["end_ns"]) for span in inner] == [("layer.inner", 1, 3)]
    assert answer["omitted"] == 0


PHASES_IN_EVENTS = [("forward", 0, 3), ("backward", 3, 5), ("optimizer", 5, 6)]


@pytest.mark.parametrize("over", ["time", "event"])
@pytest.mark.parametrize("by", ["category", "module", "phase"])
def test_a_curves_stacks_sum_to_it(tab, bigger, by, over):
    answer = tab.get("curve", **bigger, by=by, over=over, px=50)
    assert [sum(column) for column in zip(*answer["stacks"], strict=True)] == answer["max"]


def test_a_zoom_covers_what_it_was_asked_for(tab, baseline):
    answer = tab.get("curve", **baseline, t0=1_000, t1=2_000, px=10)
    assert (answer["t0"], answer["t1"], max(answer["max"]), min(answer["min"])) == (1_000, 2_000, 520, 500)


def test_the_whole_window_is_a_curve_too(tab, baseline):
    answer = tab.get("curve", **{**baseline, "step": "all"}, window_step=5, px=6)
    assert (answer["t0"], answer["t1"]) == (0, 6_000)
    assert answer["max"][-1] == 467
    assert tab.get("curve", **{**baseline, "step": "all"}, px=6)["max"] == answer["max"]


def test_reserved_comes_where_there_is_one(tab, bigger):
    answer = tab.get("curve", **{**bigger, "device": "cuda:0"}, px=4)
    assert max(answer["reserved"]) == 2_048
    assert max(answer["max"]) == 64


def test_a_moment_is_the_state_after_the_last_event(tab, baseline):
    answer = tab.get("moment", **baseline, t=1_700)
    assert (answer["event"], answer["time_ns"], answer["bytes"]) == (1, 1_500, 520)
    assert keys_and_bytes(answer["by_category"]) == {"parameter": 400, "activation": 100, "temporary": 20}
    assert keys_and_bytes(answer["by_module"]) == {"layer": 500, "layer.inner": 20}
    assert (answer["previous_event_ns"], answer["next_event_ns"]) == (500, 2_500)
    assert (answer["previous_event"], answer["next_event"]) == (0, 2)


def test_the_moment_before_the_first_event_is_the_start_state(tab, baseline):
    answer = tab.get("moment", **baseline, event=-1)
    assert (answer["bytes"], answer["previous_event_ns"], answer["next_event_ns"]) == (400, None, 500)
    assert answer["phase"] == "before"


def test_stepping_skips_the_events_of_other_devices(tab, bigger):
    answer = tab.get("moment", **{**bigger, "device": "cuda:0"}, event=2)
    assert (answer["bytes"], answer["reserved"], answer["previous_event"]) == (64, 2_048, None)


def test_moments_agree_with_the_curve(tab, baseline):
    curve = tab.get("curve", **baseline, px=10)
    for column in range(10):
        states = [tab.get("moment", **baseline, t=500 * column + part)["bytes"] for part in (0, 250, 499)]
        assert curve["min"][column] <= min(states)
        assert max(states) <= curve["max"][column]


def test_lanes_show_steps_phases_and_calls(tab, baseline):
    answer = tab.get("lanes", **baseline)
    assert [span["name"] for span in answer["steps"]] == ["Step 5", "Step 6"]
    assert [(span["name"], span["start_ns"], span["end_ns"]) for span in answer["phases"]] == [
        ("forward", 0, 3_000),
        ("backward", 3_000, 5_000),
        ("optimizer", 5_000, 6_000),
    ]
    outer, inner = answer["modules"]
    assert [(span["name"], span["phase"], span["start_ns"]) for span in outer] == [
        ("layer", "forward", 0),
        ("layer", "backward", 3_000),
    ]
    assert inner == [{"start_ns": 1_000, "end_ns": 3_000, "name": "layer.inner", "phase": "forward"}]
    assert answer["omitted"] == 0


def test_modules_are_a_tree_that_sums_to_the_peak(tab, baseline):
    answer = tab.get("modules", **baseline)
    assert answer["peak_bytes"] == 560
    rows = {row["key"]: row for row in answer["rows"]}
    layer, inner = rows["layer"], rows["layer.inner"]
    assert (layer["parent"], layer["depth"], layer["kind"], layer["class_name"]) == (
        None,
        0,
        "module",
        "Layer",
    )
    assert (inner["parent"], inner["depth"], inner["name"]) == (layer["id"], 1, "inner")
    assert layer["own"] == layer["inclusive"] == {"parameter": 400, "activation": 100, "gradient": 60}
    assert (layer["own_bytes"], layer["inclusive_bytes"], inner["inclusive_bytes"]) == (560, 560, 0)
    assert (layer["highest"], layer["highest_ns"]) == (
        layer["inclusive"],
        tab.get("step", **baseline)["peak"]["time_ns"],
    )
    assert inner["highest"] == {"temporary": 20}
    assert inner["highest_in_forward"]["bytes"] == 520
    assert inner["highest_in_backward"] is None
    assert layer["highest_in_backward"]["bytes"] == 560
    assert (inner["peak_inside_bytes"], layer["calls"], layer["allocations"]) == (520, 1, 3)
    assert (layer["allocated_bytes"], layer["forward_ns"], layer["backward_ns"]) == (180, 3_000, 2_000)
    assert sum(row["inclusive_bytes"] for row in answer["rows"] if row["parent"] is None) == 560


@pytest.mark.parametrize("by", ["category", "module", "operator", "phase"])
def test_compare_sums_to_the_difference(tab, baseline, bigger, by):
    base = {f"base_{key}": value for key, value in baseline.items()}
    answer = tab.get("compare", by=by, **bigger, **base)
    assert answer["delta_bytes"] == 650 - 560 == sum(row["delta_bytes"] for row in answer["rows"])
    assert (answer["base"]["peak_bytes"], answer["other"]["peak_bytes"]) == (560, 650)
    changes = [abs(row["delta_bytes"]) for row in answer["rows"]]
    assert changes == sorted(changes, reverse=True)


def test_compare_by_module_by_hand(tab, baseline, bigger):
    base = {f"base_{key}": value for key, value in baseline.items()}
    rows = {row["key"]: row for row in tab.get("compare", by="module", **bigger, **base)["rows"]}
    assert (rows["added"]["status"], rows["added"]["delta_bytes"], rows["added"]["category"]) == (
        "added",
        50,
        "activation",
    )
    assert (rows["layer"]["status"], rows["layer"]["delta_bytes"], rows["layer"]["category"]) == (
        "grown",
        40,
        "activation",
    )


def test_a_step_compared_with_itself_is_the_same(tab, baseline):
    base = {f"base_{key}": value for key, value in baseline.items()}
    rows = tab.get("compare", by="category", **baseline, **base)["rows"]
    assert {row["status"] for row in rows} == {"same"}


def test_without_its_side_file_a_step_shows_its_figures(logdir, side_file, baseline):
    exact = Tab(logdir).get("curve", **baseline, px=200)
    side_file.unlink()
    tab = Tab(logdir)
    step = tab.get("step", **baseline)
    assert step["source"]["side_file_present"] is False
    assert "window-000000.mem" in step["notes"][0]["text"]
    curve = tab.get("curve", **baseline)
    assert (curve["exact"], curve["px"]) == (False, 1)
    assert (curve["min"], curve["max"]) == ([min(exact["min"])], [max(exact["max"])])
    assert (curve["keys"], curve["stacks"]) == (["unknown"], [[560]])
    for name in ("t0", "t1"):
        assert curve[name] == exact[name], name
    assert tab.get("curve", **baseline, over="event") == curve  # which is over time, and says so
    assert curve["over"] == "time"
    rows = tab.get("modules", **baseline)["rows"]
    assert rows[0]["inclusive_bytes"] == 560
    assert rows[0]["highest"] is None
    assert tab.get("lanes", **baseline)["modules"] == []
    for route, extra in (
        ("moment", {"t": 5}),
        ("curve", {"t0": 1, "t1": 9}),
        ("curve", {"by": "module"}),
        ("lanes", {"over": "event"}),
    ):
        status, error = tab.refused(route, **baseline, **extra)
        assert status == 404
        assert error["where"].endswith("demo/baseline/rank0/plugins/tb_memplugin/window-000000.mem")


def test_with_logdir_spec_side_files_cannot_be_found_and_it_says_so(logdir, baseline):
    tab = Tab(logdir, logdir_spec=True)
    assert tab.get("runs")["logdir"] == ""
    assert tab.get("curve", **baseline)["exact"] is False
    _, error = tab.refused("moment", **baseline, t=0)
    assert "--logdir_spec" in error["what"]


def test_every_breakdown_of_every_moment_sums_to_it(tab, baseline, bigger):
    for chosen, count in ((baseline, 6), (bigger, 3)):
        for event in range(-1, count):
            answer = tab.get("moment", **chosen, event=event)
            for by in ("by_category", "by_module", "by_phase"):
                assert sum(part["bytes"] for part in answer[by]) == answer["bytes"]


def test_times_between_events_are_never_negative(tab, baseline):
    times = [tab.get("moment", **baseline, event=event)["time_ns"] for event in range(-1, 6)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))


def test_a_logdir_elsewhere_is_read_through_fsspec():
    url = f"memory://{uuid.uuid4().hex}"
    RunWriter(f"{url}/baseline", "rank0").write(BASELINE)
    tab = Tab(url)
    chosen = {"run": "baseline", "worker": "rank0", "step": 5, "device": "cpu"}
    assert [run["run"] for run in tab.get("runs")["runs"]] == ["baseline"]
    assert tab.get("step", **chosen)["source"]["side_file_present"] is True
    assert tab.get("curve", **chosen, px=5)["max"] == [500, 520, 520, 560, 560]
    fsspec.filesystem("memory").rm(url, recursive=True)


def test_modules_are_listed_in_a_step_in_which_the_deepest_have_no_bytes(tab, baseline):
    (layer,) = [row for row in tab.get("modules", **{**baseline, "step": 6})["rows"] if row["key"] == "layer"]
    assert layer["highest"] == {"parameter": 400, "gradient": 60}
