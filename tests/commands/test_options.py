"""`~` is the home in every path that a command takes, and what a misspelled name is answered with."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tb_memplugin
from tests.cli import IS_MIXED
from tests.commands.files import refused, run, step_snapshot, told, write


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a snapshot in it, which is not the working folder."""
    write(tmp_path / "home" / "step.pickle", step_snapshot())
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_a_file_below_the_home_is_read(home):
    assert told("peak", "~/step.pickle")["source"] == str(home / "step.pickle")


@pytest.mark.parametrize(
    "arguments",
    [
        ("import", "~/step.pickle", "--logdir=~/made"),
        ("export", "~/step.pickle", "--to", "csv", "--output=~/made"),
        ("json", "~/step.pickle", "-o", "~/made"),
        ("allocator", "~/step.pickle", "-o", "~/made"),
    ],
)
def test_what_is_written_below_the_home_is_there_and_no_folder_is_named_tilde(home, arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert (home / "made").exists()
    assert list((home.parent / "here").iterdir()) == []


def test_rules_are_read_from_a_file_below_the_home(home):
    (home / "rules.json").write_text('{"Model": "forward"}')
    (device,) = told("peak", "~/step.pickle", "--rules=~/rules.json")["devices"]
    assert [part["key"] for part in device["breakdown"]] == ["Model", "unknown"]


def test_a_misspelled_command_is_guessed():
    assert "No such command 'peek'. Did you mean peak?" in refused("peek", "a.pickle")
    assert "Did you mean" not in refused("xyzzy")


def test_a_misspelled_option_is_guessed():
    told = refused("peak", "a.pickle", "--devise", "x")
    guess = "Possible options" if IS_MIXED else "Did you mean"
    assert "--device" in told.partition(guess)[2]


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "tb_memplugin", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tb-memplugin, version {tb_memplugin.__version__}\n"
