"""Answers are kept while what they were computed from is the same, within a bound."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from werkzeug import wrappers
from werkzeug.test import Client

from tb_memplugin.server.backend import CLIENT_GONE, has_gone
from tb_memplugin.server.routes import moment
from tb_memplugin.server.windows import is_unchanged
from tb_memplugin.store.writer import RunWriter
from tests.server.conftest import BIGGER
from tests.server.tab import Tab


def counted(monkeypatch, module, name):
    calls, function = [], getattr(module, name)

    def count(*arguments, **named):
        calls.append(arguments)
        return function(*arguments, **named)

    monkeypatch.setattr(module, name, count)
    return calls


def test_the_same_question_is_computed_once(tab, baseline, monkeypatch):
    calls = counted(monkeypatch, moment, "moment")
    first = tab.get("moment", **baseline, event=2)
    assert tab.get("moment", event=2, **baseline) == first
    assert len(calls) == 1
    assert tab.get("moment", **baseline, event=1) != first
    assert len(calls) == 2


def test_clients_who_ask_the_same_at_the_same_time_share_the_answer(tab, baseline, monkeypatch):
    calls = counted(monkeypatch, moment, "moment")
    together = threading.Barrier(8)

    def ask(_):
        together.wait(20)
        return tab.get("moment", **baseline, event=2)["bytes"]

    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(ask, range(8))) == [500] * 8
    assert len(calls) == 1


def test_an_answer_is_computed_anew_when_its_side_file_changes(tab, baseline, side_file):
    assert tab.get("step", **baseline)["source"]["side_file_present"] is True
    side_file.rename(side_file.with_suffix(".away"))
    assert tab.get("step", **baseline)["source"]["side_file_present"] is False
    side_file.with_suffix(".away").rename(side_file)
    assert tab.get("step", **baseline)["source"]["side_file_present"] is True


def test_an_answer_is_computed_anew_when_a_step_is_added(tab, logdir, baseline, monkeypatch):
    calls = counted(monkeypatch, moment, "moment")
    tab.get("moment", **baseline, event=2)
    tab.get("runs")
    tab.get("moment", **baseline, event=2)
    assert len(calls) == 1
    RunWriter(str(logdir / "later"), "rank0").write(BIGGER)
    tab.reload()
    tab.get("runs")
    tab.get("moment", **baseline, event=2)
    assert len(calls) == 2


def test_runs_are_always_listed_anew(tab, logdir):
    before = len(tab.get("runs")["runs"])
    RunWriter(str(logdir / "later"), "rank0").write(BIGGER)
    tab.reload()
    assert len(tab.get("runs")["runs"]) == before + 1


def test_a_list_takes_one_query_of_tensorboard_the_first_time_too(logdir, monkeypatch):
    tab = Tab(logdir)
    queries = counted(monkeypatch, MultiplexerDataProvider, "list_blob_sequences")
    first = tab.get("runs")
    assert len(queries) == 1
    assert tab.get("runs") == first
    assert len(queries) == 2


def test_answers_stay_within_their_bound(tab, baseline):
    kept = tab.backend._answers._kept
    kept.most_bytes = 20_000
    for columns in range(1, 80):
        tab.get("curve", **baseline, px=columns)
    assert 0 < kept.bytes() <= 20_000


def test_failures_are_not_kept(tab, baseline):
    for event in range(100, 200):
        tab.refused("moment", **baseline, event=event)
    assert len(tab.backend._answers._kept._slots) == 0


def test_answers_of_remote_files_are_not_kept(monkeypatch):
    monkeypatch.setattr("tb_memplugin.store.files.is_remote", lambda path: True)
    assert not is_unchanged((os.devnull, 0, 0))


def test_a_client_that_has_closed_its_connection_is_noticed():
    ours, theirs = socket.socketpair()
    with ours:
        request = wrappers.Request({"werkzeug.socket": ours})
        assert not has_gone(request)
        theirs.send(b"more to come")
        assert not has_gone(request)
        ours.recv(100)
        theirs.close()
        assert has_gone(request)
    assert not has_gone(wrappers.Request({}))


def test_what_a_client_that_has_gone_asked_for_is_not_computed(tab, baseline, monkeypatch):
    calls = counted(monkeypatch, moment, "moment")
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        app = tab.backend.apps["/moment"]
        query = {**baseline, "event": 2}
        answer = Client(app).get("/", query_string=query, environ_overrides={"werkzeug.socket": ours})
    assert answer.status_code == CLIENT_GONE
    assert calls == []
