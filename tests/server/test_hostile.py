"""Random and hostile requests to every route; `python -m tests.server.hostile` asks more of them."""

from __future__ import annotations

from tb_memplugin.server.catalog import MOST_EXPERIMENTS
from tests.server.hostile import ask, wrong_answers

REQUESTS = 12


def test_every_route_answers_or_refuses_in_words_whatever_it_is_asked(tab, caplog):
    assert list(wrong_answers(tab, REQUESTS)) == []
    assert "Traceback" not in caplog.text


def test_experiments_that_nobody_has_are_forgotten(tab):
    """TensorBoard takes any name in /experiment/NAME/, and shows the same runs below it."""
    for number in range(3 * MOST_EXPERIMENTS):
        assert ask(tab, "/runs", {}, f"experiment {number}") == (200, "")
    assert len(tab.backend._session.catalog._listings) == MOST_EXPERIMENTS
    assert len(tab.backend._session.monitored._runs) == MOST_EXPERIMENTS
