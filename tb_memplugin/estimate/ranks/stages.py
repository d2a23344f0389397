"""Divide a model into pipeline stages: an `nn.Sequential`, or a decoder of transformers.

A transformers model can be divided if its config has a `base_model_pp_plan` with an embedding, equal layers
and a norm. The first stage has the embedding, the last one the norm and the head; a tied head is a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.workload import Built, loss_of

PARTS_OF_A_DECODER = {"embed_tokens", "layers", "norm"}
"""The module names that a config's `base_model_pp_plan` must have."""

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""`loss(output, target)` returns the loss of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a model. `description` names its contents for notes."""

    module: nn.Module
    description: str


@dataclass(frozen=True, slots=True)
class Fed:
    """The inputs of a whole step for the first stage, and the target and loss for the last stage."""

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    loss: Loss


def shares(layers: int, parts: int) -> list[range]:
    """Return the layers of each part, in order: as equal as possible, the larger parts first.

    Raises:
        MemPluginError: there are fewer layers than parts.
    """
    if layers < parts:
        raise MemPluginError(
            f"The model has {layers} layers, which is too few for {parts} stages.",
            where="--mesh",
            fix="Use fewer stages.",
        )
    each, more = divmod(layers, parts)
    ends = [(part + 1) * each + min(part + 1, more) for part in range(parts)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def stage_of(model: nn.Module, index: int, count: int) -> Stage:
    """Return one stage of a model. The parts of other stages are removed from the model.

    Raises:
        MemPluginError: the model cannot be divided, or not into that many stages.
    """
    if isinstance(model, nn.Sequential):
        own = shares(len(model), count)[index]
        return Stage(model[own.start : own.stop], f"children {_range_text(own)}")
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    if base is None or base is model or set(plan) != PARTS_OF_A_DECODER:
        raise MemPluginError(
            f"{type(model).__name__} cannot be divided into stages.",
            where="--mesh",
            fix=(
                "The model must be a torch.nn.Sequential, or a transformers model whose config has a "
                "base_model_pp_plan. Otherwise build the stages in Python: docs/estimate_ranks.md, "
                "Pipelines."
            ),
        )
    return _decoder_stage(model, base, index, count)


def fed(built: Built, micro_batches: int) -> Fed:
    """Return the inputs, target and loss of a pipeline for a step.

    Raises:
        MemPluginError: forward takes something other than tensors, or more than two keyword arguments.
    """
    labels = built.keywords.get("labels")
    inputs = (*built.arguments, *(value for name, value in built.keywords.items() if name != "labels"))
    if not all(isinstance(value, torch.Tensor) for value in inputs) or len(built.keywords) > 2:
        raise MemPluginError(
            "The first stage of a pipeline takes only tensors.",
            where="--mesh",
            fix="Return the inputs as a tensor or a tuple of tensors, with samples in the first dimension.",
        )
    if labels is None:
        target = torch.empty(micro_batches, device="cpu")
        return Fed(inputs, target, lambda output, _: loss_of(output))
    model: Any = built.model
    function, words = model.loss_function, model.config.vocab_size
    return Fed(
        inputs, labels, lambda logits, target: function(logits=logits, labels=target, vocab_size=words)
    )


class DecoderStage(nn.Module):
    """Some layers of a decoder. They turn token ids or hidden states into hidden states or logits."""

    def __init__(self, model: nn.Module, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self._takes = "input_ids" if first else "inputs_embeds"
        self._gives = "logits" if last else "last_hidden_state"

    def forward(self, micro_batch: torch.Tensor) -> Any:
        """Run one micro-batch."""
        return getattr(self.model(**{self._takes: micro_batch}), self._gives)


def _decoder_stage(model: Any, base: Any, index: int, count: int) -> Stage:
    own, first, last = shares(len(base.layers), count)[index], index == 0, index == count - 1
    # A layer looks its type up by its index among the layers of this stage.
    base.config = copy.deepcopy(base.config)
    base.config.num_hidden_layers = len(own)
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = list(base.config.layer_types)[own.start : own.stop]
    base.layers = base.layers[own.start : own.stop]
    parts = [f"layers {_range_text(own)}"]
    if first:
        parts.insert(0, "the embedding")
    else:
        base.embed_tokens = None
    if last:
        parts.append("the norm and the head")
    else:
        base.norm = nn.Identity()
    return Stage(DecoderStage(model if last else base, first, last), ", ".join(parts))


def _range_text(own: range) -> str:
    return f"{own.start} to {own.stop - 1}" if len(own) > 1 else str(own.start)
