"""Access to a request's parameters, with checks."""

from __future__ import annotations

from dataclasses import dataclass

from tensorboard import plugin_util
from tensorboard.context import RequestContext
from werkzeug import wrappers

from tb_memplugin.errors import MemPluginError

MOST_COLUMNS = 4_000


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
                f"Parameter {name!r} is missing.", where=name, fix="Take it from the runs route."
            )
        return value

    def number(
        self, name: str, default: int | None = None, lowest: int = -(1 << 62), highest: int = 1 << 62
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

    def given(self, name: str) -> bool:
        """Return whether a parameter has a value."""
        return self.parameters.get(name, "") != ""
