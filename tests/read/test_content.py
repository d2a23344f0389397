"""Tests of JSON read piece by piece against all of it at once."""

import gzip
import io
import json
import re
from itertools import chain
from typing import Any

import pytest

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read import content
from tb_memplugin.read.content import GzipStream, read_json

EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": f"a }}, {{ {row} \u2192", "args": {"rows": [{"a": row}, {"b": 1.5}]}}
    for row in range(40)
]
HEAD, TAIL = {"schemaVersion": 1, "other": {"traceEvents": 2}}, {"traceName": "x", "baseTimeNanoseconds": 7}
WHOLE = {**HEAD, "traceEvents": EVENTS, **TAIL}
LAYOUTS = {
    "object": json.dumps(WHOLE),
    "indented": json.dumps(WHOLE, indent=2, ensure_ascii=False),
    "dense": json.dumps(WHOLE, separators=(",", ":")),
    "sorted": json.dumps(WHOLE, sort_keys=True),
    "list": json.dumps(EVENTS),
    "other elements": json.dumps({"traceEvents": [EVENTS[0], 1, None, [], *EVENTS[1:], "x"]}),
    "no events": '{"traceEvents": [], "a": 1}',
}


def in_pieces(text):
    """Return the content as it is read piece by piece, and of how many events each batch was."""
    sizes: list[int] = []

    def all_of(batches):
        read = list(batches)
        sizes.extend(map(len, read))
        return list(chain(*read))

    found, notes = read_json(io.BytesIO(text.encode()), "x", all_of)
    return found, tuple(map(str, notes)), sizes


def refusal(text, events=None):
    with pytest.raises(UnreadableFileError) as caught:
        read_json(io.BytesIO(text.encode()), "x", events)
    return caught.value.what


@pytest.mark.parametrize("size", [1, 100, 700, 1 << 18])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_read_in_pieces_is_what_is_read_at_once(name, size, monkeypatch):
    monkeypatch.setattr(content, "JSON_BYTES", size)
    expected = json.loads(LAYOUTS[name])
    found, notes, sizes = in_pieces(LAYOUTS[name])
    if isinstance(expected, list) and sizes:
        expected = {"traceEvents": expected}
    assert found == expected
    assert notes == ()


def test_few_events_are_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(content, "JSON_BYTES", 1000)  # each event has 97 bytes or more
    _, _, sizes = in_pieces(LAYOUTS["object"])
    assert (sum(sizes), max(sizes) <= 11, len(sizes) >= 4) == (40, True, True)


def test_a_file_that_is_cut_anywhere_is_refused_as_if_it_was_read_at_once(monkeypatch):
    monkeypatch.setattr(content, "JSON_BYTES", 500)
    text = LAYOUTS["object"]
    for end in range(1, len(text), 7):
        assert refusal(text[:end], list) == refusal(text[:end])
    end = text.index('"cat"', 3000)
    assert f"after {end:,} characters: the file is truncated" in refusal(text[:end], list)


@pytest.mark.parametrize("place", [10, 60, 2000, -40])
def test_damage_is_named_by_its_place_in_the_file(place, monkeypatch):
    monkeypatch.setattr(content, "JSON_BYTES", 500)
    text = LAYOUTS["dense"]
    comma = text.index(",", place if place > 0 else len(text) + place)
    damaged = f"{text[: comma + 1]}!{text[comma + 1 :]}"
    assert refusal(damaged, list) == refusal(damaged)
    assert f"at character {comma + 1:,} " in refusal(damaged, list)


def test_numbers_that_are_not_json_are_counted_and_missing_in_all_pieces(monkeypatch):
    monkeypatch.setattr(content, "JSON_BYTES", 700)
    text = LAYOUTS["object"].replace('"a": ', '"c": -nan, "d": inf , "a": ')
    found, notes, _ = in_pieces(text)
    assert found == json.loads(re.sub("-nan|inf", "null", text))
    assert [note.split(" inf")[0] for note in notes] == ["The file contains 80"]


@pytest.mark.parametrize(
    ("text", "events", "many"),
    [
        ('{"a": 1, "a": 2, "traceEvents": [{"ph": 1, "ph": 2}, {"ph": 3}], "b": 1, "b": 2}', [2, 3], 3),
        ('[{"ph": 1, "ph": 2}, {"ph": 3}]', [2, 3], 1),
        ('{"a": 1, "traceEvents": [{"ph": 1}, {"ph": 3}], "a": 2}', [1, 3], 1),
        ('{"traceEvents": [{"ph": 1}], "traceEvents": [{"ph": 2}]}', [2], 1),
    ],
)
def test_keys_that_are_there_twice_are_counted_once(text, events, many):
    found, notes, _ = in_pieces(text)
    assert [event["ph"] for event in found["traceEvents"]] == events
    assert notes[0].startswith(f"{many} keys appear more than once")


def test_a_packed_file_that_is_not_json_is_read_again_from_its_beginning():
    packed = gzip.compress(LAYOUTS["object"].replace('"schemaVersion": 1', '"schemaVersion": nan').encode())
    stream: Any = GzipStream(io.BytesIO(packed), "x", 1 << 20)
    found, _ = read_json(stream, "x", lambda batches: sum(map(len, batches)))
    assert (found["traceEvents"], found["schemaVersion"]) == (40, None)
    with pytest.raises(io.UnsupportedOperation):
        stream.seek(1)
