"""`Run`: what a program sees of the harness; and `Record`, what the harness sees of a run."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ExecutionTraceObserver, profile

from tests.certificate.cpu_blocks import Blocks, CpuBlocks
from tests.certificate.objects import bits, description, outline
from tests.certificate.process_state import WatchedNames, dynamo_counters, python_state
from tests.certificate.recorders import Recorder, Window, our_messages

Program = Callable[["Run"], None]


@dataclass
class Record:
    """What a program did in one run.

    Attributes:
        operators: thread -> names of the operators and annotations of the window, in order, with their
            depth before them where known.
        blocks: the CPU blocks of the whole program, from its first line until its objects are gone.
        gpu: the counters of the GPU's allocator for the same.
        values: what the program computed: bits.
        objects: what the program's models, optimizers and copies hold at its end.
        meanwhile: the models' own dictionaries at each step.
        process: what is changed in torch and Python afterwards.
        dynamo: dynamo's counters.
        output: errors, warnings and printed lines of the program.
        raised: the error that ended the program, "" if none did.
        refused: why the recorder did not record, "" if it did.
        messages: what tb_memplugin logged: no part of the comparison.
    """

    operators: dict[int, list[str]] = field(default_factory=dict)
    blocks: Blocks | None = None
    gpu: dict[str, int] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    meanwhile: list[Any] = field(default_factory=list)
    process: dict[str, Any] = field(default_factory=dict)
    dynamo: dict[str, Any] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)
    raised: str = ""
    refused: str = ""
    messages: list[str] = field(default_factory=list)


class Run:
    """One run of a program: it opens its window here, and leaves here what to compare.

    Attributes:
        rank: the rank of this process in a program of several.
        world: how many processes run the program.
    """

    def __init__(
        self, recorder: Recorder, rank: int = 0, world: int = 1, meeting: str = "", observed: bool = True
    ) -> None:
        self.rank, self.world = rank, world
        self._observed_by_torch = observed
        self.record = Record()
        self._recorder = recorder
        self._meeting = meeting
        self._kept: dict[str, Any] = {}

    @contextmanager
    def window(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        *optimizers: torch.optim.Optimizer,
        keep: bool = True,
    ) -> Iterator[Callable[[], None]]:
        """Record the block. It yields a function to call at the end of each step of the loop.

        If `keep` is False, nothing here holds the models and optimizers, which the loop may delete.
        """
        models = {"": model} if isinstance(model, nn.Module) else dict(model)
        if keep:
            self._kept.update({f"model {name}": module for name, module in models.items()})
            self._kept.update({f"optimizer {number}": one for number, one in enumerate(optimizers)})
        with ExitStack() as recording:
            observation = recording.enter_context(self._observation())
            opened = recording.enter_context(self._opened(models, list(optimizers)))
            observation.profile = opened.profile
            if not keep:
                models.clear()
                del model, optimizers

            def step() -> None:
                self.record.meanwhile.append([outline(module) for module in models.values()])
                opened.step()

            yield step
            self.record.meanwhile.append([outline(module) for module in models.values()])

    def value(self, computed: Any) -> None:
        """Compare the bits of a tensor, or of anything that holds some."""
        self.record.values.append(
            bits(computed) if isinstance(computed, torch.Tensor) else description(computed)
        )

    def keep(self, **objects: Any) -> None:
        """Compare what these objects hold when the program ends: copies, scripts, files."""
        self._kept.update(objects)

    def callbacks(self, library: str) -> list[Any]:
        """Return what to give to a Trainer of `transformers` or `lightning`: our callback, if it records."""
        if not self._recorder.in_trainers:
            return []
        module = import_module(f"tb_memplugin.callbacks.{library}")
        return [module.MemoryTraceCallback("runs", worker_name="w", steps=[1, 2])]

    def join(self) -> None:
        """Join the process group of the program's processes."""
        store = torch._C._distributed_c10d.FileStore(self._meeting, self.world)
        torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)

    def finish(self) -> None:
        """Describe what was kept, and let go of it."""
        self.record.objects = {name: description(kept) for name, kept in self._kept.items()}
        self._kept.clear()

    @contextmanager
    def _opened(
        self, models: dict[str, nn.Module], optimizers: list[torch.optim.Optimizer]
    ) -> Iterator[Window]:
        with ExitStack() as stack:
            opened = self._recorder.open(stack, models, optimizers)
            del models, optimizers
            self.record.refused = opened.refused
            yield opened

    @contextmanager
    def _observation(self) -> Iterator[Window]:
        """Record the operators of the block: by its profile if it has one, else by an observer of torch's.

        The observer is on while the recorder opens and closes, too.
        """
        window = Window()
        if self._recorder.profiled:
            try:
                yield window
            finally:
                assert window.profile is not None
                self._add(_of_profile(window.profile))
        elif self._observed_by_torch:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "operators.json"
                observer = ExecutionTraceObserver().register_callback(str(path))
                os.register_at_fork(after_in_child=lambda: _let_go_of(path))
                observer.start()
                try:
                    yield window
                finally:
                    observer.stop()
                    observer.unregister_callback()
                    self._add(_of_observer(path))
        else:
            yield window

    def _add(self, operators: dict[int, list[str]]) -> None:
        if self.world > 1:
            operators = _without_order_between_threads(operators)
        for thread, names in operators.items():
            self.record.operators.setdefault(thread, []).extend(names)


def _of_profile(running: profile) -> dict[int, list[str]]:
    operators: dict[int, list[str]] = {}
    assert running.profiler is not None
    assert running.profiler.kineto_results is not None
    threads: dict[int, int] = {}
    for event in running.profiler.kineto_results.events():
        if not _is_python(event) and event.name() != "[memory]":
            thread = threads.setdefault(event.start_thread_id(), len(threads))
            operators.setdefault(thread, []).append(event.name())
    return operators


def _is_python(event: Any) -> bool:
    """Whether an event is a call of a Python function. Before PyTorch 2.13, only its name tells."""
    if hasattr(event, "activity_type"):
        return bool(event.activity_type() == "python_function")
    return _PYTHON_CALL.search(event.name()) is not None


_PYTHON_CALL = re.compile(r"\.py\(\d+\): |^<.*>\(\d+\): |^<built-in |^nn\.Module: ")


def _without_order_between_threads(operators: dict[int, list[str]]) -> dict[int, list[str]]:
    """Return the operators without gloo's, which run on its own threads whenever these come to it.

    torch's observer counts what a thread runs meanwhile as inside of them, so depths are left out.
    """
    theirs = ("gloo:", "c10d::", "record_param_comms")
    names = [name.rpartition(" ")[2] for thread in operators.values() for name in thread]
    return {0: sorted(name for name in names if not name.startswith(theirs))}


def _let_go_of(path: Path) -> None:
    """Have a forked process write to nowhere what its copy of the observer would write into the file."""
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and link.resolve() == path:
            os.dup2(os.open(os.devnull, os.O_WRONLY), int(link.name))


def _of_observer(path: Path) -> dict[int, list[str]]:
    operators: dict[int, list[str]] = {}
    nodes = json.loads(path.read_text())["nodes"]
    depths: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: node["id"]):
        depths[node["id"]] = depth = depths.get(node["ctrl_deps"], -1) + 1
        thread = next((part["value"] for part in node["attrs"] if part["name"] == "tid"), 0)
        if node["name"].startswith("ProfilerStep#"):
            depths[node["id"]] -= 1  # of the profiler in our callback; what it contains stands by itself
        elif not node["name"].startswith("[pytorch|profiler"):
            operators.setdefault(thread, []).append(f"{depth - 2} {node['name']}")
    return operators


def work_on_gpu() -> None:
    """Have tensors created on the GPU that name no device, without a mode that torch's fast paths look for.

    What computes the same bits twice is chosen where there is a choice.
    """
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def run(program: Program, this: Run, names: WatchedNames) -> Record:
    """Run a program in this process, which must be a fresh one, and return the record.

    Python's cyclic garbage collector is off: when it runs depends on how many objects Python creates, ours
    included, and with it when tensors in cycles are freed.
    """
    gc.collect()
    gc.disable()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for programs that use the old generator
    record, blocks = this.record, CpuBlocks()
    blocks.start()
    shown = warnings.showwarning
    warnings.showwarning = lambda message, category, *_, **__: record.output.append(
        f"{category.__name__}: {message}"
    )
    with our_messages() as record.messages:
        try:
            program(this)
        except Exception as error:  # noqa: BLE001  # what a program raises is compared
            record.raised = f"{type(error).__name__}: {error}"
            record.output.append(record.raised)
    warnings.showwarning = shown
    record.dynamo = dynamo_counters()
    this.finish()
    gc.collect()
    several_threads = this.world > 1 or torch.cuda.is_initialized()  # a GPU's backward has its own thread
    record.blocks = blocks.stop().sorted() if several_threads else blocks.stop()
    if torch.cuda.is_initialized():
        record.gpu = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()  # until then wrappers of ours may keep the highest
    record.process = python_state()
    record.process["changed"] = names.changed()
    return record
