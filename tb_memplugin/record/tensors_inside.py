"""Find what an object holds, above all tensors, without running any of its code.

Properties, `__getattr__`, `__dict__` and iterators of foreign classes are never called: what a class written
in Python keeps is read from the instance's own dictionary and from its slots. A search ends after a number
of objects and at a depth, and meets each object once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice, repeat
from types import GetSetDescriptorType, MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch import nn

MOST_OBJECTS = 100_000
"""How many objects a search looks at. A cache of 100 layers has about 500."""

DEEPEST = 8
"""How many objects may enclose a tensor that is found."""

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE of CPython: the class was made at run time, as classes written in Python are."""

_flags = type.__dict__["__flags__"].__get__
_mro = type.__dict__["__mro__"].__get__
_namespace = type.__dict__["__dict__"].__get__
_OTHERS_OWN = (nn.Module, torch.optim.Optimizer, type)
"""Classes whose instances are not entered: what they hold is theirs."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors in nested dicts, lists, tuples, sets and attributes of objects.

    Modules and optimizers are not entered.
    """
    if isinstance_of(value, torch.Tensor):
        yield value
        return
    pending = deque([(value, 0)])
    visited, looked = {id(value)}, 0
    while pending:
        holder, depth = pending.popleft()
        for _, inner, _ in held_by(holder, MOST_OBJECTS + 1):
            looked += 1
            if looked > MOST_OBJECTS:
                return
            if isinstance_of(inner, torch.Tensor):
                if id(inner) not in visited:
                    visited.add(id(inner))
                    yield inner
            elif depth < DEEPEST and id(inner) not in visited and _may_hold(type(inner)):
                visited.add(id(inner))
                pending.append((inner, depth + 1))


def isinstance_of(value: object, kind: type) -> bool:
    """Whether an object's class derives from another. `isinstance` also asks `__class__`, which may lie."""
    return _derives(type(value), kind)


def _derives(kind: type, base: type) -> bool:
    """Whether a class derives from another. `in` would ask metaclasses whether their classes are equal."""
    return any(other is base for other in _mro(kind))


def subclasses(kind: type) -> Iterator[type]:
    """Yield a class and all made from it, one with several bases several times. No metaclass is asked."""
    pending = [kind]
    while pending:
        current = pending.pop()
        yield current
        pending += type.__subclasses__(current)


def _may_hold(kind: type) -> bool:
    if id(kind) in _CONTAINER_OF or kind is SimpleNamespace:
        return True
    return bool(_flags(kind) & _HEAP_TYPE) and not any(_derives(kind, own) for own in _OTHERS_OWN)


_CONTAINER_OF = {id(kind): kind for kind in (dict, list, tuple, set, frozenset, deque)}


def held_by(holder: Any, most: int) -> Iterator[tuple[Any, Any, bool]]:
    """Yield (key, object, whether the key is an attribute's name) of what an object holds.

    The key of an item is a dict's key or the place, None in a set. Copies are made first: another thread may
    change a container.

    Args:
        most: how many items of a container, and how many attributes, are looked at.
    """
    bases = _mro(type(holder))
    for base in bases:
        container = _CONTAINER_OF.get(id(base))
        if container is not None:
            if container is dict:
                pairs = tuple(islice(dict.items(holder), most))
            elif container in (set, frozenset):
                pairs = tuple(zip(repeat(None), islice(container.__iter__(holder), most)))
            else:
                pairs = tuple(enumerate(islice(container.__iter__(holder), most)))
            for key, inner in pairs:
                yield key, inner, False
            break
    for name, inner in _attributes(holder, bases)[:most]:
        yield name, inner, True


def _attributes(holder: object, bases: tuple[type, ...]) -> list[tuple[str, Any]]:
    """Return the names and values in an instance's own dictionary and in its slots."""
    attributes: list[tuple[str, Any]] = []
    for base in bases:
        namespace = _namespace(base)
        own = namespace.get("__dict__")
        if type(own) in (GetSetDescriptorType, MemberDescriptorType):
            table = own.__get__(holder, type(holder))
            attributes += dict.items(table) if type(table) is dict else ()
        if "__slots__" in namespace and _flags(base) & _HEAP_TYPE:
            for name, descriptor in tuple(namespace.items()):
                if type(descriptor) is MemberDescriptorType and name != "__dict__":
                    try:
                        attributes.append((name, descriptor.__get__(holder, type(holder))))
                    except AttributeError:
                        continue  # nothing was assigned
    return attributes
