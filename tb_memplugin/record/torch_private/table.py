"""The table of torch's private names: how each is looked up, and what replaces one that is gone."""

from __future__ import annotations

import inspect
import logging
import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, NoReturn

import torch

OLDEST = "2.6"
"""The oldest torch that the package supports: `since` of all names that were there before."""

FIX = "Use a version of PyTorch that docs/torch_versions.md names, or a newer tb_memplugin."

logger = logging.getLogger("tb_memplugin")


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name of torch.

    Attributes:
        path: where it is, beginning with "torch.". `torch.f:_x` is a name in the code of a
            function, for attributes that show in no class, or the value of a module's constant.
        purpose: what it is for.
        without: what happens where torch lacks it.
        since, until: the first version of torch that has it, and the first that no longer does, "" for none.
        build: the part that a build of torch needs to have it: "cuda" or "xpu", "" for none.
    """

    path: str
    purpose: str
    without: str
    since: str = OLDEST
    until: str = ""
    build: str = ""

    @property
    def name(self) -> str:
        """The name itself, without its path."""
        return self.path.replace(":", ".").rpartition(".")[2]

    def is_there(self) -> bool:
        """Whether the installed torch has it. Imports the part of torch where it is."""
        try:
            resolve(self.path)
        except (AttributeError, ImportError):
            return False
        return True

    def is_expected(self) -> bool:
        """Whether the installed torch should have it, by its version and how it was built."""
        version = torch.torch_version.TorchVersion(torch.__version__)
        builds = {"cuda": torch.version.cuda or torch.version.hip, "xpu": getattr(torch.version, "xpu", None)}
        is_built = not self.build or bool(builds[self.build])
        return is_built and version >= self.since and not (self.until and version >= self.until)

    def __str__(self) -> str:
        return f"PyTorch {torch.__version__} has no `{self.path}`: {self.without}."


TABLE: dict[str, PrivateName] = {}
"""The names, by path, of the files that were imported."""


def resolve(path: str) -> Any:
    """Return what is at a path; a name itself if only annotations, or the code of a function, have it.

    Args:
        path: see `PrivateName`.

    Raises:
        AttributeError: torch has nothing there.
        ImportError: a part of torch fails when it is imported.
    """
    where, _, name = path.partition(":")
    target: Any = torch
    reached = "torch"
    for part in where.split(".")[1:]:
        reached += f".{part}"
        target = _inside(target, part, reached)
    if not name:
        return target
    if name not in _words(target):
        raise AttributeError(f"{where} has no {name}")
    return name


def _inside(owner: Any, name: str, path: str) -> Any:
    if path in sys.modules:
        return sys.modules[path]
    if not isinstance(owner, ModuleType) or name in vars(owner):
        bases = owner.__mro__ if isinstance(owner, type) else ()
        if not hasattr(owner, name) and any(name in inspect.get_annotations(base) for base in bases):
            return name
        return getattr(owner, name)
    if not hasattr(owner, "__path__") or find_spec(path) is None:
        raise AttributeError(f"torch has no {path}")
    return import_module(path)


def _words(owner: Any) -> Iterable[object]:
    """Return the names in the code of a function, or the constants of a module."""
    if isinstance(owner, ModuleType):
        return [value for value in vars(owner).values() if type(value) is str]
    code: CodeType = inspect.unwrap(owner).__code__
    return (*code.co_names, *code.co_varnames, *code.co_consts)


class Absent:
    """Stands in the place of a function or class that torch lacks: it raises wherever it is used."""

    def __init__(self, row: PrivateName) -> None:
        self._row = row

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{self._row} {FIX}")

    __call__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        """Let classes derive from this; creating an instance of them raises."""
        return (type("AbsentBase", (), {"__new__": self._refuse}),)


_RAISE: Any = object()


def private(
    path: str,
    purpose: str,
    without: str,
    *,
    instead: Any = _RAISE,
    since: str = OLDEST,
    until: str = "",
    build: str = "",
) -> Any:
    """Add a row to the table, and return what torch has at its path.

    Args:
        path, purpose, without, since, until, build: see `PrivateName`.
        instead: what is returned where torch has nothing. Left out: an object that raises when it is used.
    """
    row = _add(PrivateName(path, purpose, without, since, until, build))
    try:
        return resolve(path)
    except (AttributeError, ImportError):
        if row.is_expected():
            logger.warning("%s", row)
        return Absent(row) if instead is _RAISE else instead


def getter(path: str, purpose: str, without: str, *, instead: Any = _RAISE, since: str = OLDEST) -> Any:
    """Add a row of an attribute to the table, and return a function that reads it of an object, written in C.

    Args:
        path, purpose, without, since: see `PrivateName`.
        instead: a function that is returned where torch has no such attribute.
    """
    gone = object()
    value = private(path, purpose, without, instead=gone, since=since)
    if value is not gone:
        return operator.attrgetter(TABLE[path].name)
    return Absent(TABLE[path]) if instead is _RAISE else instead


def name(
    path: str, purpose: str, without: str, *, since: str = OLDEST, until: str = "", build: str = ""
) -> str:
    """Add a row to the table, and return the name at the end of its path. Torch is not asked for it.

    It is for callers that read it of an object or a module which may not have it, or not yet.
    """
    return _add(PrivateName(path, purpose, without, since, until, build)).name


def part(path: str, purpose: str, without: str, *, since: str = OLDEST, until: str = "") -> str:
    """Add a row of a module to the table, and return its path: torch imports it late, or never."""
    return _add(PrivateName(path, purpose, without, since, until)).path


def _add(row: PrivateName) -> PrivateName:
    if row.path in TABLE:
        raise ValueError(f"{row.path} is in the table twice")
    TABLE[row.path] = row
    return row
