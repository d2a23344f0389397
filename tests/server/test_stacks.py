"""`stacks`, `stack_table`, `line_table`, `rule_table`: which code allocated what."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from time import process_time

import pytest

from tb_memplugin.server import rule_search
from tb_memplugin.server.rule_search import MOST_SEARCHES
from tb_memplugin.store.writer import RunWriter
from tests.recorded_program import program
from tests.server.tab import Tab

TORCH = "/usr/lib/python3.12/site-packages/torch"
LINEAR = f"linear {TORCH}/nn/functional.py:9"
MAIN, MLP, HEAD = "<module> /work/train.py:3", "mlp /work/model.py:20", "head /work/model.py:40"
STACKS = {
    "mlp": ("malloc ??:0", LINEAR, MLP, MAIN),
    "head": ("malloc ??:0", LINEAR, HEAD, MAIN),
    "native": ("malloc ??:0", "start_thread ??:0"),
}
PROGRAM = program(
    "before 1000 w",
    "alloc 30 a at=mlp",
    "alloc 50 t at=mlp",
    "free t",
    "alloc 10 b at=head",
    "alloc 7 c at=native forward=mlp",
    "free a",
    stacks=STACKS,
)
"""Alive: 1000, 1030, 1080 (the peak, after event 1), 1030, 1040, 1047, 1017."""

CHOSEN = {"run": "r", "worker": "rank0", "step": 0, "device": "cuda:0"}
LAST = {"event": 5}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logdir")
    RunWriter(str(folder / "r"), "rank0").write(PROGRAM)
    return Tab(folder)


def told(answer):
    """Each node as (its parent's place, the texts of its frames, bytes)."""
    nodes = answer["nodes"]
    texts = [[answer["frames"][row]["text"] for row in run] for run in nodes["run"]]
    return list(zip(nodes["parent"], texts, nodes["bytes"], strict=True))


def test_the_tree_is_that_of_the_peak_unless_told_otherwise(tab):
    answer = tab.get("stacks", **CHOSEN)
    assert (answer["of"], answer["event"], answer["bytes"], answer["count"]) == ("moment", 1, 1080, 3)
    assert told(answer) == [
        (-1, [], 1080),
        (0, [MAIN, MLP, LINEAR, "malloc ??:0"], 80),
        (0, [], 1000),
    ]
    assert (answer["nodes"]["label"][0], answer["nodes"]["label"][2]) == (-1, -2)
    assert answer["frames"][answer["nodes"]["label"][1]]["text"] == MLP
    assert (answer["knows_stacks"], answer["omitted"], answer["found"]) == (True, 0, None)


def test_the_tree_of_another_moment(tab):
    answer = tab.get("stacks", **CHOSEN, **LAST, frames="user")
    assert (answer["event"], answer["time_ns"], answer["bytes"]) == (5, 5_000, 1017)
    assert told(answer) == [
        (-1, [], 1017),
        (0, [MAIN], 10),
        (1, [HEAD], 10),
        (0, ["malloc ??:0"], 7),
        (0, [], 1000),
    ]
    assert tab.get("stacks", **CHOSEN, t=5_400, frames="user") == answer


def test_all_that_the_step_allocated_counts_what_was_freed_too(tab):
    answer = tab.get("stacks", **CHOSEN, of="step", frames="all")
    assert (answer["event"], answer["time_ns"], answer["bytes"], answer["count"]) == (None, None, 97, 4)
    assert told(answer)[1] == (0, [MAIN], 90)


def test_frames_tell_whose_code_they_are(tab):
    frames = {frame["text"]: frame for frame in tab.get("stacks", **CHOSEN, **LAST)["frames"]}
    kinds = {text: frame["kind"] for text, frame in frames.items()}
    assert kinds == {
        MAIN: "user",
        HEAD: "user",
        LINEAR: "library",
        "malloc ??:0": "native",
        "start_thread ??:0": "native",
    }
    head = frames[HEAD]
    assert (head["function"], head["file"], head["line"]) == ("head", "/work/model.py", 40)


def test_a_zoom_sends_what_is_below_and_above_the_node(tab):
    whole = tab.get("stacks", **CHOSEN, event=4, frames="all")
    mlp = next(
        node for node, (_, run, _) in zip(whole["nodes"]["id"], told(whole), strict=True) if run == [MLP]
    )
    answer = tab.get("stacks", **CHOSEN, event=4, frames="all", node=mlp)
    assert [run for _, run, _ in told(answer)] == [[], [MAIN], [MLP], [LINEAR], ["malloc ??:0"]]
    assert answer["node"] == mlp


def test_what_is_narrower_than_half_a_pixel_is_counted_and_not_sent(tab):
    answer = tab.get("stacks", **CHOSEN, event=4, px=60)
    assert answer["omitted"] == 1  # half of a sixtieth of 1047 bytes is 8.7
    assert 7 not in answer["nodes"]["bytes"]
    assert tab.get("stacks", **CHOSEN, event=4, px=4000)["omitted"] == 0


def test_a_node_that_another_moment_has_not_shows_everything(tab):
    assert tab.get("stacks", **CHOSEN, node=999_999)["node"] == 0


@pytest.mark.parametrize(
    ("text", "size", "count"),
    [("MODEL.PY", 40, 2), ("mlp", 30, 1), ("malloc", 47, 3), ("nothing", 0, 0)],
)
def test_what_is_found_counts_each_allocation_once(tab, text, size, count):
    for route in ("stacks", "stack_table"):
        assert tab.get(route, **CHOSEN, event=4, find=text)["found"] == {"bytes": size, "count": count}


def test_frames_that_are_found_are_marked(tab):
    answer = tab.get("stacks", **CHOSEN, event=4, frames="all", find="HEAD")
    marked = [run for found, (_, run, _) in zip(answer["nodes"]["found"], told(answer), strict=True) if found]
    assert marked == [[HEAD]]


def test_the_table_of_stacks_by_hand(tab):
    answer = tab.get("stack_table", **CHOSEN, event=4)
    rows = [(row["line"], row["kind"], row["bytes"], row["count"], row["per_call"]) for row in answer["rows"]]
    assert rows == [
        ("(no stack)", "none", 1000, 1, 1000.0),
        ("/work/model.py:20 (mlp)", "user", 30, 1, 30.0),
        ("/work/model.py:40 (head)", "user", 10, 1, 10.0),
        ("??:0 (malloc)", "native", 7, 1, 7.0),
    ]
    assert sum(row["bytes"] for row in answer["rows"]) == answer["bytes"] == 1047
    texts = [frame["text"] for frame in answer["frames"]]
    assert tuple(texts[row] for row in answer["rows"][1]["stack"]) == STACKS["mlp"]
    assert tuple(texts[row] for row in answer["rows"][3]["forward"]) == STACKS["mlp"]


@pytest.mark.parametrize(
    ("sort", "wanted"),
    [
        ("bytes", [1000, 30, 10, 7]),
        ("-bytes", [7, 10, 30, 1000]),
        ("line", [1000, 30, 10, 7]),
        ("-line", [7, 10, 30, 1000]),
        ("per_call", [1000, 30, 10, 7]),
    ],
)
def test_tables_are_sorted_by_the_server(tab, sort, wanted):
    answer = tab.get("stack_table", **CHOSEN, event=4, sort=sort)
    assert [row["bytes"] for row in answer["rows"]] == wanted
    answer = tab.get("line_table", **CHOSEN, event=4, sort=sort)
    assert [row["bytes"] for row in answer["rows"]] == wanted


def test_tables_come_in_pages(tab):
    pages = [tab.get("stack_table", **CHOSEN, event=4, first=first, count=2) for first in (0, 2, 4)]
    assert [[row["bytes"] for row in page["rows"]] for page in pages] == [[1000, 30], [10, 7], []]
    assert {page["rows_found"] for page in pages} == {4}


def test_source_lines_have_the_median_of_their_allocations(tab):
    answer = tab.get("line_table", **CHOSEN, of="step")
    rows = [(row["line"], row["bytes"], row["count"], row["median"]) for row in answer["rows"]]
    assert rows[0] == ("/work/model.py:20 (mlp)", 80, 2, 40.0)
    assert sum(row[1] for row in rows) == answer["bytes"] == 97
    found = tab.get("line_table", **CHOSEN, of="step", find="model.py")
    assert (found["rows_found"], found["found"]) == (2, {"bytes": 90, "count": 3})


def test_rules_in_their_order_and_last_what_none_matches(tab):
    answer = tab.get(
        "rule_table", **CHOSEN, event=4, rules="heads=^head$\n\n model = model\\.py \nall=malloc"
    )
    assert [(row["key"], row["bytes"], row["count"]) for row in answer["rows"]] == [
        ("heads", 10, 1),
        ("model", 30, 1),
        ("all", 7, 1),
        ("unknown", 1000, 1),
    ]
    alone = tab.get("rule_table", **CHOSEN, event=4)["rows"]
    assert alone == [{"key": "unknown", "bytes": 1047, "count": 4}]


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ("mlp=(", "'mlp'"),
        ("not a rule at all", "not a rule"),
        ("=x", "not a rule"),
        ("a=x\na=y", "twice"),
        ("unknown=x", "no rule matches"),
        ("\n".join(f"r{n}=x" for n in range(65)), "65 rules"),
    ],
)
def test_rules_that_cannot_be_are_refused_by_name(tab, rules, what):
    status, error = tab.refused("rule_table", **CHOSEN, rules=rules)
    assert status == 400
    assert what in error["what"]
    assert error["fix"]


def test_rules_never_open_a_file(tab, tmp_path):
    path = tmp_path / "a=b"
    path.write_text('{"secret": "malloc"}')
    for text in (str(path), str(tmp_path / "none.json"), '{"a": "b"}'):
        status, body = tab.answer("rule_table", **CHOSEN, rules=text)
        assert "secret" not in str(body)
        assert status in (200, 400)


@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "(?i)" + "[!-\uff00]" * 2_000], ids=["to search", "to compile"]
)
def test_a_pattern_that_would_take_for_ever_is_ended(pattern, monkeypatch, tmp_path):
    monkeypatch.setattr("tb_memplugin.server.rule_search.SECONDS", 0.5)
    long = program("alloc 5 a at=x", stacks={"x": (f"{'a' * 60}! file.py:1",)})
    RunWriter(str(tmp_path / "r"), "rank0").write(long)
    tab, begin = Tab(tmp_path), process_time()
    status, error = tab.refused("rule_table", **CHOSEN, rules=f"slow={pattern}")
    assert (status, "seconds" in error["what"]) == (400, True)
    assert process_time() - begin < 5, "the server computed it"


def test_searches_wait_for_each_other_and_one_that_waits_too_long_is_refused(monkeypatch, tmp_path):
    """Two of twelve requests search until the ten others, which wait for them, are refused."""
    monkeypatch.setattr("tb_memplugin.server.rule_search.SECONDS", 0.7)
    running, most, lock, search, others_are_refused = (
        0,
        0,
        threading.Lock(),
        subprocess.run,
        threading.Event(),
    )

    def run(*arguments, **options):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        others_are_refused.wait(60)
        with lock:
            running -= 1
        return search(*arguments, **{**options, "timeout": 60})

    monkeypatch.setattr(subprocess, "run", run)
    RunWriter(str(tmp_path / "r"), "rank0").write(PROGRAM)
    tab = Tab(tmp_path)
    with ThreadPoolExecutor(12) as clients:
        asked = [{**CHOSEN, "rules": f"{number}=mlp"} for number in range(12)]
        requests = [clients.submit(tab.answer, "rule_table", "GET", **rules) for rules in asked]
        answers = list(islice(as_completed(requests), 12 - MOST_SEARCHES))
        others_are_refused.set()
    assert most == MOST_SEARCHES
    refused = [one.result()[1]["error"] for one in answers]
    assert all("other searches" in error["what"] and error["fix"] for error in refused)
    assert [one.result()[0] for one in requests if one not in answers] == [200] * MOST_SEARCHES


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of processor time there")
def test_a_search_ends_by_itself_after_its_server_has_ended():
    asked = {"patterns": ["^(a+)+$"], "flags": 0, "texts": [[f"{'a' * 60}!", "file.py"]]}
    limited = rule_search._SEARCH.replace("alarm(20)", "alarm(1)")
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", limited], input=json.dumps(asked), text=True, timeout=60
    )
    assert -ended.returncode == signal.SIGALRM


@pytest.mark.parametrize(
    ("route", "change"),
    [
        ("stacks", {"frames": "some"}),
        ("stacks", {"of": "week"}),
        ("stacks", {"node": -1}),
        ("stacks", {"px": 0}),
        ("stacks", {"event": 99}),
        ("stack_table", {"sort": "colour"}),
        ("stack_table", {"count": 0}),
        ("stack_table", {"count": 501}),
        ("line_table", {"first": -1}),
    ],
)
def test_wrong_parameters_are_refused_in_words(tab, route, change):
    status, error = tab.refused(route, **CHOSEN, **change)
    assert status == 400
    assert error["what"]
    assert error["fix"]


def test_a_window_without_stacks_says_so(tab, logdir, baseline):
    answer = Tab(logdir).get("stacks", **baseline)
    assert answer["knows_stacks"] is False
    assert told(answer) == [(-1, [], 560), (0, [], 560)]


def test_divisions_are_those_that_the_window_knows_something_of(tab, logdir, baseline):
    assert tab.get("divisions", **CHOSEN)["divisions"] == ["category", "line", "stack"]
    known = Tab(logdir).get("divisions", **baseline)["divisions"]
    assert known == ["category", "module", "phase", "operator", "label"]


@pytest.mark.parametrize("by", ["operator", "line", "stack", "annotation", "pool", "stream", "context"])
def test_curves_and_moments_by_any_division_sum_to_the_whole(tab, by):
    curve = tab.get("curve", **CHOSEN, by=by, px=40)
    assert [sum(column) for column in zip(*curve["stacks"], strict=True)] == curve["max"]
    assert len(curve["labels"]) == len(curve["keys"])
    moment = tab.get("moment", **CHOSEN, event=4, by=by)
    assert sum(part["bytes"] for part in moment["parts"]) == moment["bytes"] == 1047


def test_stacks_go_by_their_leading_line(tab):
    parts = tab.get("moment", **CHOSEN, event=4, by="stack")["parts"]
    assert [part["label"] for part in parts][:2] == ["(no stack)", "/work/model.py:20 (mlp)"]
    assert parts[1]["key"] == "\n".join(STACKS["mlp"])


def test_two_peaks_are_compared_by_line(tab, tmp_path):
    other = program("before 1000 w", "alloc 90 a at=mlp", "alloc 4 n at=native", stacks=STACKS)
    RunWriter(str(tmp_path / "r"), "rank0").write(PROGRAM)
    RunWriter(str(tmp_path / "s"), "rank0").write(other)
    base = {f"base_{key}": value for key, value in CHOSEN.items()}
    answer = Tab(tmp_path).get("compare", by="line", **{**CHOSEN, "run": "s"}, **base)
    rows = {row["key"]: (row["status"], row["delta_bytes"]) for row in answer["rows"]}
    assert rows == {
        "/work/model.py:20 (mlp)": ("grown", 10),
        "??:0 (malloc)": ("added", 4),
        "(no stack)": ("same", 0),
    }
    assert answer["delta_bytes"] == 14


def test_hostile_frames_come_as_they_are_and_no_longer_than_they_may(tmp_path):
    evil = "<script>alert(1)</script>"
    stacks = {"evil": (f"{evil} {evil}.py:1", "f" * 10_000 + " /work/x.py:2")}
    RunWriter(str(tmp_path / "r"), "rank0").write(program("alloc 5 a at=evil", stacks=stacks))
    tab = Tab(tmp_path)
    frames = tab.get("stacks", **CHOSEN)["frames"]
    assert {frame["function"] for frame in frames} == {evil, "f" * 4_000}
    assert tab.get("stack_table", **CHOSEN, find=evil.upper())["rows_found"] == 1
    assert max(map(len, (row["line"] for row in tab.get("line_table", **CHOSEN)["rows"]))) <= 4_000


def test_the_largest_alive_tell_the_line_that_asked_for_them(tab):
    alive = tab.get("moment", **CHOSEN, event=1)["largest"]
    found = [(one["bytes"], one["line"]) for one in alive]
    assert found == [(1000, None), (50, "/work/model.py:20 (mlp)"), (30, "/work/model.py:20 (mlp)")]
