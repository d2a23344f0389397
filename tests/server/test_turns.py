"""Turns to compute: few at a time, those of quick requests and of clients with few of them first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tb_memplugin.server.turns import (
    LEAST_SECONDS,
    SLOW_SECONDS,
    ClientGoneError,
    Turns,
    holding,
    without_turn,
)


def stay():
    """Nobody goes."""
    return False


class Gate:
    """Something that computes until it is opened, and says when it has begun."""

    def __init__(self):
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.opened.wait(20)


def run(turns, client, route, is_gone, compute):
    with turns.turn(client, route, is_gone):
        return compute()


def compute_for(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def wait_for(turns, waiting):
    while len(turns._waiting) < waiting:
        time.sleep(0.001)


def test_no_more_compute_at_a_time_than_there_are_turns():
    turns, running, most, lock, three = Turns(3), 0, 0, threading.Lock(), threading.Barrier(3)

    def compute():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(60)  # for two others that compute
        with lock:
            running -= 1

    with ThreadPoolExecutor(21) as requests:
        list(requests.map(lambda n: run(turns, f"client {n}", "curve", stay, compute), range(21)))
    assert most == 3


def test_a_client_with_many_requests_lets_one_with_few_go_first():
    turns, gate, order = Turns(1), Gate(), []
    with ThreadPoolExecutor(10) as requests:
        requests.submit(run, turns, "greedy", "curve", stay, gate)
        assert gate.begun.wait(20)
        for number in range(5):
            requests.submit(run, turns, "greedy", "curve", stay, lambda n=number: order.append(f"greedy {n}"))
            wait_for(turns, number + 1)
        requests.submit(run, turns, "modest", "curve", stay, lambda: order.append("modest"))
        wait_for(turns, 6)
        gate.opened.set()
    assert order.index("modest") <= 1
    assert [name for name in order if name != "modest"] == [f"greedy {number}" for number in range(5)]


def order_of_turns(turns, routes):
    """The order in which requests of different clients have their turns, which came one after the other."""
    gate, order = Gate(), []
    with ThreadPoolExecutor(10) as requests:
        requests.submit(run, turns, "first", "another", stay, gate)
        assert gate.begun.wait(20)
        for number, route in enumerate(routes):
            requests.submit(run, turns, f"client {number}", route, stay, lambda r=route: order.append(r))
            wait_for(turns, number + 1)
        gate.opened.set()
    return order


def test_quick_requests_go_before_slower_ones_that_came_earlier():
    turns = Turns(1)
    turns._seconds = {"stacks": 0.02, "curve": 0.01, "step": 0.0}
    assert order_of_turns(turns, ("stacks", "curve", "step")) == ["step", "curve", "stacks"]


def test_a_slow_request_goes_before_quick_ones_that_come_after_others_have_computed_enough():
    """That for stacks is due when others have computed 200 times 0.02 seconds."""
    turns, gate, order = Turns(1), Gate(), []
    turns._seconds = {"stacks": 0.02}
    with ThreadPoolExecutor(4) as requests:
        requests.submit(run, turns, "first", "another", stay, gate)
        assert gate.begun.wait(20)
        for number, (route, computed) in enumerate((("stacks", 0.0), ("after 3", 3.0), ("after 5", 5.0))):
            turns._computed = computed
            requests.submit(run, turns, route, route, stay, lambda r=route: order.append(r))
            wait_for(turns, number + 1)
        gate.opened.set()
    assert order == ["after 3", "stacks", "after 5"]


def test_every_request_counts_what_it_computes_and_a_millisecond_at_least():
    turns = Turns(1)
    run(turns, "a", "step", stay, lambda: time.sleep(0.02))
    assert turns._computed == LEAST_SECONDS == 0.001
    run(turns, "a", "stacks", stay, lambda: compute_for(0.02))
    assert turns._computed >= 0.021


def test_slow_requests_leave_a_turn_for_quick_ones():
    turns, gates = Turns(2), [Gate(), Gate()]
    turns._seconds["modules"] = 2 * SLOW_SECONDS
    with ThreadPoolExecutor(3) as requests:
        for number, gate in enumerate(gates):
            requests.submit(run, turns, f"client {number}", "modules", stay, gate)
        assert gates[0].begun.wait(20)
        assert run(turns, "another", "step", stay, lambda: "quick") == "quick"
        assert not gates[1].begun.is_set()
        for gate in gates:
            gate.opened.set()
    assert gates[1].begun.is_set()


def test_a_route_is_slow_after_a_slow_request_and_quick_again_after_quick_ones():
    turns = Turns()
    run(turns, "a", "stacks", stay, lambda: compute_for(4 * SLOW_SECONDS))
    assert turns._seconds["stacks"] > SLOW_SECONDS
    for _ in range(10):
        run(turns, "a", "stacks", stay, stay)
    assert turns._seconds["stacks"] < SLOW_SECONDS


def test_the_request_of_a_client_that_has_gone_is_not_computed():
    turns, gate, gone, computed = Turns(1), Gate(), threading.Event(), []
    with ThreadPoolExecutor(2) as requests:
        requests.submit(run, turns, "a", "curve", stay, gate)
        assert gate.begun.wait(20)
        left = requests.submit(run, turns, "b", "curve", gone.is_set, lambda: computed.append("left"))
        wait_for(turns, 1)
        gone.set()
        with pytest.raises(ClientGoneError):
            left.result(20)
        gate.opened.set()
    assert run(turns, "c", "curve", stay, lambda: "next") == "next"
    assert computed == []


def test_a_request_that_waits_for_another_lets_others_have_its_turn():
    turns, lock, gate = Turns(1), threading.Lock(), Gate()

    def waits_for_the_lock():
        gate.begun.set()
        with holding(lock):
            return "held"

    with ThreadPoolExecutor(1) as requests, lock:
        first = requests.submit(run, turns, "a", "curve", stay, waits_for_the_lock)
        assert gate.begun.wait(20)
        assert run(turns, "b", "curve", stay, lambda: "done") == "done"
        lock.release()
        assert first.result(20) == "held"
        lock.acquire()


def test_a_failure_is_raised_to_who_asked_and_ends_the_turn():
    turns = Turns(1)
    with pytest.raises(ZeroDivisionError):
        run(turns, "a", "curve", stay, lambda: 1 // 0)
    assert run(turns, "a", "curve", stay, lambda: 2) == 2


def test_without_a_turn_there_is_none_to_leave_to_others():
    with without_turn():
        pass
