"""export, profile and json: each writes what it says, from whatever `load` reads."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from tb_memplugin import load
from tb_memplugin.commands import options
from tb_memplugin.store.writer import RunWriter
from tests.commands.files import WRITTEN_FORMATS, refused, run, told
from tests.snapshots import block, entries, segment, snapshot
from tests.traces import trace


def framed(entry, *functions):
    return {**entry, "frames": [{"name": name, "filename": "train.py", "line": 7} for name in functions]}


@pytest.fixture
def recording(tmp_path):
    """400 bytes from before the window and 90 that come."""
    alloc, free = entries("alloc 1512 90", "free_completed 1000 400")
    content = snapshot(
        [segment(block(1000, 0, "inactive"), block(1512, 90), block(2024, 0, "inactive", 1024))],
        [framed(alloc, "forward", "main"), free],
    )
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    return path


def report_in(path):
    (text,) = re.findall(r'id="report-data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    return json.loads(text)


def test_a_runs_folder_is_its_window_with_the_highest_peak(tmp_path):
    writer = RunWriter(str(tmp_path / "run"), "rank0")
    writer.write(trace("step 1", "alloc 100 a", "free a"))
    writer.write(trace("step 2", "alloc 300 a", "free a"))
    result = run("json", tmp_path / "run", "-o", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.json").read_text())["devices"][0]["peak_bytes"] == 300


@pytest.mark.parametrize("format_", WRITTEN_FORMATS)
def test_every_format_is_written_and_told(recording, tmp_path, format_):
    output = tmp_path / "out"
    assert told("export", recording, "--to", format_, "-o", output) == {
        "source": str(recording),
        "format": format_,
        "path": str(output),
        "bytes": output.stat().st_size,
        "notes": [],
    }


def test_people_are_told_in_a_line(recording, tmp_path):
    result = run("export", recording, "--to", "csv", "-o", tmp_path / "out.csv")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith(f"Wrote {tmp_path / 'out.csv'} (")


@pytest.mark.parametrize("format_", WRITTEN_FORMATS)
def test_a_file_name_that_is_no_text_is_escaped(recording, tmp_path, format_):
    latin = recording.rename(recording.with_name("mod\udce8le.pickle"))
    run("export", latin, "--to", format_, "-o", tmp_path / "out")
    assert b"mod\xe8le" not in (tmp_path / "out").read_bytes()


@pytest.mark.parametrize("command", [("json",), ("export", "--to", "json")])
def test_a_dash_is_stdout_and_what_is_told_goes_to_stderr(recording, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    plain, told_too = (run(*command, recording, "-o", "-", *more) for more in ([], ["--json"]))
    assert (plain.exit_code, plain.stderr) == (0, "")
    assert json.loads(plain.stdout)["devices"][0]["peak_bytes"] == 490
    assert told_too.stdout == plain.stdout
    assert json.loads(told_too.stderr)["bytes"] is None
    assert [path.name for path in tmp_path.iterdir()] == [recording.name]


def test_a_recorded_window_is_exported_and_what_is_made_up_is_told(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(trace("start 400 w", "step 1", "alloc 100 a", "free a"))
    (window,) = tmp_path.rglob("window-*.mem")
    result = run("export", window, "--to", "snapshot", "-o", tmp_path / "out.pickle")
    assert result.exit_code == 0, result.output
    assert "note: cpu is written as cuda:0." in result.stderr
    assert load(tmp_path / "out.pickle").live(0).tolist() == [400, 500, 400]


def test_the_page_has_the_divisions_asked_for(recording, tmp_path):
    output = tmp_path / "out.html"
    run(
        "export",
        recording,
        "--to",
        "html",
        "-o",
        output,
        *["--by", "line", "--by", "stack", "--rules", "Fw=forw"],
    )
    (device,) = report_in(output)["devices"]
    assert [division["by"] for division in device["divisions"]] == ["rules", "line", "stack"]
    assert device["divisions"][0]["peak"] == [["unknown", 400, 1], ["Fw", 90, 1]]


def test_else_it_has_those_that_divide_anything(recording, tmp_path):
    run("export", recording, "--to", "html", "-o", tmp_path / "out.html")
    (device,) = report_in(tmp_path / "out.html")["devices"]
    assert device["divisions"][0]["by"] == "category"
    assert "annotation" not in {division["by"] for division in device["divisions"]}


@pytest.mark.parametrize(
    ("by", "kind"), [("annotations", "annotation"), ("categories", "category"), ("context", "context")]
)
def test_a_profile_divides_by_one_thing(recording, tmp_path, by, kind):
    result = run("profile", recording, "--by", by, "-o", tmp_path / "out.html")
    assert result.exit_code == 0, result.output
    (device,) = report_in(tmp_path / "out.html")["devices"]
    (division,) = device["divisions"]
    assert division["by"] == kind
    assert sum(part[1] for part in division["peak"]) == device["peak"]["bytes"] == 490


def test_a_custom_profile_goes_by_rules(recording, tmp_path):
    output = tmp_path / "out.html"
    result = run("profile", recording, "--by", "custom", "--rules", "Forward=.*forward.*", "-o", output)
    assert result.exit_code == 0, result.output
    (device,) = report_in(output)["devices"]
    assert device["divisions"][0]["peak"] == [["unknown", 400, 1], ["Forward", 90, 1]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--by", "custom"], "needs rules"),
        (["--by", "custom", "--rules", "Bad=("], "Bad"),
        (["--by", "categories", "--rules", "a=b"], "cannot be used"),
    ],
)
def test_rules_that_do_not_fit_are_refused(recording, tmp_path, arguments, said):
    assert said in refused("profile", recording, *arguments, "-o", tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_json_is_the_trace_or_the_snapshot(recording, tmp_path):
    assert run("json", recording, "-o", tmp_path / "trace.json").exit_code == 0
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["devices"][0]["peak_bytes"] == 490
    assert "--layout snapshot" in refused("peak", tmp_path / "trace.json")
    assert run("json", recording, "-o", tmp_path / "again.json", "--layout", "snapshot").exit_code == 0
    again = load(tmp_path / "again.json")
    assert again.live(0).tolist() == load(recording).live(0).tolist() == [400, 490, 90]
    assert again.stacks == (("forward train.py:7", "main train.py:7"),)


@pytest.mark.parametrize(
    ("format_", "option", "needed"),
    [
        ("csv", ["--by", "line"], "html"),
        ("json", ["--rules", "a=b"], "html"),
        ("html", ["--no-stacks"], "csv"),
    ],
)
def test_an_option_of_another_format_is_refused(recording, tmp_path, format_, option, needed):
    message = refused("export", recording, "--to", format_, *option, "-o", tmp_path / "out")
    assert f"use --to {needed}" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("export", "--to", "csv"), ("json",), ("profile", "--by", "categories")])
def test_a_file_that_would_fill_the_disk_is_refused(recording, tmp_path, monkeypatch, command):
    monkeypatch.setattr(options, "MOST_OUTPUT_BYTES", 100)
    assert "more than 100 bytes" in refused(*command, recording, "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [recording]
    assert run(*command, recording, "-o", "-").exit_code == 0


@pytest.mark.parametrize("name", ["export", "profile", "json"])
def test_the_recording_itself_is_not_overwritten(recording, name):
    before = recording.read_bytes()
    arguments = {"export": ["--to", "csv"], "profile": ["--by", "categories"], "json": []}[name]
    assert "replace the recording" in refused(name, recording, *arguments, "-o", recording)
    assert recording.read_bytes() == before


def test_a_place_that_cannot_be_written_is_told(recording, tmp_path):
    message = refused("export", recording, "--to", "csv", "-o", tmp_path / "absent" / "out.csv")
    assert "cannot be written" in message
    assert str(tmp_path / "absent" / "out.csv") in message


@pytest.mark.parametrize("name", ["export", "profile", "json"])
def test_the_commands_are_listed_with_help(name):
    assert name in run("--help").stdout
    assert run(name, "--help").exit_code == 0
