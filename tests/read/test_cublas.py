"""Which blocks of a window are workspaces of cuBLAS and cuBLASLt, by the version of PyTorch."""

import numpy as np
import pytest

from tb_memplugin.read import cublas
from tb_memplugin.read.categories import Born, workspaces

OPERATORS = ("aten::addmm", "aten::mm")
END = 100
CUBLAS, LARGE, LT = 8_519_680, 33_554_432, 1_048_576
KEPT, AT_ONCE = END + 1, 10


def taken(*blocks: tuple[str, int, int]) -> list[bool]:
    """Which of these blocks are workspaces: (operator, bytes, time of the free); each operator ends at 10."""
    count = len(blocks)
    born = Born(
        time_ns=np.zeros(count, np.int64),
        freed_ns=np.array([freed for _, _, freed in blocks], np.int64),
        device=np.zeros(count, np.uint8),
        bytes=np.array([size for _, size, _ in blocks], np.int64),
        phase=np.zeros(count, np.uint8),
        operator=np.array([OPERATORS.index(f"aten::{name}") for name, _, _ in blocks], np.int32),
        operator_end_ns=np.full(count, AT_ONCE, np.int64),
        recomputing=np.zeros(count, bool),
    )
    return workspaces(born, ("cuda:0",), OPERATORS, END).tolist()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((2, 8), [True, False, True]),
        ((2, 9), [True, True, True]),
        ((2, 11), [True, True, True]),
        ((2, 12), [True, False, True]),
        ((2, 15), [False, False, False]),
    ],
)
def test_what_is_kept(version, expected, monkeypatch):
    monkeypatch.setattr(cublas, "_torch_version", lambda: version)
    blocks = (("addmm", CUBLAS, KEPT), ("addmm", LT, KEPT), ("mm", CUBLAS, KEPT))
    assert taken(*blocks) == expected


def test_what_each_product_frees_is_its_workspace_since_2_15(monkeypatch):
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 15))
    assert taken(("mm", CUBLAS, AT_ONCE), ("mm", CUBLAS, KEPT)) == [True, False]
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert taken(("mm", CUBLAS, AT_ONCE), ("mm", CUBLAS, KEPT)) == [False, True]


def test_results_of_the_size_of_a_workspace_of_cublaslt_are_none(monkeypatch):
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 9))
    assert taken(("addmm", LT, KEPT), ("mm", LT, KEPT)) == [False, False]
    assert taken(("mm", CUBLAS, KEPT), ("addmm", LT, KEPT), ("addmm", LT, KEPT)) == [True, False, False]


def test_the_only_block_of_a_product_is_its_result(monkeypatch):
    """4,096 x 4,096 of bfloat16 have the size of a workspace on Hopper."""
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 13))
    assert taken(("mm", LARGE, KEPT)) == [False]
    assert taken(("mm", LARGE, KEPT), ("mm", 512, AT_ONCE)) == [True, False]


def test_the_setting_of_cublaslt(monkeypatch):
    blocks = (("mm", CUBLAS, KEPT), ("addmm", LT, KEPT))
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 13))
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert taken(*blocks) == [True, True]
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 11))
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert taken(*blocks) == [True, False]
