"""The bytes of parameters and optimizer state by dtype: each piece of memory once, as it was seen last."""

from __future__ import annotations

from tb_memplugin.record.storages import Sighting, dtype_properties
from tb_memplugin.trace import Category


def weight(time_ns: int, address: int, size: int, label: str, dtype: str = "float32") -> Sighting:
    return Sighting(time_ns, "cpu", address, size, Category.PARAMETER, 0, label, dtype)


def test_a_parameter_that_moved_counts_where_it_is_now():
    told = dtype_properties([weight(1, 0x10, 400, "w"), weight(2, 0x20, 200, "w", "bfloat16")])
    assert told == {"dtype_bytes.parameter.cpu.bfloat16": "200"}


def test_a_parameter_with_a_new_name_counts_once():
    told = dtype_properties([weight(1, 0x10, 400, "w"), weight(2, 0x10, 400, "base.w")])
    assert told == {"dtype_bytes.parameter.cpu.float32": "400"}


def test_all_tensors_of_one_name_count():
    told = dtype_properties([weight(1, 0x10, 400, "w"), weight(1, 0x20, 80, "w", "int64")])
    assert told == {"dtype_bytes.parameter.cpu.float32": "400", "dtype_bytes.parameter.cpu.int64": "80"}
