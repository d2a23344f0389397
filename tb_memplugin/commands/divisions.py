"""What to divide bytes by: `--by` and `--rules`, and how parts are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import click

from tb_memplugin.analysis.breakdown import ALL_DIVISIONS, By, Part
from tb_memplugin.analysis.rules import Rules, read_rules
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace.frames import read_frame

RULE = "rule"
DEFAULT: By = "category"
REST = "(rest)"

CALL_FRAMES = ("_wrapped_call_impl", "_call_impl")
"""Functions of nn.Module that stand between each two modules of a stack."""

Command = Callable[..., None]


def division_options(command: Command) -> Command:
    """The options `--by` and `--rules`; `division` makes one thing of them."""
    by = click.option(
        "--by",
        type=click.Choice([*ALL_DIVISIONS, RULE]),
        help=f"What to divide by. Default: {DEFAULT}, or {RULE} where there are rules.",
    )
    rules = click.option(
        "--rules",
        multiple=True,
        help="name=regex, searched in the functions and files of a stack, or a JSON file of such; may be "
        "given several times, the first that matches wins.",
    )
    return by(rules(command))


def division(by: str | None, rules: Sequence[str]) -> By | Rules:
    """What the options mean.

    Raises:
        MemPluginError: rules that cannot be read, or rules without `--by rule`, or the other way round.
    """
    if by == RULE and not rules:
        raise MemPluginError(
            "There are no rules.", where=f"--by {RULE}", fix="Give --rules name=regex, or a JSON file."
        )
    if rules and by not in (None, RULE):
        raise MemPluginError(
            f"--rules has no meaning with --by {by}.", where="--rules", fix=f"Give --by {RULE}."
        )
    return read_rules(rules) if rules else cast("By", by or DEFAULT)


def division_name(by: By | Rules) -> str:
    """The head of its column."""
    return RULE if isinstance(by, Rules) else by


def shown_key(key: str) -> str:
    """A part's key in one line: a stack's Python frames stand side by side, innermost first.

    Of their files the last two names are shown, and nn.Module's own frames are not, so that stacks which
    begin alike can be told apart.
    """
    frames = [read_frame(text) for text in key.split("\n")]
    if len(frames) == 1:
        return key or "(root)"
    python = [frame for frame in frames if frame.is_python and frame.function not in CALL_FRAMES]
    return " ← ".join(f"{frame.function} {_file_end(frame.file)}:{frame.line}" for frame in python or frames)


def _file_end(path: str) -> str:
    return "/".join(path.replace("\\", "/").split("/")[-2:])


def top_parts(parts: Sequence[Part], top: int) -> list[Part]:
    """The largest parts, and one for all the others: the sum stays the same. 0 keeps all."""
    if not top or len(parts) <= top:
        return list(parts)
    rest = parts[top:]
    return [*parts[:top], Part(REST, sum(part.bytes for part in rest), sum(part.count for part in rest))]


def parts_json(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts for programs."""
    return [{"key": part.key, "bytes": part.bytes, "count": part.count} for part in parts]
