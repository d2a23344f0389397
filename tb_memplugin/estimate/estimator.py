"""`MemoryEstimator`: a model's memory with no GPU and no memory, from fake tensors."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from torch import nn

from tb_memplugin.arguments import Optimizers, checked_optimizers
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.corrections import Target
from tb_memplugin.estimate.corrections.chosen import chosen
from tb_memplugin.estimate.corrections.libraries import chosen_plugins
from tb_memplugin.estimate.corrections.named_errors import by_name
from tb_memplugin.estimate.estimate_report import print_estimate, print_modules, print_tensors
from tb_memplugin.estimate.estimate_stats import (
    ModuleMemory,
    PhaseMemory,
    TensorCreation,
    module_memory,
    tensor_creation,
)
from tb_memplugin.estimate.estimation import Estimate, answer, simulate
from tb_memplugin.estimate.fake_recording import FakeRecording
from tb_memplugin.estimate.fake_trace import trace_of
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.plugins import Plugin
from tb_memplugin.estimate.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.estimate.simulator.conf_text import not_followed
from tb_memplugin.estimate.turns import Turns
from tb_memplugin.logs import instance_logger
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Category, MemoryTrace

_ONE_AT_A_TIME = Turns()
"""Held inside of a block."""

WORKER = "estimate"
"""The name under which `save` writes, as the Memory tab shows it."""


class MemoryEstimator:
    """Runs a training step on fake tensors, and tells what memory it would take.

    Inside the block every tensor has a shape, a type and a device, but no memory: models of any size can be
    built and trained. What was built before it is real, and cannot be used inside.

    Args:
        device: "cuda" (also where no GPU is) or "cpu": whose memory counts.
        gpu: the target, by name or as a `GpuSpec`; None for a GPU of no kind in particular.
        hints: values that only a real run knows; see docs/estimate.md.
        conf: settings of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.
        corrected: False leaves fake tensors as torch has them, for comparison.
        plugins: of libraries, by name or as `Plugin`s; () for none. None: all of `plugins.PLUGINS`.
        log_level: of this estimator's own messages, as a name or number. None: as the package's.

    Raises:
        MemPluginError: an unknown device, GPU, setting or plugin.

    Example:
        >>> with MemoryEstimator(gpu="h100") as estimator:
        ...     model = Model().cuda()
        ...     batch = estimator.create_fake_tensor(8, 1024)
        ...     model(batch).sum().backward()
        >>> estimator.estimate().peak_allocated_bytes
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        gpu: str | GpuSpec | None = "h100",
        hints: Any = None,
        *,
        conf: str = "",
        corrected: bool = True,
        plugins: Sequence[str | Plugin] | None = None,
        log_level: int | str | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cuda", "cpu"):
            raise MemPluginError(
                f"An estimate for {str(device)!r} is not possible.",
                where="MemoryEstimator",
                fix="Use device='cuda' or device='cpu'.",
            )
        spec = GpuSpec.named(gpu) if isinstance(gpu, str) else gpu
        self.gpu = spec if self.device.type == "cuda" else None
        self._settings = AllocatorSettings.from_conf(conf)
        self._target = Target(
            self.device.type,
            self.gpu,
            has_device=_has_device(self.device.type),
            plugins=chosen_plugins(plugins),
        )
        for sentence in not_followed(conf):
            self._target.note(sentence)
        self._corrections = (
            chosen(self._target, hints) if corrected else chosen(self._target, hints, none=True)
        )
        self._recording: FakeRecording | None = None
        self._running = False
        self._logger = instance_logger(log_level)

    def __enter__(self) -> MemoryEstimator:
        if self._recording is not None:
            raise MemPluginError(
                "This estimator ran already.",
                where="MemoryEstimator",
                fix="Make another one for another run.",
            )
        self._recording = FakeRecording(
            self.device.type, self._corrections, has_device=self._target.has_device
        )
        _ONE_AT_A_TIME.acquire()
        try:
            self._recording.start()
        except BaseException:
            _ONE_AT_A_TIME.release()
            raise
        self._running = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._running = False
        try:
            self._here.stop()
        finally:
            _ONE_AT_A_TIME.release()
        for note in self._target.notes:
            self._logger.info("%s", note)
        if error is not None and (told := by_name(error)) is not None:
            raise told from error

    def watch(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizers = None,
        name: str = "",
    ) -> None:
        """Say whose memory this is. Not needed: models and optimizers that run are found.

        Args:
            model: whose modules are told apart. Call it again when modules were added.
            optimizer: one or several.
            name: what the modules' names begin with, where there is more than one model.
        """
        self._inside("watch").watch(model, checked_optimizers(optimizer), name)

    def create_fake_tensor(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """An input of a shape: a fake tensor on the estimated device, unless another is named."""
        recording = self._inside("create_fake_tensor")
        tensor = torch.empty(shape, dtype=dtype, device=device or self.device, requires_grad=requires_grad)
        recording.name(tensor, Category.INPUT, "")
        return tensor

    @contextmanager
    def track_phase(self, name: str) -> Iterator[None]:
        """Name a stretch: `forward`, `optimizer`, anything. They may nest."""
        recording = self._inside("track_phase")
        phase = recording.begin_phase(name)
        try:
            yield
        finally:
            recording.end_phase(phase)

    def step(self) -> None:
        """A training step is over: what follows belongs to the next."""
        self._inside("step").end_step()

    def forget_what_is_gone(self) -> None:
        """Leave out what was freed so far: for a rank that builds a whole model here, and keeps its part."""
        recording = self._inside("forget_what_is_gone")
        gc.collect()
        recording.mode.settle(recording.layers.place())
        recording.ledger.forget_the_dead()

    def get_current_memory_allocated(self) -> tuple[int, ...]:
        """Allocated bytes by device, the estimated one first, in multiples of 512 a block."""
        recording = self._here
        if self._running:
            recording.mode.settle(recording.layers.place())
        return tuple(recording.ledger.allocated) or (0,)

    def get_max_memory_allocated(self) -> tuple[int, ...]:
        """The highest allocated bytes by device so far, in multiples of 512 a block.

        `estimate()` also counts what the allocator gives to a block beyond that.
        """
        return tuple(self._here.ledger.peaks) or (0,)

    def trace_result(self) -> MemoryTrace:
        """The trace, with the reserve of a simulated allocator: for every view, export and analysis.

        Raises:
            MemPluginError: the block has not ended.
        """
        return self._simulated

    def estimate(self) -> Estimate:
        """How much, does it fit, and what fills it.

        Raises:
            MemPluginError: the block has not ended.
        """
        return self._estimate

    def get_module_stats(self) -> tuple[ModuleMemory, ...]:
        """What each module holds, parents before children.

        Raises:
            MemPluginError: the block has not ended.
        """
        return module_memory(self.trace_result())

    def get_phase_stats(self) -> tuple[PhaseMemory, ...]:
        """The phases that `track_phase` named, in the order in which they ended."""
        return tuple(
            PhaseMemory(one.name, one.before_bytes, one.after_bytes, one.peak_bytes)
            for one in self._here.phases
        )

    def get_tensor_stats(self) -> tuple[TensorCreation, ...]:
        """How much memory each operator asked for, the most first.

        Raises:
            MemPluginError: the block has not ended.
        """
        return tensor_creation(self.trace_result())

    def print_memory_stats(self, detailed: bool = False, console: Console | None = None) -> None:
        """Print the answer through rich; `detailed` adds modules and operators.

        Raises:
            MemPluginError: the block has not ended.
        """
        out = console or Console()
        print_estimate(self.estimate(), out)
        if detailed:
            print_modules(self.get_module_stats(), out)
            print_tensors(self.get_tensor_stats(), out)

    def save(self, logdir: str | os.PathLike[str], worker_name: str = WORKER) -> None:
        """Write the trace for the Memory tab of `tensorboard --logdir <logdir>`.

        Raises:
            MemPluginError: the block has not ended, or the folder cannot be written.
        """
        RunWriter(os.fspath(logdir), worker_name).write(self.trace_result())

    @cached_property
    def _trace(self) -> MemoryTrace:
        if self._running or self._recording is None:
            raise MemPluginError(
                "There is no result yet.",
                where="MemoryEstimator",
                fix="Run the model inside `with MemoryEstimator() as estimator:`; ask when that has ended.",
            )
        return trace_of(self._recording.run, self.gpu, self._target.notes)

    @cached_property
    def _simulated(self) -> MemoryTrace:
        return simulate(self._trace, self._settings)

    @cached_property
    def _estimate(self) -> Estimate:
        run = self._here.run
        named = [(phase.name, phase.start_ns, phase.stop_ns) for phase in self._here.phases]
        seconds = (run.stop_ns - run.start_ns) / 1e9
        return answer(
            self._trace, self._simulated, self._settings, self.gpu, named, seconds, self._target.notes
        )

    @property
    def _here(self) -> FakeRecording:
        if self._recording is None:
            raise MemPluginError(
                "The estimator has not run.",
                where="MemoryEstimator",
                fix="Use it inside `with MemoryEstimator() as estimator:`.",
            )
        return self._recording

    def _inside(self, what: str) -> FakeRecording:
        if not self._running:
            raise MemPluginError(
                f"{what} is outside of the estimator's block.",
                where=f"MemoryEstimator.{what}",
                fix="Use it inside `with MemoryEstimator() as estimator:`.",
            )
        return self._here


def _has_device(device_type: str) -> bool:
    return device_type == "cpu" or torch.cuda.is_available()
