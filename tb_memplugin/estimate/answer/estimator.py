"""`MemoryEstimator`: estimate a model's memory from fake tensors, without a GPU and without allocating it."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.estimation import (
    Estimate,
    ModuleMemory,
    PhaseMemory,
    TensorCreation,
    answer,
    module_memory,
    print_estimate,
    print_modules,
    print_tensors,
    simulate,
    tensor_creation,
)
from tb_memplugin.estimate.answer.hints import Answers, checked
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import READ
from tb_memplugin.estimate.libraries.plugins import Plugin, chosen_plugins
from tb_memplugin.estimate.program.refusals import by_name
from tb_memplugin.estimate.run.chosen import chosen
from tb_memplugin.estimate.run.correction import Target
from tb_memplugin.estimate.run.fake_recording import FakeRecording, trace_of
from tb_memplugin.logs import instance_logger
from tb_memplugin.record.arguments import Optimizers, checked_optimizers
from tb_memplugin.simulator.allocator_settings import AllocatorSettings, not_followed
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Category, MemoryTrace

_OF_VERSION = (
    "The rules of PyTorch {} hold for cuBLAS's workspaces and for which attention kernel runs. What kernels "
    "allocate is that of {}, and the operations that run are those of the installed PyTorch."
)

WORKER = "estimate"
"""The worker name that `save` uses; the Memory tab shows it."""


class MemoryEstimator:
    """Run training steps on fake tensors and estimate the memory that they would take.

    Inside the `with` block every tensor has a shape, a dtype and a device, but no memory: models of any size
    can be built and trained. Models built before the block are real and cannot be used inside it.

    Args:
        device: the device whose memory is estimated: "cuda" (no GPU is needed) or "cpu".
        gpu: the target GPU, by name or as a `GpuSpec`; None for no particular model.
        hints: values that only a real run knows; see docs/estimate.md.
        conf: settings of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.
        corrected: False turns the corrections of fake tensors off, for comparison.
        plugins: library plugins, by name or as `Plugin`s; () for none. None: all of `plugins.PLUGINS`.
        log_level: level of this estimator's own log messages, as a name or number. None: the package's.

    Raises:
        MemPluginError: a device, GPU, setting or plugin is unknown.

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
        if str(device).partition(":")[0] not in ("cuda", "cpu"):
            raise MemPluginError(
                f"MemoryEstimator cannot estimate for the device {str(device)!r}.",
                where="MemoryEstimator",
                fix="Use device='cuda' or device='cpu'.",
            )
        self.device = torch.device(device)
        spec = GpuSpec.named(gpu) if isinstance(gpu, str) else gpu
        self.gpu = spec if self.device.type == "cuda" else None
        self._settings = AllocatorSettings.from_conf(conf)
        self._target = Target(
            self.device.type, self.gpu, settings=self._settings, plugins=chosen_plugins(plugins)
        )
        if self.gpu is not None and self.gpu.torch is not None:
            self._target.note(_OF_VERSION.format(".".join(map(str, self.gpu.torch)), READ))
        for sentence in not_followed(conf):
            self._target.note(sentence)
        self._hints = checked(hints)
        self._corrections = chosen(self._target, self._hints, none=not corrected)
        self._recording: FakeRecording | None = None
        self._running = False
        self._logger = instance_logger(log_level)

    def __enter__(self) -> MemoryEstimator:
        if self._recording is not None:
            raise MemPluginError(
                "This estimator has already run.",
                where="MemoryEstimator",
                fix="Create another one for another run.",
            )
        self._recording = FakeRecording(self.device.type, self._corrections)
        _ONE_AT_A_TIME.acquire()
        try:
            self._recording.start()
        except BaseException:
            _ONE_AT_A_TIME.release()
            raise
        self._running = True
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._running = False
        try:
            self._here.stop()
        finally:
            _ONE_AT_A_TIME.release()
        for line in self._hints.unused_lines() if isinstance(self._hints, Answers) else ():
            self._target.note(f"The hint for {line} was not used: the program asked nothing at that line.")
        for note in self._target.notes:
            self._logger.info("%s", note)
        if error is not None and (refusal := by_name(error)) is not None:
            raise refusal from error

    def watch(self, model: nn.Module | None = None, optimizer: Optimizers = None, name: str = "") -> None:
        """Register a model and its optimizers. Optional: models and optimizers that run are found.

        Args:
            model: the model whose modules are named in the results. Call again after modules were added.
            optimizer: one or several optimizers.
            name: prefix of the modules' names, for use with more than one model.
        """
        self._inside("watch").watch(model, checked_optimizers(optimizer), name)

    def create_fake_tensor(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Create a fake input tensor, on the estimated device unless another is given."""
        recording = self._inside("create_fake_tensor")
        tensor = torch.empty(shape, dtype=dtype, device=device or self.device, requires_grad=requires_grad)
        recording.name(tensor, Category.INPUT, "")
        return tensor

    @contextmanager
    def track_phase(self, name: str) -> Iterator[None]:
        """Name a phase of the program, such as `forward` or `optimizer`. Phases may nest."""
        recording = self._inside("track_phase")
        phase = recording.begin_phase(name)
        try:
            yield
        finally:
            recording.end_phase(phase)

    def keep_stacks(self) -> None:
        """Record the program's Python stack of each allocation from now on: then lines have names."""
        recording = self._inside("keep_stacks")
        recording.ledger.stack = recording.mode.python_stack

    def step(self) -> None:
        """End a training step: what follows belongs to the next one."""
        self._inside("step").end_step()

    def forget_what_is_gone(self) -> None:
        """Drop the allocations that were freed so far from the history.

        For a rank that builds the whole model here but keeps only its part.
        """
        recording = self._inside("forget_what_is_gone")
        gc.collect()
        recording.mode.settle(recording.layers.scope())
        recording.ledger.forget_freed()

    def get_current_memory_allocated(self) -> tuple[int, ...]:
        """Return the allocated bytes of each device, the estimated one first.

        On a GPU, each block counts as a multiple of 512 bytes.
        """
        recording = self._here
        if self._running:
            recording.mode.settle(recording.layers.scope())
        return tuple(recording.ledger.allocated) or (0,)

    def get_max_memory_allocated(self) -> tuple[int, ...]:
        """Return the highest allocated bytes of each device so far.

        On a GPU, each block counts as a multiple of 512 bytes. `estimate()` also counts what the allocator
        adds to some blocks beyond that.
        """
        return tuple(self._here.ledger.peaks) or (0,)

    def trace_result(self) -> MemoryTrace:
        """Return the trace with the segments of the simulated allocator, for views, exports and analysis.

        Raises:
            MemPluginError: the `with` block has not ended.
        """
        return self._simulated

    def estimate(self) -> Estimate:
        """Return the estimate: how much memory, whether it fits, and what uses it.

        Raises:
            MemPluginError: the `with` block has not ended.
        """
        return self._estimate

    def get_module_stats(self) -> tuple[ModuleMemory, ...]:
        """Return the memory of each module, parents before children.

        Raises:
            MemPluginError: the `with` block has not ended.
        """
        return module_memory(self.trace_result())

    def get_phase_stats(self) -> tuple[PhaseMemory, ...]:
        """Return the phases named with `track_phase`, in the order in which they ended."""
        return tuple(
            PhaseMemory(phase.name, phase.before_bytes, phase.after_bytes, phase.peak_bytes)
            for phase in self._here.phases
        )

    def get_tensor_stats(self) -> tuple[TensorCreation, ...]:
        """Return the memory that each operator allocated, the largest total first.

        Raises:
            MemPluginError: the `with` block has not ended.
        """
        return tensor_creation(self.trace_result())

    def print_memory_stats(self, detailed: bool = False, console: Console | None = None) -> None:
        """Print the estimate with rich; `detailed` adds modules and operators.

        Raises:
            MemPluginError: the `with` block has not ended.
        """
        out = console or Console()
        print_estimate(self.estimate(), out)
        if detailed:
            print_modules(self.get_module_stats(), out)
            print_tensors(self.get_tensor_stats(), out)

    def save(self, logdir: str | os.PathLike[str], worker_name: str = WORKER) -> None:
        """Write the trace for the Memory tab of `tensorboard --logdir <logdir>`.

        Raises:
            MemPluginError: the `with` block has not ended, or the folder cannot be written.
        """
        RunWriter(os.fspath(logdir), worker_name).write(self.trace_result())

    @cached_property
    def _trace(self) -> MemoryTrace:
        if self._running or self._recording is None:
            raise MemPluginError(
                "There is no result yet.",
                where="MemoryEstimator",
                fix=(
                    "Run the model inside `with MemoryEstimator() as estimator:`, and ask for results "
                    "after the block."
                ),
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
            self._trace,
            self._simulated,
            self._settings,
            self.gpu,
            named,
            seconds,
            self._target.notes,
            self._target.not_counted_bytes,
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

    def _inside(self, method: str) -> FakeRecording:
        if not self._running:
            raise MemPluginError(
                f"{method} is outside the estimator's block.",
                where=f"MemoryEstimator.{method}",
                fix="Use it inside `with MemoryEstimator() as estimator:`.",
            )
        return self._here


PATIENCE = 10.0
"""Seconds that the lock's owner may wait at one place before it is assumed to wait for this thread."""

_LOOK = 0.05
"""Seconds between two looks at the owner of the lock."""

_WAITS = ("threading.py", "queue.py", "_base.py", "synchronize.py")
"""Standard-library files whose functions wait for another thread: joins, events, queues, futures."""


class Turns:
    """A reentrant lock that raises where waiting for it would never end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0

    def acquire(self) -> None:
        """Wait for the lock.

        Raises:
            MemPluginError: the owner of the lock joins this thread, or has waited for another thread for
                `PATIENCE` seconds.
        """
        stuck = _Stuck()
        while not self._lock.acquire(timeout=_LOOK):
            owner = self._owner
            if stuck.is_stuck(sys._current_frames().get(owner)):
                raise MemPluginError(
                    f"Another thread is inside an estimate ({_name(owner)}) and waits for this one. "
                    "Only one estimate can run at a time.",
                    where=f"MemoryEstimator in {threading.current_thread().name}",
                    fix=(
                        "Estimate on the thread that is already in the block (blocks may nest there), or "
                        "end that block before this thread starts its own."
                    ),
                )
        self._owner = threading.get_ident()
        self._depth += 1

    def release(self) -> None:
        """Release the lock, once for each `acquire`."""
        self._depth -= 1
        self._owner = self._owner if self._depth else 0
        self._lock.release()


class _Stuck:
    """Decides from repeated looks at a thread's frame whether it is stuck waiting for another thread."""

    def __init__(self) -> None:
        self._at: tuple[int, int] | None = None
        self._looks = 0

    def is_stuck(self, frame: FrameType | None) -> bool:
        if frame is None or not frame.f_code.co_filename.endswith(_WAITS):
            self._at = None
            return False
        at = (id(frame), frame.f_lasti)
        self._looks = self._looks + 1 if at == self._at else 0
        self._at = at
        return _joins_us(frame) or self._looks * _LOOK >= PATIENCE


def _joins_us(frame: FrameType | None) -> bool:
    """Whether the thread with this frame is joining the calling thread."""
    me = threading.current_thread()
    while frame is not None and frame.f_code.co_filename.endswith(_WAITS):
        if frame.f_code.co_name == "join" and frame.f_locals.get("self") is me:
            return True
        frame = frame.f_back
    return False


def _name(ident: int) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), "one that ended")


_ONE_AT_A_TIME = Turns()
"""The lock that a thread holds while it is inside an estimator's block."""
