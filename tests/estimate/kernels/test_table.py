"""The table of kernels: every row says what was read, and no operator has two."""

from __future__ import annotations

import re

import pytest
import torch

from tb_memplugin.estimate.kernels.table import ANY_GPU, Call, Kernel, Table, operators
from tb_memplugin.estimate.run.chosen import ROWS, TABLES
from tb_memplugin.estimate.run.correction import Corrections

aten = torch.ops.aten


def row(*names: str, on: str = "cuda") -> Kernel:
    return Kernel(operators(*names), lambda call: [512], source="Blas.cpp:mm", on=on)


def test_every_row_names_what_was_read() -> None:
    assert len({kernel.source for kernel in ROWS}) == len(ROWS)
    for kernel in ROWS:
        assert re.match(r"\S+\.(cu|cuh|cpp|h)\b", kernel.source), kernel.source
        assert re.fullmatch(r"2\.\d+\.\d+", kernel.read), kernel.source
        assert kernel.on in ("cuda", "cpu", ""), kernel.source


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the rows were read from PyTorch 2.13")
def test_every_row_has_operators_of_the_torch_that_was_read() -> None:
    for kernel in ROWS:
        assert kernel.operators, kernel.source
        for operator in kernel.operators:
            assert isinstance(operator, torch._ops.OpOverload)


def test_a_table_has_the_rows_of_its_device_and_of_every_device() -> None:
    rows = (row("mm"), row("add.Tensor", on="cpu"), row("bmm", on=""))
    assert set(Table(rows, "cuda")) == {aten.mm.default, aten.bmm.default}
    assert set(Table(rows, "cpu")) == {aten.add.Tensor, aten.bmm.default}


def test_a_second_row_for_one_operator_is_an_error() -> None:
    Table((row("mm"), row("mm", on="cpu")), "cuda")
    with pytest.raises(ValueError, match=r"a second row for aten\.mm\.default on cuda: Blas\.cpp:mm"):
        Table((row("mm"), row("mm", on="")), "cuda")


def test_a_row_with_results_is_a_rule() -> None:
    losses = TABLES["cuda"][aten.mse_loss.default]
    corrections = Corrections([], TABLES["cuda"], engine_adds_in_place=True)
    assert corrections.rules[aten.mse_loss.default] is losses.results


def test_operators_that_this_torch_lacks_are_left_out() -> None:
    assert operators("mm", "mm.no_such_overload", "no_such_operator") == [aten.mm.default]
    assert set(operators("max.*")) >= {aten.max.default, aten.max.dim, aten.max.other}


def test_a_call_has_its_arguments_by_name() -> None:
    data = torch.zeros(2, 3)
    by_position = Call(aten.topk.default, (data, 2, 1), {}, None, ANY_GPU)
    assert (by_position["k"], by_position["dim"], by_position["sorted"]) == (2, 1, True)
    by_keyword = Call(aten.sort.stable, (data,), {"stable": True, "dim": 0}, None, ANY_GPU)
    assert (by_keyword["self"], by_keyword["dim"], by_keyword["descending"]) == (data, 0, False)
    assert by_keyword.get("k") is None
