"""Ways to damage a file: its bytes, or what it says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS = (0, -1, 1, 255, 1 << 31, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63), 1e300, -0.5)
WRONG: tuple[Any, ...] = (None, -1, "text", 1.5, [], {}, 1 << 70, True, b"bytes", float("nan"))


def bytes_damaged(content: bytes, random: Random) -> bytes:
    """Truncated, flipped, overwritten, with a hole, with parts doubled or moved, or a length that lies."""
    way, place = random.randrange(8), random.randrange(len(content) or 1)
    end = place + random.randint(1, 20)
    if way == 0:
        return content[:place]
    if way == 1:
        damaged = bytearray(content)
        for _ in range(random.randint(1, 8)):
            damaged[random.randrange(len(content))] ^= 1 << random.randrange(8)
        return bytes(damaged)
    if way == 2:
        return content[:place] + random.randbytes(end - place) + content[end:]
    if way == 3:
        return content[:place] + content[end:]
    if way == 4:
        return content[:place] + random.randbytes(end - place) + content[place:]
    if way == 5:
        return content[:place] + content[place // 2 :]
    if way == 6:
        cuts = sorted(random.randrange(len(content) + 1) for _ in range(3))
        return (
            content[: cuts[0]] + content[cuts[1] : cuts[2]] + content[cuts[0] : cuts[1]] + content[cuts[2] :]
        )
    width = random.choice((1, 2, 4, 8))
    length = random.choice((0, 1, 1 << 7, 1 << 15, 1 << 31, (1 << 63) - 1)) & ((1 << 8 * width) - 1)
    return content[:place] + length.to_bytes(width, "little") + content[place + width :]


def tree_damaged(content: Any, random: Random) -> Any:
    """One to three values anywhere in nested lists and dicts replaced, removed, doubled or swapped."""
    damaged = deepcopy(content)
    for _ in range(random.randint(1, 3)):
        _damage_a_place(random.choice(_places(damaged)), random)
    return damaged


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Return each value in nested lists and dicts as what holds it, and its index or key."""
    if not isinstance(content, dict | list):
        return []
    items = list(content.items() if isinstance(content, dict) else enumerate(content))
    return [(content, key) for key, _ in items] + [
        place for _, value in items for place in _places(value)
    ] or [([content], 0)]


def _damage_a_place(place: tuple[Any, Any], random: Random) -> None:
    inside, key = place
    way = random.randrange(5)
    other = random.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
    if way == 0:
        inside[key] = random.choice(NUMBERS)
    elif way == 1:
        del inside[key]
    elif way == 2:
        inside[key], inside[other] = inside[other], inside[key]
    elif way == 3 and isinstance(inside, list):
        inside.insert(other, deepcopy(inside[key]))
    elif way == 4 and type(inside[key]) is int:
        inside[key] += random.choice((-1000, -1, 1, 1 << 40))
    else:
        inside[key] = deepcopy(random.choice(WRONG))


def story_damaged(content: dict[str, Any], random: Random) -> dict[str, Any]:
    """One to three things that a snapshot says, changed."""
    damaged = deepcopy(content)
    for _ in range(random.randint(1, 3)):
        with suppress(KeyError, IndexError, TypeError, AttributeError, ValueError):  # damaged already
            random.choice(WAYS)(damaged, random)
    return damaged


def _rows(content: dict[str, Any]) -> Any:
    return content["device_traces"][0]


def _blocks(content: dict[str, Any]) -> Any:
    return content["segments"][0]["blocks"]


def _drop_entry(content: dict[str, Any], random: Random) -> None:
    _rows(content).pop(random.randrange(len(_rows(content))))


def _double_entry(content: dict[str, Any], random: Random) -> None:
    rows = _rows(content)
    rows.insert(random.randrange(len(rows)), dict(random.choice(rows)))


def _swap_entries(content: dict[str, Any], random: Random) -> None:
    rows = _rows(content)
    a, b = random.randrange(len(rows)), random.randrange(len(rows))
    rows[a], rows[b] = rows[b], rows[a]


def _resize_entry(content: dict[str, Any], random: Random) -> None:
    random.choice(_rows(content))["size"] += random.choice((-1000, -1, 1, 1 << 40))


def _move_entry(content: dict[str, Any], random: Random) -> None:
    random.choice(_rows(content))["addr"] = random.choice(_rows(content))["addr"]


def _rename_action(content: dict[str, Any], random: Random) -> None:
    random.choice(_rows(content))["action"] = random.choice(("alloc", "free_completed", "snapshot", "x", 3))


def _wrong_type(content: dict[str, Any], random: Random) -> None:
    where = random.choice((_rows(content), _blocks(content) or _rows(content), content["segments"]))
    row = random.choice(where)
    row[random.choice(list(row))] = random.choice(WRONG)


def _drop_key(content: dict[str, Any], random: Random) -> None:
    row = random.choice((random.choice(_rows(content)), content["segments"][0], content))
    row.pop(random.choice(list(row)))


def _drop_block(content: dict[str, Any], random: Random) -> None:
    if _blocks(content):
        _blocks(content).pop(random.randrange(len(_blocks(content))))


def _overlap_blocks(content: dict[str, Any], random: Random) -> None:
    if _blocks(content):
        _blocks(content).append(dict(random.choice(_blocks(content))))


def _resize_block(content: dict[str, Any], random: Random) -> None:
    if _blocks(content):
        random.choice(_blocks(content))["requested_size"] += random.choice((-10_000, -1, 1, 1 << 40))


def _melt_block(content: dict[str, Any], random: Random) -> None:
    if _blocks(content):
        random.choice(_blocks(content))["state"] = random.choice(("inactive", "melting"))


def _shrink_segment(content: dict[str, Any], random: Random) -> None:
    content["segments"][0]["total_size"] = random.choice((0, 100, -5))


WAYS: tuple[Callable[[dict[str, Any], Random], None], ...] = (
    _drop_entry,
    _double_entry,
    _swap_entries,
    _resize_entry,
    _move_entry,
    _rename_action,
    _wrong_type,
    _drop_key,
    _drop_block,
    _overlap_blocks,
    _resize_block,
    _melt_block,
    _shrink_segment,
)
