"""Bytes by name: each storage once, whoever shares it."""

from __future__ import annotations

import torch
from torch import nn

from tb_memplugin.record.iterations.weights import weights_of


def sizes(model: nn.Module) -> dict[str, int]:
    return {one.name: one.bytes for one in weights_of(model, {})}


def test_tied_weights_are_named_once_and_the_other_name_is_told():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    (weight,) = weights_of(model, {})
    assert (weight.name, weight.aliases, weight.bytes) == ("embed.weight", ("head.weight",), 80)
    assert weight.shape == (5, 4)


def test_weights_in_one_flat_storage_have_their_own_stretch_of_it():
    flat = torch.zeros(10)  # as an LSTM's on a GPU, or FSDP's
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[2:6].view(2, 2)), nn.Parameter(flat[6:9])
    assert sizes(model) == {"a": 16 + 12, "b": 12}  # three floats are nobody's: they go to the first
    assert sum(sizes(model).values()) == flat.untyped_storage().nbytes()


def test_what_two_weights_share_counts_with_the_first():
    flat = torch.zeros(10)
    model = nn.Module()
    model.a, model.b, model.c = nn.Parameter(flat[:6]), nn.Parameter(flat[4:]), nn.Parameter(flat[3:8])
    assert sizes(model) == {"a": 24, "b": 16, "c": 0}


def test_gradients_in_one_bucket_have_their_own_stretch_of_it():
    model = nn.Linear(4, 3)
    bucket = torch.zeros(15)
    model.weight.grad, model.bias.grad = bucket[:12].view(3, 4), bucket[12:]
    assert [one.gradient_bytes for one in weights_of(model, {"bias": 99})] == [48, 12]


def test_a_gradient_that_is_gone_has_the_bytes_it_had():
    assert [one.gradient_bytes for one in weights_of(nn.Linear(4, 3), {"bias": 12})] == [0, 12]


def test_weights_without_memory_have_no_bytes():
    assert sizes(nn.Linear(4, 3, device="meta")) == {"weight": 0, "bias": 0}
    lazy = {one.name: (one.bytes, one.shape) for one in weights_of(nn.LazyLinear(3), {})}
    assert lazy == {"weight": (0, ()), "bias": (0, ())}
    assert sizes(nn.Identity()) == {}


def test_half_precision_and_scalars_have_their_own_size():
    model = nn.Module()
    model.small, model.scale = nn.Parameter(torch.zeros(6).half()), nn.Parameter(torch.tensor(1.0))
    small, scale = weights_of(model, {})
    assert (small.bytes, small.dtype) == (12, "float16")
    assert (scale.bytes, scale.shape) == (4, ())


def test_a_sparse_gradient_has_its_indices_and_values():
    model = nn.Embedding(100, 4, sparse=True)
    model(torch.tensor([3, 5])).sum().backward()
    (weight,) = weights_of(model, {})
    assert weight.gradient_bytes == 2 * 8 + 2 * 4 * 4
