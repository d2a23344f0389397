"""The certificate: each program, with each recorder, is the program that runs without it."""

from __future__ import annotations

from functools import cache

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

VISIBLE = {
    **{("code that looks for hooks", name): {"bits"} for name in HANDLERS},
    **{("code that looks at its callers", name): {"bits"} for name in OURS},
}
"""(program, recorder) -> the kinds of differences that docs/never_in_the_way.md lists."""


@pytest.fixture(scope="module")
def verdicts(request):
    """A function that runs a program with the chosen recorders, once, and returns their verdicts."""
    chosen = [item.callspec.params["pair"] for item in request.session.items if item.module is request.module]
    with Servers() as servers:

        @cache
        def of(program: str) -> dict[str, Verdict]:
            compared = [pair for pair in chosen if pair[0] == program]
            return {verdict.recorder: verdict for verdict in certify(compared, servers)}

        yield of


@pytest.mark.parametrize("pair", PAIRS, ids=" - ".join)
def test_the_recorded_program_is_the_program_alone(pair, verdicts):
    program, recorder = pair
    verdict = verdicts(program)[recorder]
    assert verdict.failed == ""
    broken = [part for part in verdict.broken if part.kind not in VISIBLE.get(pair, set())]
    assert [f"{part.kind}: {part.text}" for part in broken] == []
