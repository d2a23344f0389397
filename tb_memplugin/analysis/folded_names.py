"""Layers that repeat, under one name: `blocks.*.attn` stands for `blocks.0.attn`, `blocks.1.attn`, ..."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^. ])")


def folded_name(key: str) -> str:
    """A module's key with `*` for every part that is a number."""
    return _NUMBER.sub("*", key)
