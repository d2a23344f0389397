"""One fake run, from start to stop: it installs the mode and the hooks, and names storages during the run."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import time_ns
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.correction import Corrections
from tb_memplugin.estimate.run.fake_layers import FakeLayers
from tb_memplugin.estimate.run.fake_ledger import Block, FakeLedger, NamedPhase
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import settings_kept
from tb_memplugin.read.categories import Born, by_lifetime, of_known
from tb_memplugin.read.phases import phase_at, phase_spans, stretch
from tb_memplugin.read.tables import Mark, Names, Owners, named_phases, operator_name
from tb_memplugin.record.optimizer_hooks import StepHooks
from tb_memplugin.record.provenance import with_caches
from tb_memplugin.record.storages import gradients, model_storages, optimizer_storages
from tb_memplugin.record.tensor_metadata import dense, made_tensors
from tb_memplugin.trace import (
    Category,
    Counter,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Phase,
    Reason,
    Spans,
    Step,
    at_every_moment,
    events,
    start_state,
)
from tb_memplugin.trace.allocator import DEFAULT_POOL, PoolId
from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.tables import Int64

Named = tuple[torch.Tensor, Category, int, str]


class FakeRecording:
    """Installs everything that an estimate needs, and removes it again in `stop`."""

    def __init__(self, device_type: str, corrections: Corrections) -> None:
        self.ledger, self.layers = FakeLedger(device_type), FakeLayers()
        self.layers.watch_root = self._watch_running
        self.run = FakeRun(self.ledger, self.layers, time_ns())
        self.phases: list[NamedPhase] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._handles: list[Any] = []
        self._stack = contextlib.ExitStack()
        self._step_starts: list[int] = []
        self.mode = CountingFakeMode(self.ledger, self.layers, corrections)
        self._corrections = corrections

    def start(self) -> None:
        """Begin the run: from here on tensors are fake."""
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(settings_kept())
            stack.callback(self._corrections.undo)
            self._corrections.apply(self.mode)
            # Autograd's device threads would need module stacks of their own. Sizes and order are the same
            # on one thread.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for handle in (
                register_module_forward_pre_hook(self._here(self.layers.entered)),
                register_module_forward_hook(self._here(self.layers.left), always_call=True),
                StepHooks(self._here(self._before_step), self._here(self._after_step)),
            ):
                stack.callback(handle.remove)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # from deepcopy
            stack.enter_context(self.mode)
        except BaseException:
            stack.close()
            raise
        self._stack = stack

    def stop(self) -> FakeRun:
        """End the run, name the storages that are still live, and return what was recorded."""
        self._stack.close()
        self.mode.settle(self.layers.scope())
        self.layers.stop()
        self._name_everything()
        self.run.stop_ns = time_ns()
        self.ledger.lives.clear()  # this also deletes the weak references
        return self.run

    def watch(self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer], name: str) -> None:
        """Register a model and optimizers, to name their parameters, buffers, gradients and states."""
        if model is not None and self.mode.is_on():
            _refuse_a_real_one(model)
        if model is not None and any(reference() is model for reference in self._models):
            self.layers.add(model, name)
        elif model is not None:
            prefixes = {module.key.partition(".")[0] for module in self.layers.names.modules}
            prefix = name if name or not self._models else _free_name(type(model).__name__, prefixes)
            self._models.append(weakref.ref(model))
            self.layers.add(model, prefix)
        for optimizer in optimizers:
            self._know(optimizer)
        self._name_everything()

    def begin_phase(self, name: str) -> NamedPhase:
        """Begin a phase with a name of the user's."""
        self.mode.settle(self.layers.scope())
        level = self.level
        phase = NamedPhase(name, level, level, level, time_ns())
        self.ledger.phases.append(phase)
        self.run.marks.append((phase.start_ns, name, False))
        return phase

    def end_phase(self, phase: NamedPhase) -> None:
        """End a named phase."""
        self.mode.settle(self.layers.scope())
        phase.after_bytes = self.level
        self.ledger.phases[:] = [other for other in self.ledger.phases if other is not phase]
        phase.stop_ns = time_ns()
        self.run.marks.append((phase.stop_ns, phase.name, True))
        self.phases.append(phase)

    def end_step(self) -> None:
        """End a training step."""
        self.mode.settle(self.layers.scope())
        self._name_everything()
        self.run.step_ends.append(time_ns())

    def name(self, tensor: torch.Tensor, category: Category, label: str) -> None:
        """Set the category and label of a tensor's block, unless it already has a category."""
        self._name([(tensor, category, -1, label)])

    @property
    def level(self) -> int:
        """Allocated bytes on the first device."""
        return self.ledger.allocated[0] if self.ledger.allocated else 0

    def _here(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Restrict a hook to the estimate's own thread: other threads may train a real model meanwhile."""
        return lambda *args: hook(*args) if self.mode.is_here else None

    def _watch_running(self, model: nn.Module) -> None:
        """Register a model that runs without having been watched."""
        self.watch(model, (), "")

    def _name_everything(self) -> None:
        names = self.layers.names
        models = {
            str(row): model
            for row, reference in enumerate(self._models)
            if (model := reference()) is not None
        }
        self._name(model_storages(models, names))
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                self._name(optimizer_storages(optimizer, names))

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(reference() is optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _name(self, tensors: Iterable[Named]) -> None:
        for tensor, category, module, label in tensors:
            for block, plain in self._blocks(tensor):
                if block.category is Category.UNKNOWN:
                    block.category, block.label, block.tensor = category, label, dense(plain)
                    block.module = module if module >= 0 else block.module

    def _blocks(self, tensor: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        if isinstance(tensor, FakeTensor):
            block = self.ledger.block_of(tensor.untyped_storage())
            if block is not None:
                yield block, tensor
            return
        flatten = getattr(tensor, "__tensor_flatten__", None)
        for name in flatten()[0] if flatten is not None else ():
            yield from self._blocks(getattr(tensor, name))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._name(gradients(optimizer, self.layers.names))
        self.layers.in_optimizer += 1
        self._step_starts.append(time_ns())

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.layers.in_optimizer = max(0, self.layers.in_optimizer - 1)
        self.mode.settle(self.layers.scope())
        self.layers.optimizer.append((self._step_starts.pop(), time_ns()))
        self._know(optimizer)
        self._name(optimizer_storages(optimizer, self.layers.names))


def _refuse_a_real_one(model: nn.Module) -> None:
    """Raise if a model has real parameters: they would mix with fake inputs and would not be counted."""
    for name, parameter in model.named_parameters():
        if type(parameter) in (nn.Parameter, torch.Tensor) and not _is_of_functions(parameter):
            raise MemPluginError(
                f"The model was built before the estimate: its parameter {name[:80]!r} is real.",
                where=type(model).__name__,
                fix="Build the model inside `with MemoryEstimator():`; it uses no memory there.",
            )


def _is_of_functions(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch.func's wrapper, which stands for a parameter and may hold a fake tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _free_name(name: str, used: set[str]) -> str:
    number = 2
    free = name
    while free in used:
        free = f"{name}_{number}"
        number += 1
    return free


SOURCE = "MemoryEstimator"

_BY_MODELS = (Category.TEMPORARY, Category.WORKSPACE, Category.COMMUNICATION)
"""Categories that only the estimate's models of kernels and libraries give to a block directly."""


@dataclass(slots=True)
class FakeRun:
    """The record of a fake run. All times are epoch nanoseconds.

    `step_ends` are the times at which `step()` was called. `marks` are the beginnings and ends of named
    phases: (time, name, whether it ends).
    """

    ledger: FakeLedger
    layers: FakeLayers
    start_ns: int
    stop_ns: int = 0
    step_ends: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def trace_of(run: FakeRun, gpu: GpuSpec | None, notes: Sequence[str]) -> MemoryTrace:
    """Return the allocations and frees of a fake run, with operator, module, phase, step and category."""
    operators, labels, names = Names(), Names(), Names()
    stacks: dict[tuple[str, ...], int] = {}
    owners = Owners(run.layers.names.modules)
    phases = _phases(run)
    streams, pools = _streams(run), _pools(run)
    full = _events(run, phases, operators, labels, owners, streams, pools, stacks)
    allocs = np.flatnonzero(full.kind == Kind.ALLOC)
    made = [run.ledger.entries[row][2].tensor for row in allocs.tolist()]
    full.tensor[allocs], tensors = made_tensors(made, full.bytes[allocs])
    capacity, product = (None, "") if gpu is None else (gpu.memory_bytes, gpu.name)
    devices = run.ledger.devices or [f"{run.ledger.device_type}:0"]
    trace = MemoryTrace(
        source=SOURCE,
        events=full,
        start=start_state([]),
        devices=tuple(Device(name, capacity, product) for name in devices),
        steps=_steps(run),
        operators=operators.as_tuple(),
        labels=labels.as_tuple(),
        stacks=tuple(stacks),
        tensors=tensors,
        phases=phases,
        calls=owners.calls(run.layers.calls),
        annotations=named_phases(run.marks, full, names),
        annotation_names=names.as_tuple(),
        modules=owners.as_tuple(),
        streams=streams,
        pools=pools,
        counters=at_every_moment(len(devices), Counter.SIMULATED),
        notes=tuple(Note(note, "estimate") for note in notes),
        properties={"torch": torch.__version__},
    )
    return with_caches(trace)


def _steps(run: FakeRun) -> tuple[Step, ...]:
    """Return one step for each call of `step()`, and one more for events after the last call."""
    last = run.ledger.entries[-1][0] if run.ledger.entries else run.start_ns
    ends = list(run.step_ends)
    if not ends or last > ends[-1]:
        ends.append(run.stop_ns)
    starts = [run.start_ns, *ends[:-1]]
    return tuple(Step(number, *span) for number, span in enumerate(zip(starts, ends, strict=True)))


def _phases(run: FakeRun) -> Spans:
    layers = run.layers
    return phase_spans(
        stretch(layers.forward),
        stretch(layers.backward),
        stretch(layers.optimizer),
        np.array(run.step_ends, np.int64),
    )


def _streams(run: FakeRun) -> tuple[int, ...]:
    """Return the pointers of all streams that allocated; none if that was only the default one."""
    streams = {entry[2].stream for entry in run.ledger.entries}
    return () if streams <= {0} else tuple(sorted(streams))


def _pools(run: FakeRun) -> tuple[PoolId, ...]:
    """Return the ids of all pools that were used; none if that was only the default one."""
    pools = {entry[2].pool for entry in run.ledger.entries}
    return () if pools <= {DEFAULT_POOL} else tuple(sorted(pools))


def _events(
    run: FakeRun,
    phases: Spans,
    operators: Names,
    labels: Names,
    owners: Owners,
    streams: tuple[int, ...],
    pools: tuple[PoolId, ...],
    stacks: dict[tuple[str, ...], int],
) -> Events:
    entries = run.ledger.entries
    blocks = [entry[2] for entry in entries]
    time = np.array([entry[0] for entry in entries], np.int64)
    is_alloc = np.array([entry[1] for entry in entries], bool)
    empties = np.array([block.empties_cache for block in blocks], bool)
    rows: dict[Any, int] = {}
    operator = np.full(len(entries), -1, np.int64)
    for row in np.flatnonzero(is_alloc).tolist():
        made_by = blocks[row].made_by
        operator_row = rows.get(made_by)
        if operator_row is None:
            operator_row = rows[made_by] = operators.add(operator_name(made_by))
        operator[row] = operator_row
    # A block may get its owner after it was allocated (optimizer state): its allocation shows that owner.
    modules = np.where(
        is_alloc, _column([block.module for block in blocks]), _column([entry[3] for entry in entries])
    )
    loose = is_alloc & (modules < 0)
    module = modules.astype(np.int32)
    module[loose] = owners.with_outside(modules[loose], operator[loose], operators)
    phase = np.array([entry[4] for entry in entries], np.uint8)
    phase = np.where(phase == Phase.BACKWARD, phase, phase_at(phases, time)).astype(np.uint8)
    device = np.array([block.device for block in blocks], np.uint8)
    size = _column([block.bytes for block in blocks])
    category = np.array([block.category for block in blocks], np.uint8)
    unknown = np.flatnonzero(is_alloc & (category == Category.UNKNOWN))
    born = Born(
        time_ns=time[unknown],
        freed_ns=_column([blocks[row].freed_ns for row in unknown.tolist()]),
        device=device[unknown],
        bytes=size[unknown],
        phase=phase[unknown],
        operator=operator[unknown].astype(np.int32),
        operator_end_ns=np.zeros(len(unknown), np.int64),
        recomputing=np.array([blocks[row].recomputing for row in unknown.tolist()], bool),
    )
    reason = of_known(category)
    reason[np.isin(category, _BY_MODELS)] = Reason.KERNEL_MODEL
    judged = by_lifetime(born, phases, operators.as_tuple(), knows_optimizer=True)
    category[unknown], reason[unknown] = judged
    category[~is_alloc], reason[~is_alloc] = Category.UNKNOWN, Reason.NOT_RECORDED
    return events(
        time,
        kind=np.where(is_alloc, Kind.ALLOC, np.where(empties, Kind.SEGMENT_FREE, Kind.FREE_COMPLETED)),
        device=device,
        address=np.array([block.address for block in blocks], np.uint64),
        bytes=size,
        operator=operator,
        module=module,
        label=[
            labels.add(block.label) if alloc and block.label else -1
            for block, alloc in zip(blocks, is_alloc.tolist(), strict=True)
        ],
        phase=phase,
        category=category,
        reason=reason,
        stack=[stacks.setdefault(block.stack, len(stacks)) if block.stack else -1 for block in blocks],
        stream=[streams.index(block.stream) if streams else -1 for block in blocks],
        pool=[pools.index(block.pool) if pools else -1 for block in blocks],
    )


def _column(values: list[int]) -> Int64:
    return np.array(values, np.int64)
