"""What results and traces share: a short text, a display in notebooks, tables of pandas and Arrow, JSON."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from tb_memplugin.extras import library
from tb_memplugin.trace.tables import Int64

T = TypeVar("T")

MOST_CHARACTERS = 1_000
"""How long the text of a result is at most."""

MOST_INTEGER = np.iinfo(np.int64).max

_SHORT = reprlib.Repr()
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 2
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlevel = 60, 120, 2


class AnalysisResult:
    """Base of the results of analyses: short as text, a page or a table in notebooks."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Make the text short, unless the class has one of its own; `dataclass` keeps what is there."""
        if "__repr__" not in vars(cls):
            cls.__repr__ = AnalysisResult.__repr__  # type: ignore[method-assign]  # this is what it is for

    def __repr__(self) -> str:
        """Return the fields, with the beginning of those that are long."""
        shown = [each.name for each in fields(self) if each.repr]  # type: ignore[arg-type]  # all are dataclasses
        texts = (f"{name}={_SHORT.repr(getattr(self, name))}" for name in shown)
        return _cut(f"{type(self).__name__}({', '.join(texts)})")

    def _repr_html_(self) -> str | None:
        """Return what Jupyter shows; None if that is the text."""
        # By name: what shows results stands above the analyses, which import none of it.
        html: str | None = import_module("tb_memplugin.notebook").html_of(self)
        return html


class Tabular(AnalysisResult):
    """A result with columns."""

    __slots__ = ()

    def columns(self) -> dict[str, Column]:
        """Return the columns by name. The names say the units: bytes, or `_ns` for nanoseconds."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return the columns as a pandas DataFrame; integers that are not known are `pd.NA`.

        Raises:
            MemPluginError: pandas is not installed.
        """
        pandas = library("pandas", "pandas")
        return pandas.DataFrame({name: _for_pandas(pandas, each) for name, each in self.columns().items()})

    def to_arrow(self) -> Any:
        """Return the columns as a `pyarrow.Table`; what is not known is null.

        Raises:
            MemPluginError: pyarrow is not installed.
        """
        arrow = library("pyarrow", "arrow")
        return arrow.table({name: _for_arrow(arrow, each) for name, each in self.columns().items()})


class ResultTable(tuple[T, ...], Tabular):
    """A tuple of results of one kind, largest first or in time order, as its function says."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return how many results there are, and the first."""
        if not self:
            return "ResultTable()"
        more = f", ... {len(self) - 1:,} more" if len(self) > 1 else ""
        return f"ResultTable({_cut(repr(self[0]), MOST_CHARACTERS - 50)}{more})"

    def columns(self) -> dict[str, Column]:
        """Return a column for each field and property of the results."""
        if not self:
            return {}
        kind = type(self[0])
        names = [each.name for each in fields(kind) if not each.name.startswith("_")]  # type: ignore[arg-type]  # T
        names += [name for name, each in vars(kind).items() if isinstance(each, property)]
        return {name: column_of([getattr(row, name) for row in self]) for name in names}


class Names:
    """A column of texts that repeat: `row` has the place of each in `names`, -1 for none.

    Args:
        row: integers, shape (n,).
        names: texts. Any may be twice in it.
    """

    def __init__(self, row: Any, names: Iterable[str]) -> None:
        kept: dict[str, int] = {}
        rows = [kept.setdefault(readable(name), len(kept)) for name in names]
        self.names = list(kept)
        self.row: Int64 = np.array([*rows, -1], np.int64)[np.asarray(row, np.int64)]


Column = np.ndarray | Names | list[Any]
"""An array (masked where a value is not known), names, or a list of values of any kind."""


def column_of(values: Sequence[Any]) -> Column:
    """Return values as a column: integers, of which some may be None, as an array; others as a list."""
    present = [value for value in values if value is not None]
    if not present or not all(type(value) is int for value in present):
        return [plain(value) for value in values]
    kind = np.uint64 if max(present) > MOST_INTEGER and min(present) >= 0 else np.int64
    mask = np.array([value is None for value in values], np.bool_)
    numbers = np.array([0 if value is None else value for value in values], kind)
    return np.ma.MaskedArray(numbers, mask) if mask.any() else numbers


def readable(text: str) -> str:
    """Return a text that can be encoded; what cannot be is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """Return a value that Arrow takes: an enumeration as its key, a result as its fields."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, IntEnum):
        return str(getattr(value, "key", value.name.lower()))
    if isinstance(value, AnalysisResult) and not isinstance(value, tuple):
        shown = [each.name for each in fields(value) if each.repr]  # type: ignore[arg-type]  # as in __repr__
        return {name: plain(getattr(value, name)) for name in shown}
    if isinstance(value, Mapping):
        return {readable(str(key)): plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


def json_value(value: object) -> object:
    """Return what JSON has in place of an array, a list, and of a result, its fields; for `json.dumps`."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return json_fields(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def json_fields(result: Any) -> dict[str, Any]:
    """Return the fields of a result by name; pairs of a text and a value become a dictionary."""
    kind: Any = type(result)
    pairs = _fields_of_pairs(kind)
    values = ((each.name, getattr(result, each.name)) for each in fields(result))
    return {name: dict(value) if name in pairs else value for name, value in values}


@cache
def _fields_of_pairs(kind: Any) -> list[str]:
    return [name for name, hint in get_type_hints(kind).items() if type_of_pairs(hint) is not None]


def type_of_pairs(hint: Any) -> Any:
    """Return the type of the values in a type of pairs, `tuple[tuple[str, int], ...]`; of others None."""
    pair, *rest = get_args(hint) or (None,)
    is_pairs = get_origin(hint) is get_origin(pair) is tuple and get_args(pair)[0] is str and rest == [...]
    return get_args(pair)[1] if is_pairs else None


def _for_pandas(pandas: Any, values: Column) -> Any:
    if isinstance(values, Names):
        return pandas.Categorical.from_codes(values.row, values.names)
    if isinstance(values, np.ma.MaskedArray):
        return pandas.arrays.IntegerArray(values.data, np.ma.getmaskarray(values))
    return values


def _for_arrow(arrow: Any, values: Column) -> Any:
    if isinstance(values, Names):
        codes = arrow.array(values.row.astype(np.int32), mask=values.row < 0)
        return arrow.DictionaryArray.from_arrays(codes, arrow.array(values.names, arrow.string()))
    if isinstance(values, np.ma.MaskedArray):
        return arrow.array(values.data, mask=np.ma.getmaskarray(values))
    array = arrow.array(values)
    return arrow.nulls(len(array)) if array.type == arrow.struct([]) else array  # Parquet has no empty struct


def _cut(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[: most - 4]}...)"
