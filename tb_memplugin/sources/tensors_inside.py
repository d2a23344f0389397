"""Find the tensors that an object holds, without running any of its code.

Properties, `__getattr__`, `__dict__` and iterators of foreign classes are never called: what a class written
in Python keeps is read from the instance's own dictionary and from its slots. A search ends after a number
of objects and at a depth, and meets each object once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import GetSetDescriptorType, MemberDescriptorType
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
    seen, looked = {id(value)}, 0
    while pending:
        holder, depth = pending.popleft()
        for inner in _held(holder):
            looked += 1
            if looked > MOST_OBJECTS:
                return
            if isinstance_of(inner, torch.Tensor):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    yield inner
            elif depth < DEEPEST and id(inner) not in seen and _may_hold(type(inner)):
                seen.add(id(inner))
                pending.append((inner, depth + 1))


def isinstance_of(value: object, kind: type) -> bool:
    """Whether an object's class derives from another. `isinstance` also asks `__class__`, which may lie."""
    return kind in _mro(type(value))


def _may_hold(kind: type) -> bool:
    if kind in _CONTAINERS:
        return True
    return bool(_flags(kind) & _HEAP_TYPE) and not any(own in _mro(kind) for own in _OTHERS_OWN)


_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def _held(holder: Any) -> Iterator[Any]:
    """Yield what an object holds. Copies are made first: another thread may change a container."""
    kind = type(holder)
    for container in _CONTAINERS:
        if container in _mro(kind):
            held = dict.values(holder) if container is dict else container.__iter__(holder)
            yield from tuple(islice(held, MOST_OBJECTS + 1))
            break
    if _flags(kind) & _HEAP_TYPE:
        yield from _attributes(holder, kind)


def _attributes(holder: object, kind: type) -> Iterator[Any]:
    """Yield the values in an instance's own dictionary and in its slots."""
    for base in _mro(kind):
        for name, descriptor in tuple(_namespace(base).items()):
            found = type(descriptor)
            if found is MemberDescriptorType and _flags(base) & _HEAP_TYPE:
                try:
                    yield descriptor.__get__(holder, kind)
                except AttributeError:
                    continue  # nothing was assigned
            elif found is GetSetDescriptorType and name == "__dict__":
                own = descriptor.__get__(holder, kind)
                yield from own.copy().values() if type(own) is dict else ()
