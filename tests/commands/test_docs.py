"""Every example in docs/commands.md gives what stands there."""

import os
import re
import runpy
import shlex
import subprocess
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
        and not option.hidden
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


WORKFLOW = re.findall(r"```yaml\n(.*?)```", PAGES[2], re.DOTALL)[0]
PULLED = """
import sys
import torch

model = torch.nn.Linear(8, WIDTH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(int(sys.argv[sys.argv.index("--steps") + 1])):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
PROGRAMS = {
    "pip": "exit 0",
    "gh": 'echo gh "$@"; cat memory.md',
    "tb-memplugin": f'exec "{sys.executable}" -m tb_memplugin "$@"',
}


def test_the_workflow_tells_a_pull_request_what_grew(tmp_path, monkeypatch):
    """The steps are run as GitHub does: after one that fails, only those for a failure."""
    steps = pytest.importorskip("yaml").safe_load(WORKFLOW)["jobs"]["memory"]["steps"]
    for name, line in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def shell(text):
        command = ["bash", "-e", "-c", text.replace("${{ github.event.number }}", "7")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)

    def train(width):
        (tmp_path / "train.py").write_text(PULLED.replace("WIDTH", str(width)), "utf-8")
        return shell(next(step["run"] for step in steps if " run " in step.get("run", "")))

    train(64)
    assert shell("tb-memplugin check --write memory.lock runs; rm -r runs").returncode == 0
    train(640)
    printed, codes = "", list[int]()
    for step in steps:
        if "run" in step and " run " not in step["run"] and ("if" in step) == any(codes):
            done = shell(step["run"])
            printed += done.stdout
            codes.append(done.returncode)
    assert codes == [0, 1, 0]
    assert printed.startswith("::error title=Memory::cpu: peak ")
    assert "gh pr comment 7 --body-file memory.md\n### Memory: above the limit of 2%" in printed
