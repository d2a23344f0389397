"""Whether a JSON value is what a type of tb_memplugin.server declares: no key missing, none too many."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from frontend.contract import element_type, is_object, value_type

PLAIN: dict[Any, tuple[type, ...]] = {float: (int, float), NoneType: (NoneType,)}


def differences(value: Any, type_: Any, path: str = "answer") -> Iterator[str]:
    """Yield where a value is not of a type."""
    origin, parts = get_origin(type_), get_args(type_)
    values, element = value_type(type_), element_type(type_)
    if origin in (Union, UnionType):
        each = [list(differences(value, part, path)) for part in parts]
        yield from min(each, key=len)
    elif is_object(type_) and isinstance(value, dict):
        hints = get_type_hints(type_)
        required = hints.keys() - getattr(type_, "__optional_keys__", ())
        yield from (f"{path} lacks {name}" for name in sorted(required - value.keys()))
        yield from (f"{path} has {name}" for name in sorted(value.keys() - hints.keys()))
        for name in value.keys() & hints.keys():
            yield from differences(value[name], hints[name], f"{path}.{name}")
    elif values is not None and isinstance(value, dict):
        for name in value:
            yield from differences(value[name], values, f"{path}[{name!r}]")
    elif element is not None and isinstance(value, list):
        for item in value:
            yield from differences(item, element, f"{path}[]")
    elif origin is tuple and isinstance(value, list) and len(value) == len(parts):
        for item, part in zip(value, parts, strict=True):
            yield from differences(item, part, f"{path}[]")
    elif origin is Literal:
        if value not in parts:
            yield f"{path} is {value!r}"
    elif origin or is_object(type_) or type(value) not in PLAIN.get(type_, (type_,)):
        yield f"{path} is {value!r}"
