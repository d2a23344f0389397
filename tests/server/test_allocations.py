"""`allocation_bands`, `allocations`, `allocation`: single allocations, drawn, listed, told."""

from __future__ import annotations

import pytest

from tb_memplugin.store.writer import RunWriter
from tests.recorded_program import program
from tests.server.tab import Tab

STACKS = {
    "mlp": ("malloc ??:0", "mlp /work/model.py:20", "<module> /work/train.py:3"),
    "head": ("head /work/model.py:40", "<module> /work/train.py:3"),
}
PROGRAM = program(
    "before 1000 w category=parameter label=head.weight",
    "START Optimizer.step#SGD",
    "alloc 30 a at=mlp category=activation context=0/0",
    "alloc 50 t at=head category=temporary",
    "free t",
    "END Optimizer.step#SGD",
    "alloc 20 t at=head forward=mlp",
    "alloc 9 other device=1",
    "free a",
    stacks=STACKS,
)
"""Alive on cuda:0: 1000, 1030, 1080, 1030, 1050, 1050, 1020. Addresses: w 0x1000, a 0x2000, t 0x3000."""

CHOSEN = {"run": "r", "worker": "rank0", "step": 0, "device": "cuda:0"}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logdir")
    RunWriter(str(folder / "r"), "rank0").write(PROGRAM)
    return Tab(folder)


def sums(answer):
    """Bands and the rest in each column."""
    total = list(answer["rest"])
    bands = answer["bands"]
    for size, first, last in zip(bands["bytes"], bands["first"], bands["last"], strict=True):
        for column in range(first, last + 1):
            total[column] += size
    return total


def test_bands_by_hand(tab):
    answer = tab.get("allocation_bands", **CHOSEN, over="event", px=6, most=2)
    assert answer["max"] == [1030, 1080, 1080, 1050, 1050, 1050]
    assert answer["bands"]["bytes"] == [1000, 50]
    assert list(zip(answer["bands"]["first"], answer["bands"]["last"], strict=True)) == [(0, 5), (1, 2)]
    assert answer["rest"] == [30, 30, 30, 50, 50, 50]
    assert (answer["others"], answer["first_event"], answer["last_event"]) == (2, 0, 5)
    assert answer["peak"] == {"event": 1, "time_ns": 1_000, "bytes": 1080, "column": 1}
    assert [(part["key"], part["bytes"]) for part in answer["keys"]] == [
        ("parameter", 1000),
        ("activation", 30),
        ("temporary", 50),
        ("unknown", 20),
    ]
    assert answer["parts"] == [[0] * 6, [30] * 6, [0] * 6, [0, 0, 0, 20, 20, 20]]


@pytest.mark.parametrize("over", ["time", "event"])
@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("px", [1, 7, 400])
def test_bands_and_the_rest_sum_to_the_curve(tab, over, most, px):
    answer = tab.get("allocation_bands", **CHOSEN, over=over, most=most, px=px)
    assert sums(answer) == answer["max"]
    assert max(answer["max"]) == 1080
    if over == "time":
        curve = tab.get("curve", **CHOSEN, px=px)
        assert (answer["max"], answer["min"]) == (curve["max"], curve["min"])


@pytest.mark.parametrize("colour", ["category", "line", "stack", "pool", "annotation", "operator"])
def test_every_division_colours_the_same_bands(tab, colour):
    answer = tab.get("allocation_bands", **CHOSEN, px=20, colour=colour)
    plain = tab.get("allocation_bands", **CHOSEN, px=20)
    assert answer["bands"]["row"] == plain["bands"]["row"]
    assert sum(part["bytes"] for part in answer["keys"]) == sum(answer["bands"]["bytes"])
    assert max(answer["bands"]["key"]) < len(answer["keys"])


def test_a_zoom_draws_what_lives_in_it(tab):
    answer = tab.get("allocation_bands", **CHOSEN, over="event", t0=3, t1=5, px=8)
    assert sorted(answer["bands"]["bytes"]) == [20, 30, 1000]
    assert (answer["t0"], answer["t1"]) == (3, 5)


def listed(answer):
    return [(row["bytes"], row["address"], row["version"]) for row in answer["rows"]]


def test_the_list_holds_every_allocation_of_the_device(tab):
    answer = tab.get("allocations", **CHOSEN)
    assert listed(answer) == [(1000, "0x1000", 0), (50, "0x3000", 0), (30, "0x2000", 0), (20, "0x3000", 1)]
    assert (answer["rows_found"], answer["rows_all"], answer["bytes_found"]) == (4, 4, 1100)


def test_a_row_tells_where_and_how_long(tab):
    rows = {row["bytes"]: row for row in tab.get("allocations", **CHOSEN)["rows"]}
    activation = rows[30]
    assert (activation["line"], activation["kind"]) == ("/work/model.py:20 (mlp)", "user")
    assert (activation["born_ns"], activation["freed_ns"], activation["lifetime_ns"]) == (0, 5_000, 5_000)
    assert activation["category"] == "activation"
    parameter = rows[1000]
    assert (parameter["line"], parameter["kind"], parameter["name"]) == (None, "none", "head.weight")
    assert (parameter["born_ns"], parameter["lifetime_ns"]) == (None, None)


@pytest.mark.parametrize(
    ("find", "wanted"),
    [
        ("HEAD", [1000, 50, 20]),
        ("model.py:20", [30]),
        ("parameter", [1000]),
        ("0x3000", [50, 20]),
        ("0x3000_1", [20]),
        ("no such thing", []),
    ],
)
def test_the_server_searches(tab, find, wanted):
    answer = tab.get("allocations", **CHOSEN, find=find)
    assert [row["bytes"] for row in answer["rows"]] == wanted
    assert (answer["rows_found"], answer["bytes_found"], answer["rows_all"]) == (len(wanted), sum(wanted), 4)


@pytest.mark.parametrize(
    ("sort", "wanted"),
    [
        ("-bytes", [20, 30, 50, 1000]),
        ("born", [20, 50, 30, 1000]),
        ("-born", [1000, 30, 50, 20]),
        ("lifetime", [1000, 30, 20, 50]),
        ("-address", [1000, 30, 50, 20]),
    ],
)
def test_the_server_sorts(tab, sort, wanted):
    assert [row["bytes"] for row in tab.get("allocations", **CHOSEN, sort=sort)["rows"]] == wanted


def test_the_list_comes_in_pages(tab):
    pages = [tab.get("allocations", **CHOSEN, first=first, count=3) for first in (0, 3, 9)]
    assert [[row["bytes"] for row in page["rows"]] for page in pages] == [[1000, 50, 30], [20], []]
    assert {page["rows_found"] for page in pages} == {4}


def test_a_stretch_lists_what_lived_in_it(tab):
    answer = tab.get("allocations", **CHOSEN, over="event", t0=3, t1=5)
    assert [row["bytes"] for row in answer["rows"]] == [1000, 30, 20]
    answer = tab.get("allocations", **CHOSEN, t0=1_000, t1=1_500)
    assert [row["bytes"] for row in answer["rows"]] == [1000, 50, 30]


def test_one_allocation_is_told_with_all_that_is_known(tab):
    row = next(row["row"] for row in tab.get("allocations", **CHOSEN)["rows"] if row["bytes"] == 30)
    one = tab.get("allocation", **CHOSEN, row=row)
    assert (one["bytes"], one["rounded_bytes"], one["address"], one["version"]) == (30, None, "0x2000", 0)
    assert (one["pool"], one["stream"], one["context"]) == ("default", "default stream", "0/0")
    assert one["annotation"] == "Optimizer.step#SGD"
    assert (one["born_event"], one["freed_event"], one["first_ns"], one["last_ns"]) == (0, 5, 0, 5_000)
    texts = [frame["text"] for frame in one["frames"]]
    assert tuple(texts[place] for place in one["stack"]) == STACKS["mlp"]
    assert one["forward"] == []


def test_what_is_not_known_of_an_allocation_is_null(tab):
    one = tab.get("allocation", **CHOSEN, row=0)
    assert (one["born_event"], one["freed_event"], one["context"], one["annotation"]) == (None,) * 4
    assert (one["stack"], one["frames"]) == ([], [])
    assert (one["first_ns"], one["last_ns"]) == (0, 6_000)
    backward = tab.get("allocations", **CHOSEN, find="0x3000_1")["rows"][0]["row"]
    assert len(tab.get("allocation", **CHOSEN, row=backward)["forward"]) == 3


@pytest.mark.parametrize(
    ("route", "change", "status"),
    [
        ("allocation_bands", {"over": "space"}, 400),
        ("allocation_bands", {"colour": "taste"}, 400),
        ("allocation_bands", {"most": 0}, 400),
        ("allocation_bands", {"t0": 5, "t1": 5}, 400),
        ("allocations", {"sort": "colour"}, 400),
        ("allocations", {"count": 501}, 400),
        ("allocations", {"run": "nope"}, 404),
        ("allocation", {"row": 99}, 400),
        ("allocation", {"row": "one"}, 400),
    ],
)
def test_wrong_parameters_are_refused_in_words(tab, route, change, status):
    found, error = tab.refused(route, **{**CHOSEN, **change})
    assert found == status
    assert error["what"]
    assert error["fix"]


def test_without_its_side_file_the_file_is_named(tmp_path):
    RunWriter(str(tmp_path / "r"), "rank0").write(PROGRAM)
    next(tmp_path.rglob("*.mem")).unlink()
    for route in ("allocation_bands", "allocations", "stacks", "stack_table"):
        status, error = Tab(tmp_path).refused(route, **CHOSEN)
        assert status == 404
        assert error["where"].endswith("window-000000.mem")
    assert Tab(tmp_path).get("divisions", **CHOSEN)["divisions"] == ["category"]
