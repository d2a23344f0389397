"""Access to a request's parameters, with checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tensorboard import plugin_util
from tensorboard.context import RequestContext
from werkzeug import wrappers

from tb_memplugin.errors import MemPluginError

MOST_COLUMNS = 4_000
FARTHEST = 1 << 61
"""The largest number in a request: 73 years in nanoseconds, so that no sum of two times exceeds an int64."""

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class Request:
    """A request's parameters, and the context and experiment to pass to TensorBoard's data provider."""

    parameters: dict[str, str]
    ctx: RequestContext
    experiment: str

    @classmethod
    def of(cls, request: wrappers.Request) -> Request:
        """Take the parameters from a request; of several with the same name, the first counts."""
        environ = request.environ
        return cls(request.args.to_dict(), plugin_util.context(environ), plugin_util.experiment_id(environ))

    def text(self, name: str, default: str | None = None) -> str:
        """Return a parameter's text.

        Raises:
            MemPluginError: the parameter is missing and has no default.
        """
        value = self.parameters.get(name, default)
        if value is None:
            raise MemPluginError(
                f"Parameter {name!r} is missing.", where=name, fix="Add it: docs/http_api.md describes it."
            )
        return value

    def number(
        self, name: str, default: int | None = None, lowest: int = -FARTHEST, highest: int = FARTHEST
    ) -> int:
        """Return a parameter's whole number.

        Raises:
            MemPluginError: the parameter is missing without a default, not a whole number, or out of bounds.
        """
        if self.parameters.get(name, "") == "" and default is not None:
            return default
        text = self.text(name)
        try:
            value = int(text) if len(text) < 25 else None
        except ValueError:
            value = None
        if value is None or not lowest <= value <= highest:
            raise MemPluginError(
                f"Parameter {name!r} is {text[:40]!r}.",
                where=name,
                fix=f"Give a whole number from {lowest} to {highest}.",
            )
        return value

    def choice(self, name: str, choices: Sequence[Word], default: Word | None = None) -> Word:
        """Return a parameter that is one of several words.

        Raises:
            MemPluginError: the parameter is none of them, or is missing without a default.
        """
        text = self.text(name, default)
        for word in choices:
            if word == text:
                return word
        raise MemPluginError(
            f"Parameter {name!r} is {text[:40]!r}.", where=name, fix=f"Give one of: {', '.join(choices)}."
        )

    def has(self, name: str) -> bool:
        """Return whether a parameter has a value."""
        return self.parameters.get(name, "") != ""
