"""Print the table of torch's private names, and whether the installed torch has each."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import click
import torch

from tb_memplugin.record import torch_private
from tb_memplugin.record.torch_private.table import OLDEST, TABLE, PrivateName


def whole_table() -> list[PrivateName]:
    """Return all rows, by path. Imports every part of torch that has one."""
    for module in iter_modules(torch_private.__path__):
        if module.name != "__main__":
            import_module(f"{torch_private.__name__}.{module.name}")
    return [TABLE[path] for path in sorted(TABLE)]


def state_of(row: PrivateName) -> str:
    """Return what to print of a name: "ok", "missing", or "-" if this torch need not have it."""
    if row.is_there():
        return "ok"
    return "missing" if row.is_expected() else "-"


def versions_of(row: PrivateName) -> str:
    """Return the versions of torch that have a name, such as "<= 2.6", "2.9" or "<= 2.6, until 2.7"."""
    since = f"<= {OLDEST}" if row.since == OLDEST else row.since
    return f"{since}, until {row.until}" if row.until else since


@click.command()
def main() -> None:
    """Print torch's private names, one a line: there or not, versions, name, purpose, and what is without it.

    The exit code is 1 if the installed torch lacks one that it should have.
    """
    rows = [(state_of(row), row) for row in whole_table()]
    for state, row in rows:
        click.echo(
            f"{state:8}{versions_of(row):20}{row.path}\n{'':28}{row.purpose}; without it, {row.without}"
        )
    missing = sum(state == "missing" for state, _ in rows)
    click.echo(
        f"\nPyTorch {torch.__version__} has all but {missing} of the {len(rows)} names that it should have."
    )
    if missing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
