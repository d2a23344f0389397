"""Sort the modules of any recording into the groups of one window, to compare recordings by group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tb_memplugin.analysis.breakdown import Part, merged
from tb_memplugin.analysis.module_groups import OTHER_MODULES


def folded_parts(
    parts: Iterable[Part], group_of: Mapping[str, str], groups: Sequence[str]
) -> tuple[Part, ...]:
    """Merge parts by module into parts by group, with the same total bytes.

    Args:
        parts: the parts of any recording, one for each module.
        group_of: the group of every module of the window that defines the groups.
        groups: the names of that window's groups. A module that the window does not have goes to the group
            whose pattern it matches (`layers.30.mlp` to `layers.*.mlp`), else to the other modules.
    """
    patterns = sorted(((name.split("."), name) for name in groups), key=lambda pattern: -len(pattern[0]))
    merged_parts: dict[str, Part] = {}
    for part in parts:
        key = group_of.get(part.key) or _holder(part.key.split("."), patterns)
        in_group = replace(part, key=key)
        merged_parts[key] = merged(merged_parts[key], in_group) if key in merged_parts else in_group
    return tuple(sorted(merged_parts.values(), key=lambda part: -part.bytes))


def _holder(key: Sequence[str], patterns: Sequence[tuple[list[str], str]]) -> str:
    """Return the deepest group whose name matches the beginning of the key."""
    for pattern, name in patterns:
        if len(pattern) <= len(key) and all(map(_covers, pattern, key)):
            return name
    return OTHER_MODULES


def _covers(pattern: str, segment: str) -> bool:
    """Return whether a segment of a pattern matches: `*` any number, `0-15` a range, a name itself."""
    if pattern == segment:
        return True
    first, dash, last = pattern.partition("-")
    if not (segment.isascii() and segment.isdigit() and len(segment) < 10):
        return False
    is_range = dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()
    return pattern == "*" or bool(is_range and int(first) <= int(segment) <= int(last))
