"""What corrections do together."""

from __future__ import annotations

import pytest
import torch

from tb_memplugin.estimate.run.correction import Correction, Corrections, Target

aten = torch.ops.aten


class Adding(Correction):
    def rules(self):
        return {aten.add.Tensor: lambda mode, func, args, kwargs: args[0]}


def test_a_second_rule_for_one_operator_is_an_error():
    target = Target("cpu", None)
    Corrections([Adding(target)], engine_adds_in_place=True)
    with pytest.raises(ValueError, match=r"Adding has a second rule for aten.add.Tensor"):
        Corrections([Adding(target), Adding(target)], engine_adds_in_place=True)
