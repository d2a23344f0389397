"""Labels that users gave to allocations: texts, JSON objects, and several of them joined."""

from __future__ import annotations

import json

JOIN = " + "
"""Stands between the labels of a block that has several."""


def fields_of(label: str) -> dict[str, str]:
    """Return the keys and values of a label's JSON objects as text; {} where it has none."""
    fields: dict[str, str] = {}
    for text in (label, *label.split(JOIN)):
        if text.startswith("{") and not fields:
            fields = _object(text)
        elif text.startswith("{"):
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
