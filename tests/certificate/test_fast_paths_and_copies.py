"""What hooks in modules break: torch's fast path of encoders, and copies made in a window."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.profiler import profile, schedule

from tb_memplugin import memory_trace_handler

FAST = "aten::_transformer_encoder_layer_fwd"


def encoder(width: int = 32, **options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


def operators(prof) -> list[str]:
    return [event.name() for event in prof.profiler.kineto_results.events()]


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize(
    ("options", "padded"),
    [({"activation": "relu"}, True), ({"activation": "gelu"}, False), ({"norm_first": True}, False)],
)
def test_an_encoder_takes_the_fast_path_in_a_recorded_window(options, padded, tmp_path):
    model = encoder(**options).eval()
    x = torch.randn(4, 16, 32)
    mask = torch.arange(16)[None] >= torch.tensor([[3], [9], [16], [12]]) if padded else None
    results, ran = [], []
    for handler in (None, memory_trace_handler(tmp_path, "w", model=model)):
        with torch.no_grad(), profile(profile_memory=True, on_trace_ready=handler) as prof:
            results.append(model(x, src_key_padding_mask=mask))
        ran.append(operators(prof))
    assert ran[0].count(FAST) == 2
    assert ran[1] == ran[0]
    assert torch.equal(*results)


def test_validation_in_a_training_step_takes_the_fast_path(tmp_path):
    def losses(folder) -> tuple[list[str], int]:
        model = nn.Sequential(encoder(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handler = memory_trace_handler(folder, "w", model=model, optimizer=optimizer) if folder else None
        seen, plan = [], schedule(wait=1, warmup=1, active=2, repeat=1)
        with profile(profile_memory=True, schedule=plan, on_trace_ready=handler) as prof:
            for _ in range(4):
                optimizer.zero_grad()
                loss = F.cross_entropy(
                    model.train()(torch.randn(2, 16, 32)).flatten(0, 1), torch.arange(32) % 10
                )
                loss.backward()
                optimizer.step()
                model.eval()
                with torch.no_grad():
                    validated = model(torch.randn(8, 16, 32)).square().mean()
                seen += [float(loss).hex(), float(validated).hex()]
                prof.step()
        return seen, operators(prof).count(FAST)

    alone = losses(None)
    assert alone[1] == 4  # two layers, in each of the two recorded steps
    assert losses(tmp_path) == alone


def copies_made_in_a_window(model: nn.Module, folder) -> dict[str, nn.Module]:
    stored = io.BytesIO()
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler(folder, "w", model=model)):
        with torch.no_grad():
            model(torch.ones(2, 4, 32))
        copied, average = copy.deepcopy(model), AveragedModel(model)
        torch.save(model, stored)
    stored.seek(0)
    return {"deepcopy": copied, "average": average.module, "loaded": torch.load(stored, weights_only=False)}


@pytest.mark.parametrize("kind", ["deepcopy", "average", "loaded"])
def test_a_copy_made_in_a_window_is_a_plain_copy(kind, tmp_path):
    copied = copies_made_in_a_window(encoder().eval(), tmp_path)[kind]
    assert hooks(copied) == 0
    with torch.no_grad(), profile() as prof:
        copied(torch.ones(2, 4, 32))
    assert operators(prof).count(FAST) == 2


@pytest.mark.parametrize("kind", ["deepcopy", "average", "loaded"])
def test_a_copy_made_in_a_window_can_be_scripted_compiled_and_exported(kind, tmp_path):
    copied = copies_made_in_a_window(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), tmp_path)[kind]
    x = torch.ones(1, 32)
    expected = copied(x)
    assert torch.equal(torch.jit.script(copied)(x), expected)
    assert torch.equal(torch.export.export(copied, (x,)).module()(x), expected)
    assert torch.equal(torch.compile(copied, fullgraph=True, backend="eager")(x), expected)


def test_a_model_quantized_in_a_window_holds_no_hooks(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    quantize, linear = torch.ao.quantization.quantize_dynamic, {nn.Linear}
    with profile(profile_memory=True, on_trace_ready=memory_trace_handler(tmp_path, "w", model=model)):
        model(torch.ones(1, 8))
        copied = quantize(model, linear, torch.qint8)
        quantize(model, linear, torch.qint8, inplace=True)
    assert (hooks(copied), hooks(model)) == (0, 0)
    assert torch.equal(copied(torch.ones(1, 8)), model(torch.ones(1, 8)))
