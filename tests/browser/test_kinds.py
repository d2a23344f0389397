"""Every kind of recording in one folder: each view speaks of what it knows, and all of them compare."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from playwright.sync_api import expect

import tb_memplugin
from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import watched
from tests.browser.made_snapshot import K, made_snapshot
from tests.browser.tab import exact
from tests.tensorboard.process import tensorboard

RED_NEAR_THE_FLOOR = """(canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, height - 50, width, 20);
    let red = 0;
    for (let i = 0; i < data.length; i += 4)
        red += data[i] === 200 && data[i + 1] === 71 && data[i + 2] === 43;
    return red;
}"""
"""How many pixels have the peak's color where only the words of a failed request stand."""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Snapshots out of memory (once, without names, 30 times), a traced run, and its estimate."""
    folder = tmp_path_factory.mktemp("kinds")
    file = folder / "snapshot.pickle"
    file.write_bytes(pickle.dumps(made_snapshot()))
    RunWriter(str(folder / "snapshot"), "rank0").write(tb_memplugin.load(file))
    file.unlink()
    RunWriter(str(folder / "stacks"), "rank0").write(tb_memplugin.load(nameless(made_snapshot())))
    RunWriter(str(folder / "retries"), "rank0").write(tb_memplugin.load(retrying(made_snapshot())))
    record_traced(str(folder / "traced"))
    record_estimate(str(folder / "estimate"))
    return folder


def nameless(snapshot):
    """The same, as PyTorch writes it where nobody set metadata."""
    entries = [[{**entry, "user_metadata": ""} for entry in told] for told in snapshot["device_traces"]]
    return {**snapshot, "device_traces": entries}


def retrying(snapshot):
    """The same, but its request fails 30 times."""
    (entries,) = snapshot["device_traces"]
    place = next(place for place, entry in enumerate(entries) if entry["action"] == "oom")
    retries = [*entries[:place], *([entries[place]] * 30), *entries[place + 1 :]]
    return {**snapshot, "device_traces": [retries]}


def record_traced(run):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    tracer = tb_memplugin.MemoryTracer()
    with tracer.trace(model):
        model(torch.ones(32, 64)).sum().backward()
    tracer.save(run)


def record_estimate(run):
    with tb_memplugin.MemoryEstimator(device="cuda", gpu="h100") as estimator:
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)).cuda()
        estimator.watch(model)
        x = estimator.create_fake_tensor(32, 64, device="cuda")
        with estimator.track_phase("forward"):
            loss = model(x).sum()
        with estimator.track_phase("backward"):
            loss.backward()
    estimator.save(run)


@pytest.fixture(scope="module")
def server(kinds):
    with tensorboard(kinds) as running:
        running.wait_for("runs", lambda answer: len(answer["runs"]) == 5)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


def test_the_overview_begins_with_the_request_that_failed(tab):
    tab.open_anew("overview", run="snapshot")
    expect(tab("headline")).to_contain_text("The recording peaked at")
    failed = tab("out-of-memory")
    assert exact(failed.locator("strong")) == 300_000 * K
    assert "out of memory" not in "".join(tab("notices").all_inner_texts())  # it is told once
    failed.get_by_role("link").click()
    tab("oom-report").wait_for()
    expect(tab("to-oom")).to_be_disabled()  # that moment is shown


def test_a_single_recording_among_other_runs_can_be_compared_with_them(tab):
    tab.open_anew("overview", run="traced")
    expect(tab("picker-base")).to_have_text("nothing picked")
    expect(tab("change")).to_contain_text('of this run: pick another run under "Compare with".')


def test_the_timeline_marks_the_request_that_failed(tab):
    tab.open_anew("timeline", run="snapshot")
    canvas = tab("timeline-canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile(r"A request of 293\.0 MiB failed at "))
    tab.settle()
    assert canvas.evaluate(RED_NEAR_THE_FLOOR) > 100


def test_of_many_failed_requests_the_first_and_the_last_are_reported(tab):
    tab.open_anew("allocator", run="retries")
    expect(tab("oom-count")).to_contain_text("30 requests failed.")
    expect(tab("oom-report")).to_have_count(21)
    expect(tab("oom-report").first).to_have_attribute("data-key", "0")
    expect(tab("to-oom").first).to_be_disabled()  # the first one is shown
    expect(tab("reserve-canvas")).to_have_attribute("aria-label", re.compile("27 more requests failed"))
    tab.open_anew("overview", run="retries")
    expect(tab("out-of-memory")).to_contain_text("and 29 more after it")


def test_allocations_without_names_go_by_the_code_that_asked(tab):
    tab.open_anew("overview", run="stacks")
    tab.settle()
    expect(tab("largest").locator("tbody tr").first).to_contain_text(".py:")


def test_modules_say_why_there_are_none(tab):
    tab.open_anew("modules", run="snapshot")
    expect(tab("no-modules")).to_contain_text("names no modules and no operators")
    tab.open_anew("modules", run="traced")
    tab.settle()
    expect(tab("no-modules")).to_have_count(0)


def test_an_estimates_times_are_called_what_they_are(tab):
    tab.open_anew("timeline", run="estimate")
    expect(tab("about-times")).to_contain_text("not a GPU's")
    tab.open_anew("timeline", run="traced")
    tab.settle()
    expect(tab("about-times")).to_have_count(0)


@pytest.mark.parametrize("run", ["traced", "estimate"])
def test_without_stacks_it_names_the_tool_that_has_them(tab, run):
    tab.open_anew("stacks", run=run)
    expect(tab("stacks-code")).to_contain_text("LineTracer")


@pytest.mark.parametrize(
    ("run", "base", "what"),
    [
        ("estimate", "traced", "module"),
        ("traced", "estimate", "module"),
        ("snapshot", "traced", "category"),
        ("estimate", "snapshot", "category"),
    ],
)
def test_every_kind_compares_with_every_other(tab, server, run, base, what):
    """By module where both sides name them, else by category; the rows sum to the difference of the peaks."""
    tab.open_anew("compare", run=run, base_run=base)
    expect(tab(f"what-{what}")).to_have_attribute("aria-pressed", "true")
    expect(tab("headline")).to_contain_text(f"Recording {run} peaks")
    expect(tab("headline")).to_contain_text(f"recording {base}")
    told = peak(server, run) - peak(server, base)
    assert exact(tab("delta-sum")) == told


def peak(server, run):
    """Of its busiest device, as the tab picks it."""
    (found,) = (one for one in server.get("runs")["runs"] if one["run"] == run)
    (worker,) = found["workers"]
    told = worker["steps"]["devices"]
    cuda = {device: stats for device, stats in told.items() if device != "cpu"}
    return max(max(stats["peak_bytes"]) for stats in (cuda or told).values())
