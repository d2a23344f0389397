"""The parts that hold a peak: a sum that is the peak, and layers in the place of lines."""

from __future__ import annotations

from tb_memplugin.analysis.peak_holders import peak_holders
from tests.analysis.advice_rules.findings import COPY, MODEL, stacked
from tests.traces import trace

SAME_LAYERS = ((30, "h.0.mlp"), (20, "h.1.mlp"), (40, "head"))


def test_the_holders_of_a_peak_sum_to_it() -> None:
    """The model's own memory is one holder for each category; the rest has lines."""
    history = trace(
        *("alloc 50 w1 category=parameter", "alloc 30 w2 category=parameter"),
        *("alloc 100 a category=activation", "alloc 20 b category=activation", "alloc 3 c"),
    )
    lines = MODEL, COPY, ("forward a.py:1",), ("forward a.py:1",), ("forward b.py:2",)
    peak = peak_holders(stacked(history, *lines), 0)
    assert [(holder.name, holder.bytes, holder.blocks) for holder in peak.holders] == [
        ("a.py:1 (forward)", 120, 2),
        ("parameter", 80, 2),
        ("b.py:2 (forward)", 3, 1),
    ]
    assert sum(holder.bytes for holder in peak.holders) == peak.bytes == 203
    assert dict(peak.categories) == {"activation": 120, "parameter": 80, "unknown": 3}


def test_of_a_line_that_runs_a_model_of_a_library_the_layers_are_the_holders() -> None:
    """As of `trainer.train()`; of a model of the user's own, its lines."""
    call = "_call_impl /env/lib/python3.12/site-packages/torch/nn/modules/module.py:9"
    library = ("forward /env/lib/python3.12/site-packages/transformers/a.py:7", call, "<module> train.py:3")
    own = ("forward model.py:7", call, "<module> train.py:3")
    lines = [f"alloc {size} {name} module={name} phase=forward" for size, name in SAME_LAYERS]
    peak = peak_holders(stacked(trace(*lines), library, library, own), 0)
    assert [(holder.name, holder.bytes, holder.blocks) for holder in peak.holders] == [
        ("h.*", 50, 2),
        ("model.py:7 (forward)", 40, 1),
    ]


def test_repeated_layers_are_one_holder() -> None:
    lines = [f"alloc {size} {name} module={name} phase=forward" for size, name in SAME_LAYERS]
    peak = peak_holders(trace(*lines), 0)
    assert [(holder.name, holder.bytes, holder.blocks) for holder in peak.holders] == [
        ("h.*.mlp", 50, 2),
        ("head", 40, 1),
    ]
