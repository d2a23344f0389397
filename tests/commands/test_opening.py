"""What every command that reads a file does with files that are absent, too large, or want to run code."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tb_memplugin.commands import main
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Note
from tests.cli import CliRunner
from tests.commands.files import refused, run, step_snapshot, told, write
from tests.server.conftest import BASELINE, BIGGER

READERS: dict[str, tuple[str, ...]] = {
    "peak": (),
    "stages": (),
    "allocator": (),
    "usage": ("--allocation", "0x1000"),
    "import": ("--logdir", "runs"),
    "diff": (),
}


def command(name, path):
    return (name, *([path] * (2 if name == "diff" else 1)), *READERS[name])


class Harm:
    def __reduce__(self):
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_not_there(name, tmp_path):
    assert "file or folder does not exist" in refused(*command(name, tmp_path / "absent.pickle"))


@pytest.mark.parametrize("name", READERS)
def test_a_pickle_that_wants_to_run_code(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("evil.pickle").write_bytes(pickle.dumps({"segments": [Harm()]}))
    assert "global 'pathlib" in refused(*command(name, "evil.pickle"))
    assert not Path("harm").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", READERS)
def test_a_limit_on_what_is_read(name, tmp_path):
    step = write(tmp_path / "step.pickle", step_snapshot())
    assert "larger than the limit of 10 bytes" in refused(*command(name, step), "--limit-bytes", 10)


FROM_STDIN = [
    *(("peak", "-"), ("advice", "-"), ("allocator", "-"), ("stages", "-"), ("json", "-", "-o", "out")),
    *(("usage", "-", "--allocation", "0x1000"), ("export", "-", "--to", "csv", "-o", "out")),
    *(("profile", "-", "--by", "categories", "-o", "out"), ("import", "-", "--logdir", "runs")),
    ("diff", "-", "step.pickle"),
]


@pytest.mark.parametrize("arguments", FROM_STDIN, ids=lambda arguments: arguments[0])
@pytest.mark.parametrize("packed", [False, True])
def test_standard_input_is_a_file(arguments, packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = write(tmp_path / "step.pickle", step_snapshot()).read_bytes()
    done = CliRunner().invoke(main, arguments, input=gzip.compress(content) if packed else content)
    assert (done.exit_code, Path("-").exists()) == (0, False), done.output
    if arguments[0] in ("peak", "diff", "import"):
        assert "390" in done.stdout


def test_two_imports_of_standard_input_are_two_workers(tmp_path):
    for kept in (300, 1000):
        done = CliRunner().invoke(
            main, ("import", "-", "--logdir", str(tmp_path)), input=pickle.dumps(step_snapshot(kept))
        )
        assert done.exit_code == 0
    workers = {step.metadata.worker for step in read_recordings(str(tmp_path)).steps}
    assert workers == {"stdin", "stdin.2"}


@pytest.mark.parametrize(("content", "why"), [(b"", "is empty"), (b"x" * 11, "larger than the limit of 10")])
def test_standard_input_that_is_empty_or_too_large(content, why):
    done = CliRunner().invoke(main, ("peak", "-", "--limit-bytes", "10"), input=content)
    assert done.exit_code == 2
    assert why in done.stderr


@pytest.mark.parametrize("arguments", [("peak",), ("import", "--logdir", "runs")])
def test_a_hostile_pickle_and_the_real_command(tmp_path, arguments):
    (tmp_path / "evil.pickle").write_bytes(b"cos\nsystem\n(S'touch harm'\ntR.")
    program = Path(sys.executable).with_name("tb-memplugin")
    done = subprocess.run(
        [str(program), *arguments, "evil.pickle"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "'os.system'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pickle"]


def test_the_type_of_device_is_what_the_option_says(tmp_path):
    step = write(tmp_path / "step.pickle", step_snapshot())
    assert told("peak", step, "--device-type", "xpu")["devices"][0]["device"] == "xpu:0"
    assert "'foo' is not one of 'cuda', 'xpu', 'cpu'" in refused("peak", step, "--device-type", "foo")


def test_a_folder_means_its_highest_peak_and_the_others_are_named(tmp_path):
    RunWriter(str(tmp_path / "low"), "rank0").write(BASELINE)
    RunWriter(str(tmp_path / "high"), "rank0").write(BIGGER)
    result = run("allocator", tmp_path, "--device", "cpu")
    assert "peak 650 B" in result.stdout
    assert "Showing" in result.stderr
    assert "low" in result.stderr


@pytest.mark.parametrize("path", ["", "x" * 5000, "x" * 300 + "/file.pickle"])
def test_a_path_that_no_file_can_have_is_refused(path):
    for command in ("peak", "stages", "allocator"):
        assert "error: " in refused(command, path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may look everywhere")
def test_a_file_in_a_folder_that_may_not_be_entered_is_refused(tmp_path):
    path = write(tmp_path / "closed" / "step.pickle", step_snapshot())
    path.parent.chmod(0)
    try:
        assert "Permission denied" in refused("peak", path)
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize(
    "command", ["peak", "stages", "allocator", "usage --allocation 0x1200", "import --logdir logs"]
)
def test_what_is_contradictory_in_a_file_is_told_beside_the_numbers(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    content = step_snapshot()
    content["device_traces"][0].append({**content["device_traces"][0][0], "addr": 0x9000})
    write(tmp_path / "step.pickle", content)
    name, *options = command.split()
    result = run(name, "step.pickle", *options, "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert (
        "note: step.pickle: cuda:0: 1 allocations neither freed nor among the final blocks (300 bytes)."
        in result.stderr
    )


def test_the_notes_of_both_sides_and_of_a_recorded_run_are_told(tmp_path):
    noted = replace(BASELINE, notes=(Note("Half of it is a guess."),))
    RunWriter(str(tmp_path / "run"), "rank0").write(noted)
    assert "note: rank0: Half of it is a guess." in run("peak", tmp_path / "run").stderr
    shown = run("diff", tmp_path / "run", tmp_path / "run").stderr
    assert shown.count("note: rank0: Half of it is a guess.") == 2


def test_of_many_notes_the_number_is_told(tmp_path):
    RunWriter(str(tmp_path), "rank0").write(
        replace(BASELINE, notes=tuple(Note(f"note {n}") for n in range(13)))
    )
    shown = run("stages", tmp_path).stderr.splitlines()
    assert shown[-1] == "note: rank0: 3 more notes."


def test_names_in_files_cannot_steer_a_terminal(tmp_path):
    content = step_snapshot()
    content["device_traces"][0][0]["frames"] = [
        {"filename": "[red]\x1b[2J.py", "name": "\x07bell", "line": 1}
    ]
    content["external_annotations"] = [{"name": "\x1b]0;x\x07", "stage": "START", "device": 0, "time_us": 5}]
    step = write(tmp_path / "step.pickle", content)
    for arguments in (
        ("peak", step, "--by", "stack"),
        ("stages", step),
        ("usage", step, "--allocation", "1000"),
        ("diff", step, step, "--by", "line"),
        ("allocator", step),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert not {"\x1b", "\x07"} & set(result.output)


def test_what_a_file_does_not_hold_is_told_with_the_files_name(tmp_path):
    one = write(tmp_path / "one.pickle", step_snapshot())
    other = write(tmp_path / "other.pickle", step_snapshot(device=1))
    assert f"where: {one}\n" in refused("peak", one, "--device", "cuda:1")
    assert f"where: {one}\n" in refused("stages", one, "--annotation", "loss")
    assert f"where: {one}, {other}\n" in refused("diff", one, other, "--device", "cuda:1")
