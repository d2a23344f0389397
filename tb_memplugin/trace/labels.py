"""Labels that users gave to allocations: texts, JSON objects, and several of them joined."""

from __future__ import annotations

import json
import re

JOIN = " + "
"""Stands between the labels of a block that has several."""

BUCKET = "bucket of gradients"
"""The beginning of the label of a bucket of `DistributedDataParallel`, whose size torch tells."""

ALIVE_BEFORE = "alive before, not named"
"""The label of a storage that no variable names and that no window before has recorded."""

INPUT_OF = "input of "
"""The beginning of the label of what enters a module; the module's name follows."""

HELD_BY = "held by "
"""The beginning of the label of a block that outlives its window; what holds it follows."""

HELD_BY_A_LOCAL = f"{HELD_BY}a local variable, or C++"
"""The label of what nothing refers to of what the garbage collector knows, and of what has no tensor."""

IN_CYCLE = "held by a reference cycle: "
"""The beginning of the label of a block that only a cycle of Python's objects holds; their classes follow."""

HOLDERS_SEARCHED = "holders_searched"
"""The property of a trace in which the search for what holds the blocks that outlive it came to its end."""

DUMP_OF = "dump_of"
"""The property of a trace that was written when a request failed: the worker in which it failed."""


_ELEMENT = re.compile(r"\[[^\[\]]*\]")
"""An element in the name of what holds a tensor: `[3]`, `['mean']`."""


def any_element(label: str) -> str:
    """Return a label in which the elements of a list or dictionary are one: `losses[*]` for `losses[3]`."""
    return _ELEMENT.sub("[*]", label)


def fields_of(label: str) -> dict[str, str]:
    """Return the keys and values of a label's JSON objects as text; {} where it has none."""
    fields: dict[str, str] = {}
    for text in (label, *label.split(JOIN)):
        if text.startswith("{"):
            fields |= _object(text)
    return fields


def _object(text: str) -> dict[str, str]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in content.items()}
