"""What torch, functorch and numpy do inside a traced block is what they do outside of it, and is counted."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import torch
from torch import nn

from tb_memplugin import MemoryTracer
from tb_memplugin.analysis import advice
from tests.test_tracer import is_clean, mlp


def test_a_model_is_pickled_copied_and_scripted_inside_the_block_as_outside():
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        pickled = pickle.dumps(model)
        copied = copy.deepcopy(model)
        scripted = torch.jit.script(model)
    assert is_clean(model, copied, pickle.loads(pickled))
    assert torch.equal(scripted(torch.ones(2, 64)), copied(torch.ones(2, 64)))


def test_torchs_encoder_keeps_its_fast_path_and_its_bytes():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x, padding, tracer = torch.randn(2, 10, 32), torch.arange(10) > torch.tensor([[6], [9]]), MemoryTracer()
    gc.collect()  # what earlier tests left
    with torch.no_grad():
        alone = encoder(x, src_key_padding_mask=padding)
        with tracer.trace(encoder):
            seen = encoder(x, src_key_padding_mask=padding)
    assert torch.equal(alone, seen)
    trace = tracer.trace_result()
    assert "aten::_transformer_encoder_layer_fwd" in trace.operators  # it gives nested tensors
    assert trace.notes == ()
    assert int(trace.live(0)[-1]) - int(trace.live(0)[0]) == seen.nbytes


def test_functorchs_transforms_are_traced():
    model, tracer = nn.Linear(8, 4), MemoryTracer()
    weights = {name: one.detach() for name, one in model.named_parameters()}
    gc.collect()  # what earlier tests left

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    with tracer.trace(model):
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(6, 8))
        torch.func.jvp(model, (torch.ones(8),), (torch.ones(8),))
        torch.func.hessian(lambda x: model(x).square().sum())(torch.ones(8))
    trace = tracer.trace_result()
    assert trace.notes == ()
    kept = sum(gradient.untyped_storage().nbytes() for gradient in gradients.values())
    assert int(trace.live(0)[-1]) - int(trace.live(0)[0]) == kept


def test_what_numpy_allocated_is_not_torchs():
    array, tracer = np.ones(1000), MemoryTracer()
    with tracer.trace(nn.Identity()):
        shared = torch.as_tensor(array).view(10, 100)
        torch.stack([shared[0], shared[1]])
    assert [one.size_bytes for one in tracer.events if one.event_type == "alloc"] == [2 * 100 * 8]


def test_sparse_gradients_that_meet_are_added_up():
    table, tracer = nn.Embedding(1000, 64, sparse=True), MemoryTracer()
    rows = torch.arange(64)
    with tracer.trace(table):
        (table(rows).sum() + table(rows).pow(2).sum()).backward()
    assert table.weight.grad is not None
    expected = (1 + 2 * table.weight.detach()[:64]).sum()
    torch.testing.assert_close(table.weight.grad.to_dense().sum(), expected)


def test_an_error_that_is_kept_keeps_no_tensor_that_it_would_not_keep_untraced():
    kept = []

    def fails() -> None:
        try:
            torch.ones(10, 10) @ torch.ones(3)
        except RuntimeError as error:
            kept.append(error)

    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        fails()
        torch.ones(1)
    level = [one.allocated_bytes for one in tracer.events]
    assert level[-1] == level[0]
    assert "size mismatch" in str(kept[0])


def test_a_second_block_that_a_mode_makes_at_the_peak_is_noted():
    """Alone, torch.profiler sees 4,000 bytes less: gradients that meet are added in place."""
    weight, tracer = torch.ones(1000, requires_grad=True), MemoryTracer()
    one, other = torch.ones(1000), torch.ones(1000)
    with tracer.trace(nn.Identity()):
        torch.autograd.grad(weight.dot(one) + weight.dot(other), weight)
    (note,) = tracer.trace_result().notes
    assert note.startswith("The peak was reached in backward, by a result that torch makes only while")
    assert note.endswith("the peak may be up to 4,000 bytes lower.")


def test_optimizer_state_is_judged_by_its_dtypes():
    """Adam keeps two floats an element, and a step for weight and bias each."""
    model, tracer = nn.Linear(1000, 100), MemoryTracer()
    gc.collect()  # what earlier tests left
    with tracer.trace(model):
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
    told = tracer.trace_result().properties
    assert told["dtype_bytes.optimizer_state.cpu.float32"] == str(2 * 400_400 + 2 * 4)
    (finding,) = [one for one in advice(tracer.trace_result()).findings if one.kind == "optimizer_state"]
    assert finding.bytes == 3 * (2 * 400_400 + 2 * 4) // 4  # with a byte an element
