"""Click's runner of commands as of click 8.2, also where click is older: stderr apart, and in the output."""

from __future__ import annotations

from inspect import signature
from typing import Any

import click.testing

IS_MIXED = "mix_stderr" in signature(click.testing.CliRunner).parameters
"""Whether click is older than 8.2."""


class _Result(click.testing.Result):
    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class CliRunner(click.testing.CliRunner):
    def __init__(self) -> None:
        options: dict[str, Any] = {"mix_stderr": False} if IS_MIXED else {}
        super().__init__(**options)

    def invoke(self, *arguments: Any, **options: Any) -> click.testing.Result:
        result = super().invoke(*arguments, **options)
        if IS_MIXED:
            result.__class__ = _Result
        return result
