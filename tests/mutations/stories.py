"""Small true stories of an allocator, as snapshots; and a replay of them that is too simple to be wrong."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.snapshots import snapshot

SEGMENT = 1 << 21
GRAIN = 512


def story(random: Random, length: int = 40) -> dict[str, Any]:
    """A snapshot whose entries are the end of a history: blocks are alive before them and after them."""
    places = [GRAIN * row for row in range(SEGMENT // GRAIN)]
    random.shuffle(places)
    live: dict[int, int] = {}
    rows: list[dict[str, Any]] = []
    for number in range(2 * length):
        if live and random.random() < 0.45:
            address = random.choice(list(live))
            size = live.pop(address)
            rows.append(_entry("free_requested", address, size, number))
            rows.append(_entry("free_completed", address, size, number))
            places.insert(random.randrange(len(places)), address)
        else:
            address, size = places.pop(), random.randint(1, GRAIN)
            live[address] = size
            rows.append(_entry("alloc", address, size, number))
    return snapshot([_segment(live)], rows[-length:])


def _entry(action: str, address: int, size: int, number: int) -> dict[str, Any]:
    frames = [{"name": "forward", "filename": "model.py", "line": number % 7}]
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1_700_000_000_000_000 + 10 * number,
        "frames": frames,
    }


def _segment(live: dict[int, int]) -> dict[str, Any]:
    blocks = [
        {"address": at, "size": GRAIN, "requested_size": size, "state": "active_allocated", "frames": []}
        for at, size in sorted(live.items())
    ]
    return {
        "device": 0,
        "address": 0,
        "total_size": SEGMENT,
        "requested_size": sum(live.values()),
        "stream": 0,
        "segment_pool_id": (0, 0),
        "blocks": blocks,
    }


def replayed(content: dict[str, Any]) -> tuple[list[int], int]:
    """Live bytes before the first entry and after each, and how often the story contradicts itself.

    Backward from the final blocks, one entry at a time, in a dict.
    """
    wrong = 0
    live: dict[int, int] = {}
    for segment in content["segments"]:
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                wrong += block["address"] in live
                live[block["address"]] = block["requested_size"]
    levels = [sum(live.values())]
    for entry in reversed(content["device_traces"][0]):
        address, size = entry["addr"], entry["size"]
        if entry["action"] == "free_completed":
            wrong += address in live
            live[address] = size
        elif entry["action"] == "alloc":
            wrong += live.pop(address, None) != size
        levels.append(sum(live.values()))
    return levels[::-1], wrong
