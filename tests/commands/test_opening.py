"""What every command that reads a file does with files that are absent, too large, or want to run code."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tb_memplugin.store.writer import RunWriter
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
    assert "no such folder or file" in refused(*command(name, tmp_path / "absent.pickle"))


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
    assert "more than 10 bytes" in refused(*command(name, step), "--limit-bytes", 10)


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
    assert "no type of device" in refused("peak", step, "--device-type", "x y")


def test_a_folder_means_its_highest_peak_and_the_others_are_named(tmp_path):
    RunWriter(str(tmp_path / "low"), "rank0").write(BASELINE)
    RunWriter(str(tmp_path / "high"), "rank0").write(BIGGER)
    result = run("allocator", tmp_path, "--device", "cpu")
    assert "peak 650 B" in result.stdout
    assert "Shown is" in result.stderr
    assert "low" in result.stderr


def test_names_in_files_cannot_steer_a_terminal(tmp_path):
    content = step_snapshot()
    content["device_traces"][0][0]["frames"] = [
        {"filename": "[red]\x1b[2J.py", "name": "\x07bell", "line": 1},
    ]
    content["external_annotations"] = [
        {"name": "\x1b]0;x\x07", "stage": "START", "device": 0, "time_us": 5},
    ]
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
