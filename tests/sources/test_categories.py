"""Categories agree with torch's data-flow analysis, but where docs/categories.md says why torch is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.sources.agreement import UNTUNED, agreement


@pytest.mark.parametrize("name", UNTUNED)
def test_of_the_bytes_that_torch_names_at_most_one_in_twenty_differ(name):
    found = agreement(UNTUNED[name](), torch.optim.SGD)
    assert found.share >= 0.95, found.differ


@pytest.mark.parametrize("name", UNTUNED)
def test_what_differs_under_adamw_is_only_what_the_docs_explain(name):
    found = agreement(UNTUNED[name](), torch.optim.AdamW)
    explained = {
        (ours, operator)
        for ours, _, operator in found.differ
        if (ours == "temporary" and operator in ("aten::sqrt", "aten::div", "(no operator)"))  # AdamW's own
        or (ours == "buffer" and operator == "before the window")
        or (ours == "activation" and operator == "aten::zeros")  # an LSTM's first hidden state
        or (ours == "activation" and operator == "aten::ones_like")  # the seed of a backward
    }
    assert {(ours, operator) for ours, _, operator in found.differ} == explained


@pytest.mark.parametrize("name", UNTUNED)
def test_what_torch_does_not_name_we_do(name):
    found = agreement(UNTUNED[name]())
    assert not [key for key in found.unnamed if key[0] == "unknown"]
