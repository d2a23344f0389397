"""`export`: the files that the command writes, under names that no system acts on, never shown in a page."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from werkzeug.test import Client

from tb_memplugin.commands import main
from tb_memplugin.exports import formats
from tb_memplugin.exports.formats import FORMATS
from tb_memplugin.server.routes import export
from tb_memplugin.server.routes.export import disposition, file_name
from tb_memplugin.store.reader import load_window
from tb_memplugin.store.windows import write_window
from tb_memplugin.store.writer import RunWriter
from tests.cli import CliRunner
from tests.commands.files import WRITTEN_FORMATS
from tests.server.conftest import BASELINE
from tests.server.tab import Tab

HOSTILE = (
    "../../etc/passwd",
    "a\r\nSet-Cookie: x=1\r\n\r\n<script>",
    '"; filename="evil.exe',
    "\\\\server\\share\\evil.exe",
    "C:\\evil",
    "con",
    ".bashrc",
    "\0",
    "evil\u202egnp.exe",
    "x" * 10_000,
    "字" * 10_000,
    "/",
    "",
    "\ud800",
    "~/$(reboot)`reboot`;reboot",
)


@pytest.fixture(autouse=True)
def folder_of_its_own(monkeypatch):
    """No file of another test waits there."""
    monkeypatch.setattr(export, "EXPORTS", export.Exports())


def asked(tab, method="GET", **parameters):
    return Client(tab._apps["/export"]).open("/", method=method, query_string=parameters)


def commanded(side_file, format_, folder):
    output = folder / "of-the-command"
    result = CliRunner().invoke(main, ["export", str(side_file), "--to", format_, "-o", str(output)])
    assert result.exit_code == 0, result.output
    return output.read_bytes()


@pytest.mark.parametrize("format_", WRITTEN_FORMATS)
def test_every_format_is_what_the_command_writes(tab, baseline, side_file, tmp_path, format_):
    about = tab.get("export_about", **baseline, to=format_)
    answer = asked(tab, **baseline, to=format_)
    content = answer.get_data()
    assert content == commanded(side_file, format_, tmp_path)
    assert (answer.status_code, about["bytes"]) == (200, len(content))
    assert answer.headers["Content-Length"] == str(len(content))
    assert about["name"] == f"memory-demo_baseline-rank0-steps-5-6{FORMATS[format_].ending}"
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{about["name"]}"'


def test_a_snapshot_tells_what_was_made_up_for_it(tab, baseline):
    notes = tab.get("export_about", **baseline, to="snapshot")["notes"]
    assert "cpu is written as cuda:0." in notes
    content = pickle.loads(asked(tab, **baseline, to="snapshot").get_data())
    assert notes[0] in content["allocator_settings"]["tb_memplugin"]


@pytest.mark.parametrize("format_", WRITTEN_FORMATS)
def test_no_file_can_run_in_tensorboards_origin(tab, baseline, format_):
    headers = asked(tab, **baseline, to=format_).headers
    assert headers["Content-Disposition"].startswith("attachment;")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert headers["Content-Type"] == FORMATS[format_].content_type


def test_the_other_steps_of_a_window_give_the_same_file_and_other_windows_another(tab, baseline):
    of_five = asked(tab, **baseline, to="csv").get_data()
    assert asked(tab, **{**baseline, "step": 6}, to="csv").get_data() == of_five
    assert asked(tab, **{**baseline, "run": "demo/bigger"}, to="csv").get_data() != of_five


def test_only_the_head_is_answered_where_only_it_is_asked_for(tab, baseline):
    answer = asked(tab, method="HEAD", **baseline, to="json")
    assert answer.get_data() == b""
    assert int(answer.headers["Content-Length"]) == len(asked(tab, **baseline, to="json").get_data())


@pytest.mark.parametrize("route", ["export", "export_about"])
@pytest.mark.parametrize(
    ("change", "status", "where"),
    [
        ({"to": "exe"}, 400, "to"),
        ({"to": "../html"}, 400, "to"),
        ({"to": None}, 400, "to"),
        ({"run": "../../etc"}, 404, "run"),
        ({"worker": "nope"}, 404, "worker"),
        ({"step": "five"}, 400, "step"),
        ({"step": 99}, 404, "demo/baseline: rank0"),
        ({"device": "cuda:9"}, 404, "device"),
    ],
)
def test_what_cannot_be_exported_is_told_as_everywhere(tab, baseline, route, change, status, where):
    parameters = {
        key: value for key, value in {**baseline, "to": "csv", **change}.items() if value is not None
    }
    answer = Client(tab._apps[f"/{route}"]).get("/", query_string=parameters)
    assert answer.status_code == status
    assert answer.content_type == "application/json"
    assert "Content-Disposition" not in answer.headers
    error = json.loads(answer.get_data())["error"]
    assert error["what"]
    assert error["fix"]
    assert error["where"].startswith(where)


def test_without_its_side_file_a_window_is_not_exported(tab, baseline, side_file):
    side_file.unlink()
    status, error = tab.refused("export_about", **baseline, to="html")
    assert status == 404
    assert "window-000000.mem" in error["where"]


def test_only_get_is_served(tab, baseline):
    assert asked(tab, method="POST", **baseline, to="csv").status_code == 405


def test_a_full_disk_is_told_and_leaves_nothing_behind(tab, baseline, monkeypatch):
    folders = []

    def full(format_, trace, path, title):
        folders.append(path.parent)
        return formats.write_as(format_, trace, path.parent / "absent" / "x", title)

    monkeypatch.setattr(export, "write_as", full)
    status, error = tab.refused("export_about", **baseline, to="csv")
    assert status == 400
    assert "no place to write the file" in error["what"]
    assert "TMPDIR" in error["fix"]
    assert list(folders[0].iterdir()) == []


def test_a_file_that_would_be_too_large_is_refused_and_leaves_nothing_behind(tab, baseline, monkeypatch):
    size = tab.get("export_about", **baseline, to="csv")["bytes"]
    asked(tab, **baseline, to="csv").get_data()
    monkeypatch.setattr(export, "MOST_BYTES", size - 1)
    status, error = tab.refused("export_about", **baseline, to="csv")
    assert status == 400
    assert error["what"] == f"The file would have more than {size - 1:,} bytes."
    assert "tb-memplugin export" in error["fix"]
    assert "/" not in error["where"].replace("demo/baseline", "")
    folder = export.EXPORTS._folder
    assert folder is not None
    assert list(folder.iterdir()) == []


def test_files_vanish_when_they_were_fetched_and_when_newer_ones_wait(tab, baseline, monkeypatch):
    written = []

    def write_as(format_, trace, path, title):
        written.append(path)
        return formats.write_as(format_, trace, path, title)

    monkeypatch.setattr(export, "write_as", write_as)
    tab.get("export_about", **baseline, to="csv")
    assert written[0].is_file()
    asked(tab, **baseline, to="csv").get_data()
    assert not written[0].exists()
    assert len(written) == 1, "it was not written twice"
    for format_ in ("csv", "json", "html"):
        tab.get("export_about", **baseline, to=format_)
    assert [path.exists() for path in written] == [False, False, True, True]


def test_a_replaced_side_file_is_exported_anew(tab, baseline, logdir, side_file):
    """That of another run without what says so, as earlier versions wrote it."""
    tab.get("export_about", **baseline, to="csv")
    other = load_window(str(logdir / "demo/bigger/rank0/plugins/tb_memplugin/window-000000.mem"))
    with side_file.open("wb") as stream:
        write_window(stream, other)
    assert b"added" in asked(tab, **baseline, to="csv").get_data()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_files_name_holds_nothing_that_a_system_acts_on(name):
    named = file_name(name, name, BASELINE, FORMATS["html"])
    assert named.startswith("memory-")
    assert named.endswith("steps-5-6.html")
    assert len(named.encode()) < 200
    assert all(sign.isalnum() or sign in "-_." for sign in named)
    header = disposition(named)
    assert header.isascii()
    assert header.isprintable()
    assert header.count('"') == 2


def test_letters_of_every_script_stay_in_a_files_name():
    named = file_name("./实验 1", "rang 0/é", BASELINE, FORMATS["csv"])
    assert named == "memory-实验_1-rang_0_é-steps-5-6.csv"
    assert disposition(named) == (
        'attachment; filename="memory-___1-rang_0__-steps-5-6.csv"; '
        "filename*=UTF-8''memory-%E5%AE%9E%E9%AA%8C_1-rang_0_%C3%A9-steps-5-6.csv"
    )


def test_one_step_is_named_alone():
    one = replace(BASELINE, steps=BASELINE.steps[:1])
    assert file_name("a", "b", one, FORMATS["snapshot"]) == "memory-a-b-step-5.pickle"


def test_hostile_names_cannot_end_the_header_or_run_in_the_page(tmp_path):
    hostile = 'a<script>alert(1)<\u2028script>"\r\nX-Evil: 1'
    RunWriter(str(tmp_path / "run"), hostile).write(BASELINE)
    tab = Tab(tmp_path)
    (run,) = tab.get("runs")["runs"]
    pick = {"run": run["run"], "worker": run["workers"][0]["worker"], "step": 5, "device": "cpu"}
    answer = asked(tab, **pick, to="html")
    assert answer.status_code == 200
    assert "X-Evil" not in answer.headers
    assert b"<script>alert" not in answer.get_data()
    assert asked(tab, **pick, to="csv").headers["Content-Disposition"] == (
        'attachment; filename="memory-run-a_script_alert_1_script_X-Evil_1-steps-5-6.csv"'
    )
