"""What the harness compares can differ: it catches recorders that intrude, each by what they touch."""

from __future__ import annotations

import pytest

from tests.certificate.harness import Servers, certify, why_impossible
from tests.certificate.recorders import EVERYTHING, INTRUSIVE

pytestmark = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "-")

PROGRAM = "saved and loaded"


@pytest.fixture(scope="module")
def kinds() -> dict[str, dict[str, str]]:
    """Intrusive recorder -> kind of difference -> its text."""
    with Servers(1) as servers:
        verdicts = list(certify([(PROGRAM, name) for name in INTRUSIVE], servers))
    assert [verdict.failed for verdict in verdicts] == [""] * len(verdicts)
    return {verdict.recorder: {part.kind: part.text for part in verdict.broken} for verdict in verdicts}


def test_a_recorder_that_does_nothing_differs_in_nothing(kinds):
    assert kinds["nothing"] == {}


@pytest.mark.parametrize(
    ("recorder", "kind", "text"),
    [
        ("adds a hook to a module", "meanwhile", "_forward_hooks"),
        ("adds a hook to a module", "objects", "loaded"),  # in the copy that was saved in the window
        ("allocates a tensor", "allocations", "peak"),
        ("allocates a tensor", "operators", "aten::empty"),
        ("keeps a tensor alive", "allocations", "1 entries: ++4096"),
        ("keeps a tensor alive", "process", "alive.Tensor"),
        ("leaves a thread", "process", "threads"),
        ("leaves a gc callback", "process", "gc.callbacks"),
        ("patches torch", "process", "torch.nn.modules.module.Module.train"),
        ("fills a table of torch", "process", "_global_forward_hooks"),
        ("moves the random state", "bits", ""),
        ("moves the random state", "process", "random"),
        ("warns", "output", "UserWarning: a recorder warns"),
        ("touches a gradient", "bits", ""),
        ("fails", "output", "ZeroDivisionError"),
    ],
)
def test_an_intrusive_recorder_is_caught(recorder, kind, text, kinds):
    assert text in kinds[recorder][kind]


def test_every_kind_of_difference_is_caught_from_some_recorder(kinds):
    assert {kind for caught in kinds.values() for kind in caught} == EVERYTHING - {"dynamo", "gpu"}
