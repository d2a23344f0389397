"""Modules in groups: which level of the tree is shown, how repeated layers fold, what opening does."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.curves import curve
from tb_memplugin.analysis.divisions import breakdown, codes
from tb_memplugin.analysis.module_groups import MOST_GROUPS, OTHER_MODULES, module_groups
from tb_memplugin.analysis.sums import sums
from tests.traces import EPOCH, MICROSECOND, trace

DECODER = [f"layers.{layer}{part}" for layer in range(4) for part in ("", ".attn", ".mlp")] + ["head"]


def grouped(keys, size, *opened):
    """The bytes of each group that has any."""
    size = np.array(size, np.int64)
    groups = module_groups(keys, size, opened)
    total = sums(groups.part, size, len(groups.keys)).tolist()
    assert sum(total) == size.sum()
    return {key: bytes_ for key, bytes_ in zip(groups.keys, total, strict=True) if bytes_}


def test_layers_that_repeat_are_one_group_for_each_thing_inside():
    assert grouped(DECODER, [1, 20, 300] * 4 + [5000]) == {
        "head": 5000,
        "layers.*.mlp": 1200,
        "layers.*.attn": 80,
        "layers.*": 4,
    }


def test_an_opened_group_falls_into_its_layers_where_it_stood():
    assert list(grouped(DECODER, [1, 20, 300] * 4 + [5000], "layers.*.mlp")) == [
        "head",
        "layers.0.mlp",
        "layers.1.mlp",
        "layers.2.mlp",
        "layers.3.mlp",
        "layers.*.attn",
        "layers.*",
    ]


def test_many_layers_open_into_ranges_and_a_range_into_smaller_ones():
    keys = [f"layers.{layer}{part}" for layer in range(128) for part in (".a", ".b", ".c", ".d")]
    size = [1, 2, 3, 4] * 128
    once = grouped(keys, size, "layers.*.d")
    assert list(once)[:2] == ["layers.0-15.d", "layers.16-31.d"]
    assert once["layers.112-127.d"] == 64
    twice = grouped(keys, size, "layers.*.d", "layers.16-31.d")
    assert twice["layers.16-17.d"] == 8
    assert len(twice) <= MOST_GROUPS + 1


def test_a_tree_too_wide_for_its_leaves_is_cut_where_few_groups_cover_most():
    keys = [f"tower{tower}.leaf{leaf}" for tower in range(4) for leaf in range(50)]
    assert grouped(keys, [1] * 200) == {f"tower{tower}": 50 for tower in range(4)}
    opened = grouped(keys, [1] * 200, "tower0")
    assert opened["tower0.leaf0"] == 1
    assert sum(opened.values()) == 200
    assert OTHER_MODULES in opened


def test_one_group_alone_is_opened_at_once():
    assert list(grouped([f"layers.{layer}" for layer in range(5)], [1] * 5)) == [
        f"layers.{layer}" for layer in range(5)
    ]


def test_unlike_children_of_a_small_sequence_and_names_from_outside_stay_apart():
    keys = ["net.0", "net.2", "outside:aten::to.3", "(not named)", "", "x.99999999999999999999"]
    assert list(grouped(keys, [6, 5, 4, 3, 2, 1])) == keys


def test_no_modules_and_names_that_are_not_there_do_no_harm():
    assert grouped([], [], "a") == {}
    assert grouped(["a", "b"], [1, 2], "gone", "a", "a", "\n") == {"b": 2, "a": 1}


def test_a_curve_and_a_breakdown_by_groups_sum_to_the_same_bytes_as_by_module():
    made = [f"alloc {10 * (number + 1)} x{number} module=layers.{number}" for number in range(6)]
    there = trace(*made, "free x2")
    part, keys = codes(there, "module")
    groups = module_groups(keys, sums(part, there.allocations.bytes, len(keys)))
    parts = {part.key: part.bytes for part in breakdown(there, 0, 6, groups)}
    assert parts == {f"layers.{number}": 10 * (number + 1) for number in (0, 1, 3, 4, 5)}
    drawn = curve(there, 0, EPOCH, EPOCH + 10 * MICROSECOND, 7, groups)
    assert drawn.stacks.sum(axis=0).tolist() == drawn.high.tolist()
    assert drawn.high.max() == 210


def test_a_group_that_holds_nearly_everything_is_opened_at_once():
    towers = [f"tower{tower}.leaf{leaf}" for tower in range(4) for leaf in range(30)]
    body = [f"body.layers.{layer}.{part}" for layer in range(4) for part in ("attn", "mlp", "norm")]
    alone = grouped([*towers, *body], [5] * 120 + [200, 300, 50] * 4)
    assert [alone[f"body.layers.*.{part}"] for part in ("mlp", "attn", "norm")] == [1200, 800, 200]
    assert alone["tower0"] == 150


EXPERTS = [f"layers.{layer}.experts.{expert}.{w}" for layer in range(3) for expert in range(20) for w in "ab"]


def test_lists_within_layers_fold_too_and_open_layers_first():
    keys = [*EXPERTS, *(f"layers.{layer}.{part}" for layer in range(3) for part in ("attn", "norm")), "head"]
    size = [2, 1] * 60 + [5, 1] * 3 + [4]
    assert grouped(keys, size) == {
        "layers.*.experts.*.a": 120,
        "layers.*.experts.*.b": 60,
        "layers.*.attn": 15,
        "head": 4,
        "layers.*.norm": 3,
    }
    opened = ["layers.*.experts.*.a", "layers.1.experts.*.a", "layers.1.experts.0-1.a"]
    once = grouped(keys, size, *opened[:1])
    assert [once[f"layers.{layer}.experts.*.a"] for layer in range(3)] == [40, 40, 40]
    twice = grouped(keys, size, *opened[:2])
    assert [key for key in twice if key.startswith("layers.1.")] == [
        f"layers.1.experts.{some}.a"
        for some in ("0-1", "2-4", "5-6", "7-9", "10-11", "12-14", "15-16", "17-19")
    ]
    assert grouped(keys, size, *opened)["layers.1.experts.0.a"] == 2
