"""Give a snapshot of the running program the names of its own models and optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.layers.own_modules import ModelModule
from tb_memplugin.read.tables import ModuleTree
from tb_memplugin.record.modules import ModuleNames, clean_name
from tb_memplugin.record.storages import (
    Sighting,
    gradients,
    held_parameters,
    match_sightings,
    model_storages,
    optimizer_storages,
    sight,
)
from tb_memplugin.record.torch_private.modules import children_of, items_of
from tb_memplugin.trace import MemoryTrace, Module, Note, Reason
from tb_memplugin.trace.notes import MODULES_INFERRED
from tb_memplugin.trace.replay import attributed
from tb_memplugin.trace.tables import CERTAIN

ALLOCATES = frozenset(
    (
        nn.Linear,
        nn.Embedding,
        nn.LayerNorm,
        nn.GroupNorm,
        nn.RMSNorm,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.GELU,
    )
)
"""Classes of which each call allocates its output."""

COLUMNS = ("category", "module", "module_confidence", "label", "reason")
"""What is known of the blocks of parameters, buffers, gradients and optimizer state."""


def with_own_names(
    trace: MemoryTrace, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> MemoryTrace:
    """Return a trace of a snapshot that was taken just now, named by the program's models and optimizers.

    Parameters, buffers, gradients and optimizer state are known by their addresses. Modules of the rest are
    inferred from call stacks and have the models' own names where these leave no choice.

    Args:
        trace: a trace that ends now. If it names modules, these stay, but for blocks known by address.
        models: each with the first part of its names, "" for none.
    """
    names = ModuleNames.of(models)
    of_optimizers = (
        (*gradients(each, names), *held_parameters(each, names), *optimizer_storages(each, names))
        for each in optimizers
    )
    sightings = sight(chain(model_storages(models, names), *of_optimizers))
    inferred = with_inferred_layers(trace, models=model_modules(models))
    return _with_sightings(inferred, sightings, names.modules)


def model_modules(models: Mapping[str, nn.Module]) -> tuple[ModelModule, ...]:
    """Return what `read/layers` needs to know of models. No method of theirs is called."""
    known: dict[int, ModelModule] = {}
    return tuple(_model_module(prefix, model, known) for prefix, model in models.items())


def _model_module(prefix: str, model: nn.Module, known: dict[int, ModelModule]) -> ModelModule:
    pending: list[tuple[str, nn.Module]] = []

    def described(fqn: str, module: nn.Module) -> ModelModule:
        if id(module) not in known:
            kind = type(module)
            is_sequential = kind.forward is nn.Sequential.forward
            known[id(module)] = ModelModule(
                clean_name(fqn), _lines_of(kind.forward), is_sequential, kind in ALLOCATES
            )
            pending.append((fqn, module))
        return known[id(module)]

    root = described(prefix, model)
    while pending:
        fqn, module = pending.pop(0)
        children = ((name, child) for name, child in items_of(children_of(module)) if child is not None)
        known[id(module)].children = {
            name: described(f"{fqn}.{name}" if fqn else name, child) for name, child in children
        }
    return root


def _lines_of(forward: Any) -> tuple[str, int, int] | None:
    """Return the file of a function, and its first and last line; None if it is no Python function."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return None
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_filename, code.co_firstlineno, max(lines, default=code.co_firstlineno)


def _with_sightings(
    trace: MemoryTrace, sightings: Sequence[Sighting], modules: Sequence[Module]
) -> MemoryTrace:
    """Return a trace in which the blocks that were sighted have their owners, categories and labels.

    Args:
        modules: what `Sighting.module` is a row of.
    """
    tree, labels = ModuleTree(trace.modules), [*trace.labels]
    label_rows = {label: row for row, label in enumerate(labels)}
    blocks, before = trace.allocations, len(trace.start)
    matched = match_sightings(
        sightings, [device.name for device in trace.devices], blocks, trace.events.time_ns
    )
    start, events = (
        {name: getattr(of, name).copy() for name in COLUMNS} for of in (trace.start, trace.events)
    )
    for block, sighting in zip(matched.tolist(), sightings, strict=True):
        if block < 0:
            continue
        columns, row = (start, block) if block < before else (events, int(blocks.born[block]))
        if sighting.label not in label_rows:
            label_rows[sighting.label] = len(labels)
            labels.append(sighting.label)
        columns["label"][row] = label_rows[sighting.label]
        columns["category"][row], columns["reason"][row] = sighting.category, Reason.HELD
        if sighting.module >= 0:
            columns["module"][row] = tree.add(
                modules[sighting.module].key, modules[sighting.module].class_name
            )
            columns["module_confidence"][row] = CERTAIN
    named_start, named_events = replace(trace.start, **start), replace(trace.events, **events)
    is_inferred = (named_events.module > 0) & (named_events.module_confidence < CERTAIN)
    allocated = blocks.born[before:]
    return replace(
        trace,
        start=named_start,
        events=named_events,
        modules=tree.as_tuple(),
        labels=tuple(labels),
        notes=_with_inferred(trace.notes, int(named_events.bytes[allocated][is_inferred[allocated]].sum())),
        paired=attributed(blocks, named_events, named_start),
    )


def _with_inferred(notes: Sequence[Note], inferred: int) -> tuple[Note, ...]:
    """Return the notes with the number of allocated bytes whose modules are still inferred."""
    note = Note(
        f"Modules of {inferred:,} allocated bytes are inferred from call stacks. Those of parameters, "
        "buffers, gradients and optimizer state are the program's own.",
        MODULES_INFERRED,
        inferred,
    )
    return tuple(note if each.code == MODULES_INFERRED else each for each in notes)
