"""Every example in docs/commands.md gives what stands there."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import click
import pytest

from tb_memplugin.commands import main
from tests.commands.files import run

DOCUMENT = (Path(__file__).parents[2] / "docs" / "commands.md").read_text("utf-8")
PAGES = [
    DOCUMENT,
    *((Path(__file__).parents[2] / "docs" / page).read_text("utf-8") for page in ("run.md", "ci.md")),
]
MAKE, MODEL, ASK = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
EXAMPLES = re.findall(r"```console\n\$ tb-memplugin ([^\n]*)\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.fixture
def snapshots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    Path("model.py").write_text(MODEL)
    Path("make.py").write_text(MAKE)
    runpy.run_path("make.py")


def trimmed(text):
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


@pytest.mark.parametrize(
    ("arguments", "output"), EXAMPLES, ids=[line.partition(" ")[0] for line, _ in EXAMPLES]
)
def test_a_commands_example(snapshots, arguments, output):
    result = run(*shlex.split(arguments))
    assert result.exit_code == int("does not fit" in output)
    assert all(line.startswith("note: ") for line in result.stderr.splitlines())
    assert trimmed(result.stdout) == trimmed(output)


def test_every_option_is_on_the_page():
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    missing = [
        f"{command} {option.opts[-1]}"
        for command, found in commands.items()
        for option in (found.params if found else ())
        if isinstance(option, click.Option)
        and not any(
            re.search(rf"{name}\b", page) for name in (*option.opts, *option.secondary_opts) for page in PAGES
        )
    ]
    assert missing == []


def test_the_example_in_python(snapshots, capsys):
    Path("ask.py").write_text(ASK)
    runpy.run_path("ask.py")
    assert capsys.readouterr().out.splitlines() == [
        f"{32 << 20} model.py:12 (forward)",
        str(8 << 20),
        f"[('forward_START', {8 << 20}), ('forward_END', {24 << 20})]",
        "full",
    ]
