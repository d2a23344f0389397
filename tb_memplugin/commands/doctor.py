"""`tb-memplugin doctor`: why the Memory tab might be empty, and what to do."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click

from tb_memplugin.commands.doctor_findings import Finding, Level, fine, hint, problem
from tb_memplugin.commands.options import PATH
from tb_memplugin.commands.tables import printable

_SIGNS = {Level.FINE: ("ok", "green"), Level.HINT: ("note", "yellow"), Level.PROBLEM: ("problem", "red")}


@click.command("doctor")
@click.argument("logdir", type=PATH)
@click.option(
    "--repair",
    is_flag=True,
    help="First save what is intact of damaged recordings in new files. No data are deleted.",
)
def command(logdir: str, repair: bool) -> None:
    """Find out why the Memory tab is empty, and what to do.

    LOGDIR is the folder that you give to tensorboard --logdir. The exit code is 1 if there is a problem,
    else 0.
    """
    problems = 0
    for finding in _findings(logdir, repair=repair):
        sign, color = _SIGNS[finding.level]
        click.echo(f"{click.style(f'{sign:>7}', fg=color)}  {printable(finding.text)}")
        if finding.fix:
            click.echo(f"{'':>7}  → {printable(finding.fix)}")
        problems += finding.level is Level.PROBLEM
    if problems:
        raise SystemExit(1)
    click.echo(f"\nThe Memory tab should show it: tensorboard --logdir {printable(shlex.quote(logdir))}")


def _findings(logdir: str, *, repair: bool) -> Iterator[Finding]:
    yield from check_installation()
    try:
        from tb_memplugin.commands.doctor_logdir import check_logdir, repaired
    except ImportError as error:
        yield problem(f"Recordings cannot be read here: {error}.", "Fix the installation first.")
        return
    if repair:
        yield from repaired(logdir)
    yield from check_logdir(logdir)


PLUGIN_GROUP = "tensorboard_plugins"
PLUGIN_NAME = "tb_memplugin"
DISTRIBUTION = "tb-memplugin"
OLDEST_TENSORBOARD = (2, 19)
PROTOBUF_RANGE = ((6, 31, 1), (8,))


def check_installation() -> Iterator[Finding]:
    """Check TensorBoard, protobuf, the plugin's registration, its backend and its frontend."""
    yield check_tensorboard(_version("tensorboard"))
    yield check_protobuf(_version("protobuf"))
    yield from check_registration(list(metadata.entry_points(group=PLUGIN_GROUP)))
    yield _check_backend()
    yield _check_bundle()


def check_tensorboard(version: str | None) -> Finding:
    """Check that TensorBoard is installed and new enough."""
    if version is None:
        return problem("TensorBoard is not installed here.", "Run: pip install 'tensorboard>=2.19'")
    if _numbers(version) < OLDEST_TENSORBOARD:
        return problem(f"TensorBoard {version} is too old.", "Run: pip install --upgrade 'tensorboard>=2.19'")
    return fine(f"TensorBoard {version}")


def check_protobuf(version: str | None) -> Finding:
    """Check that protobuf has a version on which both TensorBoard and our generated code work."""
    fix = "Run: pip install --upgrade 'protobuf>=6.31.1,<8'"
    if version is None:
        return problem("protobuf is not installed here.", fix)
    lowest, end = PROTOBUF_RANGE
    if not lowest <= _numbers(version) < end:
        return problem(f"protobuf {version} does not work with TensorBoard 2.21.", fix)
    return fine(f"protobuf {version}")


def check_registration(entry_points: list[metadata.EntryPoint]) -> Iterator[Finding]:
    """Check that the plugin is registered exactly once, and that the other plugins can be imported."""
    ours = [
        point
        for point in entry_points
        if point.name == PLUGIN_NAME or point.value.startswith(f"{PLUGIN_NAME}.")
    ]
    origins = sorted({str(getattr(point.dist, "name", "?")) for point in ours})
    if not ours:
        fix = (
            "Install it into the environment that runs TensorBoard. In a clone of tb_memplugin: pip install ."
        )
        yield problem("The plugin is not registered with TensorBoard in this environment.", fix)
    elif len(origins) > 1:
        fix = (
            f"Two plugins with one name keep TensorBoard from starting. Keep one: pip uninstall {origins[-1]}"
        )
        yield problem(f"The plugin is registered by several distributions: {', '.join(origins)}.", fix)
    else:
        yield fine(f"registered with TensorBoard by {origins[0]} {_version(DISTRIBUTION) or ''}".rstrip())
    for point in entry_points:
        if point not in ours and not _loads(point):
            name = getattr(point.dist, "name", point.name)
            fix = f"TensorBoard skips it and starts without it. To remove it: pip uninstall {name}"
            yield hint(f"Another plugin, {point.name}, cannot be imported.", fix)


def _check_backend() -> Finding:
    try:
        importlib.import_module("tb_memplugin.server.backend")
    except Exception as error:  # noqa: BLE001  # any failure to import is what we report
        fix = (
            "Reinstall it with its dependencies. In a clone of tb_memplugin: pip install --force-reinstall ."
        )
        return problem(f"The tab's backend cannot be imported: {type(error).__name__}: {error}", fix)
    return fine("the tab's backend loads")


def _check_bundle() -> Finding:
    if (Path(__file__).parents[1] / "server" / "static" / "index.js").is_file():
        return fine("the tab's frontend is built")
    fix = (
        "If it is installed in editable mode, run in its clone: make bundle. Otherwise, without bundle=no: "
        "pip install --force-reinstall ."
    )
    return problem("The tab's frontend is not built.", fix)


def _loads(point: metadata.EntryPoint) -> bool:
    try:
        point.load()
    except Exception:  # noqa: BLE001  # another project's plugin may fail in any way
        return False
    return True


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
