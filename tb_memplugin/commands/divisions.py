"""The options `--by` and `--rules` that choose what to divide bytes by, and the display of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from tb_memplugin.analysis.divisions import ALL_DIVISIONS, By, Chosen, LabelKey, Part, shortened
from tb_memplugin.analysis.rules import Rules, read_rules
from tb_memplugin.commands.options import PATH
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import ROOT

RULE = "rule"
DEFAULT: By = "category"
REST = "(rest)"

CALL_FRAMES = ("_wrapped_call_impl", "_call_impl")
"""Functions of nn.Module that stand between any two modules in a stack."""

OF_LABEL = "label:"
"""The beginning of a division by a key of labels that are JSON; the key follows."""

Command = Callable[..., None]


if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # not generic before click 8.2


class _Division(_Choice):
    """One of the divisions, or `label:KEY`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the value if it is one of these."""
        if isinstance(value, str) and value.startswith(OF_LABEL) and value != OF_LABEL:
            return value
        return super().convert(value, param, ctx)


def division_options(command: Command, more: Sequence[str] = ()) -> Command:
    """Add the options `--by` and `--rules` to a command; `division` combines their values.

    `--by` also takes the names in `more`, of which `division` knows nothing.
    """
    by = click.option(
        "--by",
        type=_Division([*ALL_DIVISIONS, RULE, *more]),
        help=(
            f"What to divide by. Default: {DEFAULT}, or {RULE} if --rules is given. {OF_LABEL}KEY: by a key "
            "of labels that are JSON."
        ),
    )
    rules = click.option(
        "--rules",
        type=PATH,
        metavar="TEXT",
        multiple=True,
        help=(
            "name=regex, searched in the functions and files of a call stack, or a JSON file of rules. "
            "May be given several times; the first match wins."
        ),
    )
    return by(rules(command))


def division(by: str | None, rules: Sequence[str]) -> Chosen:
    """Return the division that the values of `--by` and `--rules` select.

    Raises:
        MemPluginError: the rules cannot be read, `--by rule` is given without rules, or rules are given with
            another division.
    """
    if by == RULE and not rules:
        raise MemPluginError(
            "This division needs rules.", where=f"--by {RULE}", fix="Give --rules name=regex, or a JSON file."
        )
    if rules and by not in (None, RULE):
        raise MemPluginError(
            f"--rules cannot be used with --by {by}.", where="--rules", fix=f"Give --by {RULE}."
        )
    if by is not None and by.startswith(OF_LABEL):
        return LabelKey(by.removeprefix(OF_LABEL))
    return read_rules(rules) if rules else cast("By", by or DEFAULT)


def division_name(by: Chosen) -> str:
    """Return the heading of the column of a division."""
    if isinstance(by, LabelKey):
        return by.name
    return RULE if isinstance(by, Rules) else by


def shown_key(key: str) -> str:
    """Return a part's key as one line; a stack becomes its Python frames, innermost first.

    If it has none, it becomes its frames of C++, without those in which every stack ends. Each file is
    shortened to the last two parts of its path, and frames of nn.Module itself are left out, so that the line
    shows where similar stacks differ.
    """
    frames = [read_frame(text) for text in key.split("\n")]
    if len(frames) == 1:
        return key or ROOT
    from tb_memplugin.analysis.source_lines import EVERYWHERE, frame_rank

    python = [frame for frame in frames if frame.is_python and frame.function not in CALL_FRAMES]
    telling = (
        python or [read_frame(text) for text in key.split("\n") if frame_rank(text) < EVERYWHERE] or frames
    )
    return " ← ".join(f"{frame.function} {_file_end(frame.place)}" for frame in telling)


def _file_end(path: str) -> str:
    return "/".join(path.replace("\\", "/").split("/")[-2:])


def top_parts(parts: Sequence[Part], top: int) -> list[Part]:
    """Return the `top` largest parts, and one part for all the others, with the same sum; 0 keeps all."""
    return list(shortened(parts, top or len(parts), REST))
