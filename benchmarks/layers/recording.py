"""A training on a GPU with the allocator's history, and each allocation's module as the program knows it.

While a module's `__call__`, `_apply` or one of its autograd nodes runs, allocations carry its name as user
metadata. Nodes belong to the module in whose call they were made, by sequence number. The names are taken out
of the entries afterwards, with the frames of the functions here: what is left is a plain recording.
"""

from __future__ import annotations

import bisect
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

MARK_BYTES = 123_457
"""Bytes of an allocation that marks the end of a backward or an optimizer step; nothing else has them."""

FORWARD, RECOMPUTE, BACKWARD, PARAMETER, GRADIENT, STATE = "FRBPGO"
"""First letter of a truth; the module's FQN follows."""

Program = Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]


class Truth:
    """Names allocations while a model is called, moved and differentiated."""

    def __init__(self) -> None:
        self._fqn: dict[int, str] = {}
        self._owner: dict[torch.Tensor, str] = {}
        self._open = [""]
        self._began: list[int] = []
        self._made_in: list[str] = []
        self._tensors: list[list[tuple[int, str]]] = []

    def watch(self, model: nn.Module) -> None:
        """Name the modules and parameters of a model; those of a wrapper replace those of what it wraps."""
        owner: dict[torch.Tensor, str] = {}
        for fqn, module in model.named_modules():
            self._fqn[id(module)] = fqn
            for parameter in module.parameters(recurse=False):
                owner.setdefault(parameter, fqn)  # of the modules that share one, the first
        self._owner |= owner

    def hold_parameters(self) -> None:
        """Name the parameters where they are now: they may have been allocated by what wraps the model."""
        self._mark(PARAMETER, ((parameter, parameter) for parameter in self._owner))

    def call(self, kind: str, module: nn.Module, run: Callable[[], Any]) -> Any:
        fqn = self._fqn.get(id(module))
        if fqn is None:
            return run()
        if kind == FORWARD and torch._C._current_autograd_node() is not None:
            kind = RECOMPUTE
        self._enter(kind + fqn)
        try:
            return run()
        finally:
            self._open.pop()
            self._show(self._open[-1])

    def _enter(self, name: str) -> None:
        self._open.append(name)
        self._show(name)

    def _show(self, name: str) -> None:
        torch.cuda.memory._set_memory_metadata(name)
        self._began.append(_sequence())
        self._made_in.append(name)

    def before_backward(self, loss: torch.Tensor) -> None:
        """Let each node of the graph name what it allocates."""
        todo, seen = [loss.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
            number = node._sequence_nr()
            if type(node).__name__ == "AccumulateGrad":
                continue
            name = self._made_in[max(bisect.bisect_right(self._began, number) - 1, 0)] if self._began else ""
            node.register_prehook(_names(BACKWARD + name[1:] if name else BACKWARD + "?"))

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward; its nodes name what they allocate, and gradients are their parameter's module's."""
        self.before_backward(loss)
        loss.backward()
        self._mark(GRADIENT, ((parameter, parameter.grad) for parameter in self._owner))

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Run a step of optimizers; their state is that of their parameter's module."""
        for optimizer in optimizers:
            optimizer.step()
        states = (item for optimizer in optimizers for item in optimizer.state.items())
        self._mark(STATE, ((parameter, x) for parameter, state in states for x in state.values()))

    def _mark(self, kind: str, tensors: Iterable[tuple[torch.Tensor, Any]]) -> None:
        """Remember whose the tensors that are alive now are, and mark the moment in the history."""
        self._tensors.append(
            [
                (local(x).untyped_storage().data_ptr(), kind + self._owner[parameter])
                for parameter, x in tensors
                if torch.is_tensor(x)
                and x.is_cuda
                and parameter in self._owner
                and _fills_its_storage(local(x))
            ]
        )
        torch.cuda.memory._set_memory_metadata("")
        torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda")
        self._show(self._open[-1])

    def of_entries(self, entries: list[dict[str, Any]]) -> list[str]:
        """Return the truth of each entry, "" where none is known, and take it out of the entries."""
        truths: list[str] = []
        last: dict[int, int] = {}
        marks = iter(self._tensors)
        for index, entry in enumerate(entries):
            truths.append(entry.get("user_metadata") or "")
            entry["user_metadata"] = ""
            if entry["action"] != "alloc":
                continue
            if entry["size"] == MARK_BYTES:
                truths[index] = ""
                for address, name in next(marks, []):
                    if address in last and truths[last[address]][:1] not in (GRADIENT, STATE):
                        truths[last[address]] = name
            last[entry["addr"]] = index
        return truths


def _names(name: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        torch.cuda.memory._set_memory_metadata(name)

    return hook


def _sequence() -> int:
    """Return the sequence number of a new node."""
    with torch.enable_grad():
        node: Any = (torch.zeros(1, requires_grad=True) + 0).grad_fn
    return int(node._sequence_nr())


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no part of a larger block, as a gradient in a bucket is."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a sharded tensor that this rank has, or the tensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


class WatchedModules:
    """Within the block, modules tell a `Truth` when they run."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth

    def __enter__(self) -> None:
        self._call, self._apply = nn.Module.__call__, nn.Module._apply
        truth, call, apply = self.truth, self._call, self._apply

        def tracked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return truth.call(FORWARD, self, lambda: call(self, *args, **kwargs))

        def tracked_apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            moved = truth.call(PARAMETER, self, lambda: apply(self, *args, **kwargs))  # type: ignore[no-untyped-call]
            return moved

        nn.Module.__call__, nn.Module._apply = tracked_call, tracked_apply  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        nn.Module.__call__, nn.Module._apply = self._call, self._apply  # type: ignore[method-assign]


def record(program: Program, path: Path, stacks: str) -> None:
    """Run two training steps of a program and write its snapshot, and each entry's truth, to a pickle."""
    torch.manual_seed(0)  # some models skip layers at random
    truth = Truth()
    model, loss_of = program()
    truth.watch(model)
    torch.cuda.init()
    context = os.environ.get("LAYERS_CONTEXT", "all")  # of what stacks are recorded
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks=stacks, context=context)
    with WatchedModules(truth):
        train(model, loss_of, truth)
        snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    entries = snapshot["device_traces"][0]
    truths = truth.of_entries(entries)
    for entry in entries:
        entry["frames"] = [frame for frame in entry.get("frames", ()) if not _is_ours(frame)]
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [frame for frame in block.get("frames", ()) if not _is_ours(frame)]
    path.write_bytes(pickle.dumps((snapshot, truths)))


def _is_ours(frame: dict[str, Any]) -> bool:
    return frame["filename"] == __file__ and frame["name"] in (
        "tracked_call",
        "tracked_apply",
        "call",
        "<lambda>",
    )


def train(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], truth: Truth) -> None:
    run = getattr(model, "train_as_user", None)
    if run is not None:
        run(loss_of, truth)
        return
    model.cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(2):
        loss = loss_of(model)
        truth.backward(loss)
        truth.step(optimizer)
        optimizer.zero_grad()
        del loss
