"""Mosaic's console commands, with its options: write `python -m tb_memplugin.coming_from.mosaic` before one.

    python -m tb_memplugin.coming_from.mosaic mosaic_get_memory_usage_peak --snapshot snapshot.pickle

A command has the names that Mosaic's page and its versions gave it. `-` and `_` are the same in names and
options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from tb_memplugin.coming_from.mosaic.cmd import entry_point
from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_snapshot import ACTIONS
from tb_memplugin.commands.apart import fork_guarded
from tb_memplugin.commands.tables import refusal
from tb_memplugin.errors import MemPluginError

OTHER_NAMES = {
    "mosaic_get_memory": "mosaic_get_memory_profile",
    "mosaic_usage_by_annotation_stage": "mosaic_get_memory_usage_by_annotation_stage",
}


class MosaicGroup(click.Group):
    """A group of commands that have several spellings, and whose errors are a message."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with a name or another of its names."""
        name = cmd_name.replace("-", "_")
        return super().get_command(ctx, OTHER_NAMES.get(name, name))

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; print an error to stderr, and exit with code 2."""
        try:
            return super().invoke(ctx)
        except (MemPluginError, OSError) as error:
            refused = error if isinstance(error, MemPluginError) else MemPluginError(str(error))
            click.echo(refusal(refused), err=True)
            raise SystemExit(2) from error


def option(name: str, parameter: str = "", **settings: Any) -> Callable[[click.Command], click.Command]:
    """Return an option that may be written with `_` or with `-`, for the parameter of its name or another."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    return click.option(*spellings, parameter or name, **settings)


def flag(name: str) -> Callable[[click.Command], click.Command]:
    """Return an option without a value."""
    return option(name, is_flag=True)


snapshot = option("snapshot", required=True, help="A memory snapshot, or any recording.")
action = option("action", type=click.Choice(ACTIONS), default="alloc", show_default=True)
print_stack = option("print_stack", type=bool, default=True, show_default=True)


@click.group(cls=MosaicGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Mosaic's commands, with its options."""


def add_command(
    function: Callable[..., Any], about: str, *options: Callable[[click.Command], click.Command]
) -> None:
    """Add the command of one of Mosaic's functions: it has the function's name, and these options."""
    command = click.Command(f"mosaic_{function.__name__}", callback=function, help=about)
    for add_option in options:
        add_option(command)
    main.add_command(command)


add_command(
    entry_point.get_memory_profile,
    "Write a page of memory over time.",
    snapshot,
    option("out_path", default="snapshot_graph.html", show_default=True),
    option("profile", type=click.Choice([*entry_point.PROFILES, entry_point.CUSTOM]), default="categories"),
    option("custom_profile", help="JSON of names and patterns, or a file of it."),
    option("plotter_sampling_rate", "sampling_rate", type=int, default=1, show_default=True),
    option("plotter_start_idx", "start_idx", type=int, default=0, show_default=True),
    option("plotter_end_idx", "end_idx", type=int, default=sys.maxsize),
    flag("preserve_allocation_order"),
)
add_command(
    entry_point.get_json_snapshot,
    "Write a snapshot as JSON.",
    snapshot,
    option("output_file", default="/tmp/snapshot.json", show_default=True),
    flag("upload_result"),
)
add_command(
    entry_point.get_memory_usage,
    "Print the live bytes after an event.",
    *(snapshot, option("trace", default=""), option("allocation", required=True), action, print_stack),
    flag("paste"),
)
add_command(
    entry_point.get_memory_usage_peak,
    "Print the peak, and what was alive then.",
    *(snapshot, option("trace", default=""), option("allocation", default=""), action, print_stack),
    *(flag("paste"), flag("upload_result"), option("start_time", type=int), option("end_time", type=int)),
)
add_command(
    entry_point.get_memory_usage_diff,
    "Print what the peak of a snapshot has more than that of another.",
    *(option("snapshot_base", required=True), option("snapshot_diff", required=True), flag("paste")),
)
add_command(
    entry_point.get_memory_usage_by_annotation_stage,
    "Print the live bytes at the START and END of annotations.",
    *(snapshot, option("annotation", multiple=True), flag("paste")),
)


if __name__ == "__main__":
    fork_guarded()
    main(prog_name="python -m tb_memplugin.coming_from.mosaic")
