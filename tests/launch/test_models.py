"""Models are found from the parameters that optimizers train."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin.launch.recorder import models_of


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_the_outermost_module_is_found_through_lists_of_modules_and_dicts() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])})
    wrapped = nn.Module()
    wrapped.model = model
    found = models_of([sgd(model)])
    assert list(found) == [""]
    assert found[""] is wrapped


def test_a_module_that_refers_to_the_model_in_another_way_is_not_its_parent() -> None:
    model = nn.Linear(2, 2)
    watcher: Any = nn.Linear(2, 2)
    vars(watcher)["watched"] = model
    assert models_of([sgd(model)])[""] is model


def test_several_models_go_by_their_classes() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Bilinear(2, 2, 2)]
    found = models_of([sgd(model) for model in models])
    assert sorted(name.rstrip("_12") for name in found) == ["Bilinear", "Linear", "Linear"]
    assert {"Bilinear", "Linear"} < set(found)
    assert set(map(id, found.values())) == set(map(id, models))


def test_of_several_of_one_class_each_goes_by_its_variable_in_the_main_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, critic, other = nn.Linear(2, 2), nn.Linear(2, 1), nn.Bilinear(2, 2, 2)
    for name, value in {"actor": actor, "critic": critic, "alias": critic, "other": other}.items():
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    found = models_of([sgd(model) for model in (actor, critic, other)])
    assert found == {"actor": actor, "critic": critic, "Bilinear": other}


def test_all_models_of_one_optimizer_are_found() -> None:
    encoder, decoder = nn.Linear(2, 3), nn.Bilinear(3, 3, 2)
    trained = [*encoder.parameters(), *decoder.parameters()]
    assert models_of([torch.optim.SGD(trained, lr=0.1)]) == {"Linear": encoder, "Bilinear": decoder}


def test_parameters_of_no_module_have_none() -> None:
    assert models_of([torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)]) == {}


DISTURBING = """
import sys, threading, torch
from torch import nn
from tb_memplugin.launch.recorder import models_of

sys.addaudithook(lambda event, arguments: None)  # Python runs it, and so other threads, at each call of `id`
model = nn.Linear(3, 3)
optimizer, errors, end = torch.optim.SGD(model.parameters(), lr=0.1), [], []


def build(item):
    while not end:
        try:
            tuple(item for _ in range(300))
        except SystemError as error:
            errors.append(error)


threads = [threading.Thread(target=build, args=(item,)) for item in (1, nn.Linear, torch.Tensor)]
sys.setswitchinterval(1e-5)
for thread in threads:
    thread.start()
for _ in range(8):
    assert model in models_of([optimizer]).values()
end.append(True)
for thread in threads:
    thread.join()
print(len(errors))
"""


def test_threads_that_build_tuples_meanwhile_are_not_disturbed() -> None:
    """Of a tuple that is being built and that anything else refers to, Python raises a SystemError."""
    done = subprocess.run([sys.executable, "-c", DISTURBING], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
