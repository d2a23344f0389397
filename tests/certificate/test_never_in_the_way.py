"""The certificate: each program, with each recorder, is the program that runs without it."""

from __future__ import annotations

import pytest

from tests.certificate.harness import Servers, Verdict, certify, pairs, why_impossible
from tests.certificate.programs import PROGRAMS
from tests.certificate.recorders import RECORDERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "-"),
]

OURS = [recorder.name for recorder in RECORDERS.values() if recorder.base]
HANDLERS = [name for name in OURS if name.startswith("handler")]
PAIRS = pairs(list(PROGRAMS), OURS)

VISIBLE = {("code that looks for hooks", name): {"bits"} for name in HANDLERS}
"""(program, recorder) -> the kinds of differences that docs/never_in_the_way.md lists."""


@pytest.fixture(scope="module")
def verdict_on(request):
    """A function that returns the verdict on a pair. It runs a program with all chosen recorders at once.

    A pair that is asked for again, as after a failure, runs again.
    """
    chosen = [item.callspec.params["pair"] for item in request.session.items if item.module is request.module]
    ran, verdicts = set[str](), dict[tuple[str, str], Verdict]()
    with Servers() as servers:

        def of(pair: tuple[str, str]) -> Verdict:
            if pair not in verdicts:
                program, _ = pair
                compared = [pair] if program in ran else [each for each in chosen if each[0] == program]
                ran.add(program)
                for verdict in certify(compared, servers):
                    verdicts[verdict.program, verdict.recorder] = verdict
            return verdicts.pop(pair)

        yield of


@pytest.mark.parametrize("pair", PAIRS, ids=" - ".join)
def test_the_recorded_program_is_the_program_alone(pair, verdict_on):
    verdict = verdict_on(pair)
    assert verdict.failed == ""
    broken = [part for part in verdict.broken if part.kind not in VISIBLE.get(pair, set())]
    assert [f"{part.kind}: {part.text}" for part in broken] == []
