"""Whether a JSON value is what a type of tb_memplugin.server declares: no key missing, none too many."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

PLAIN: dict[Any, tuple[type, ...]] = {float: (int, float), NoneType: (NoneType,)}


def differences(value: Any, type_: Any, path: str = "answer") -> Iterator[str]:
    """Yield where a value is not of a type."""
    origin, parts = get_origin(type_), get_args(type_)
    if origin in (Union, UnionType):
        each = [list(differences(value, part, path)) for part in parts]
        yield from min(each, key=len)
    elif is_typeddict(type_) and isinstance(value, dict):
        hints = get_type_hints(type_)
        yield from (f"{path} lacks {name}" for name in sorted(type_.__required_keys__ - value.keys()))
        yield from (f"{path} has {name}" for name in sorted(value.keys() - hints.keys()))
        for name in value.keys() & hints.keys():
            yield from differences(value[name], hints[name], f"{path}.{name}")
    elif origin is dict and isinstance(value, dict):
        for name in value:
            yield from differences(value[name], parts[1], f"{path}[{name!r}]")
    elif origin is list and isinstance(value, list):
        for item in value:
            yield from differences(item, parts[0], f"{path}[]")
    elif origin is tuple and isinstance(value, list) and len(value) == len(parts):
        for item, part in zip(value, parts, strict=True):
            yield from differences(item, part, f"{path}[]")
    elif origin is Literal:
        if value not in parts:
            yield f"{path} is {value!r}"
    elif origin or is_typeddict(type_) or type(value) not in PLAIN.get(type_, (type_,)):
        yield f"{path} is {value!r}"
