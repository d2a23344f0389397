"""`tb-memplugin doctor`: why the Memory tab might be empty, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click

from tb_memplugin.commands.doctor_findings import Finding, Level, problem
from tb_memplugin.commands.doctor_installation import check_installation
from tb_memplugin.commands.paths import PATH
from tb_memplugin.commands.tables import printable

_SIGNS = {Level.FINE: ("ok", "green"), Level.HINT: ("note", "yellow"), Level.PROBLEM: ("problem", "red")}


@click.command("doctor")
@click.argument("logdir", type=PATH)
def command(logdir: str) -> None:
    """Find out why the Memory tab is empty, and what to do.

    LOGDIR is the folder that you give to tensorboard --logdir. The exit code is 1 if there is a problem,
    else 0.
    """
    problems = 0
    for finding in _findings(logdir):
        sign, color = _SIGNS[finding.level]
        click.echo(f"{click.style(f'{sign:>7}', fg=color)}  {printable(finding.text)}")
        if finding.fix:
            click.echo(f"{'':>7}  → {printable(finding.fix)}")
        problems += finding.level is Level.PROBLEM
    if problems:
        raise SystemExit(1)
    click.echo(f"\nThe Memory tab should show it: tensorboard --logdir {printable(shlex.quote(logdir))}")


def _findings(logdir: str) -> Iterator[Finding]:
    yield from check_installation()
    try:
        from tb_memplugin.commands.doctor_logdir import check_logdir
    except ImportError as error:
        yield problem(f"Recordings cannot be read here: {error}.", "Fix the installation first.")
        return
    yield from check_logdir(logdir)
