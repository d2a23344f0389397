"""The rule `uneven_devices` on small histories."""

from __future__ import annotations

from tests.analysis.advice_rules.findings import found, stacked, why
from tests.traces import trace


def test_a_device_with_more_than_its_share_of_the_same_code() -> None:
    history = trace("alloc 900 a device=cuda:0", "alloc 300 b device=cuda:1")
    finding = found(stacked(history, ("forward model.py:7",)), "uneven_devices")
    assert (finding.device, finding.bytes, finding.of_bytes) == ("cuda:0", 300, 900)


def test_devices_that_run_different_code_are_not_compared() -> None:
    history = trace("alloc 900 a device=cuda:0", "alloc 300 b device=cuda:1")
    stacks = ("forward encoder.py:7",), ("forward decoder.py:7",)
    assert why(stacked(history, *stacks), "uneven_devices", "cuda:0") == "The devices run different code."
