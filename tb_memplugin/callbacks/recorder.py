"""Profile chosen steps of another library's training loop without ever disturbing it."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from tb_memplugin.logs import instance_logger
from tb_memplugin.record.arguments import default_worker_name
from tb_memplugin.record.guard import Guard, call_all, guarded
from tb_memplugin.record.handler import Handler, memory_trace_handler
from tb_memplugin.record.torch_private.profiler import ENABLES, PREPARES
from tb_memplugin.record.trackers import LogTo, chosen

_STEP = "ProfilerStep#{}"
"""The name by which torch.profiler marks its steps."""


_OURS: weakref.WeakSet[profile] = weakref.WeakSet()
"""The profiles of windows. One whose window ended by an error may look as if it still warmed up."""


class ProfiledWindow:
    """A profiler that runs from its creation to `close`, with steps marked as torch.profiler marks them.

    We set the marks ourselves, because `profile.step` would begin the next step before it is known whether
    an evaluation comes first. Memory is reported for any activities, so CPU activity is enough: CUPTI is not
    started and allocates no buffers on the device.

    Args:
        handler: called with the profile when the window closes, if a step was marked.
        record_shapes: record what operators receive, which tells the tensors in blocks.
        yields: called before the program prepares or starts a profiler of its own, which would fail while
            this one runs.
    """

    def __init__(
        self, handler: Handler, *, with_stack: bool, yields: Callable[[], object], record_shapes: bool = False
    ) -> None:
        self.steps: list[int] = []
        self._handler = handler
        self._mark: record_function | None = None
        self._profile = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            with_stack=with_stack,
            record_shapes=record_shapes,
            on_trace_ready=self._call_handler,
        )
        _OURS.add(self._profile)
        self._starts = _StartsOfOthers(yields)
        self._is_on = True
        try:
            self._profile.start()
            self._starts.watch()
        except BaseException:  # Ctrl-C while the window begins: the profiler may be on already
            self.discard()
            raise

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._mark is not None

    def begin_step(self, number: int) -> None:
        """Mark the beginning of a step."""
        mark = record_function(_STEP.format(number))
        mark.__enter__()
        self._mark = mark
        self.steps.append(number)
        self._profile.step_num = number

    def end_step(self) -> None:
        """Mark the end of the step; does nothing if none has begun."""
        if self._mark is not None:
            self._end_mark()
            self._profile.step_num += 1  # as `profile.step` counts, which tells the handler what ended

    def _end_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def close(self) -> None:
        """Stop the profiler and pass its profile to the handler. An open step has not ended."""
        self._end_mark()
        self._stop()

    def discard(self) -> None:
        """Stop the profiler without a record."""
        self.steps.clear()
        call_all(self._end_mark, self._stop)

    def _stop(self) -> None:
        if self._is_on:
            try:
                self._starts.forget()
            finally:
                self._profile.stop()
            self._is_on = False  # not after an error: `discard` then tries again

    def _call_handler(self, prof: profile) -> None:
        if self.steps:
            self._handler(prof)


class _StartsOfOthers:
    """Calls a function before any profiler is prepared or started, from `watch` until `forget`."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._patched: dict[str, tuple[Any, Any]] = {}

    def watch(self) -> None:
        """Wrap torch's functions."""
        for name in (PREPARES, ENABLES):
            original = getattr(autograd_profiler, name, None)
            if original is not None:
                self._patched[name] = original, _telling(original, self._tell)
                setattr(autograd_profiler, name, self._patched[name][1])

    def forget(self) -> None:
        """Put torch's functions back. Safe to call again, also if it was interrupted."""
        for name, (original, ours) in self._patched.items():
            if getattr(autograd_profiler, name, None) is ours:  # else someone else has wrapped ours
                setattr(autograd_profiler, name, original)


def _telling(original: Callable[..., Any], tell: Callable[[], object]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tell()
        return original(*args, **kwargs)

    return call


def is_profiling() -> bool:
    """Return whether a torch profiler runs in any thread, or is warming up. A second one would end it."""
    if getattr(autograd_profiler, "_is_profiler_enabled", False):
        return True
    kind, ours = autograd_profiler.profile, {id(each.profiler) for each in _OURS}
    profilers = [each for each in gc.get_referrers(kind) if type(each) is kind and id(each) not in ours]
    return any(other.entered and other.kineto_results is None for other in profilers)


Steps = Iterable[int] | Callable[[int], ProfilerAction] | None
"""Step numbers, a schedule from `torch.profiler.schedule`, or None for the third and fourth step."""

_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class ChosenSteps:
    """The steps that a user chose. Consecutive steps form one window.

    Step N takes the training from N optimizer steps to N + 1, so the first step is 0, as torch.profiler
    counts. Numbers count from the beginning of the whole training, also if it was resumed; a schedule counts
    from the first step of this run.

    Raises:
        TypeError: `steps` is neither numbers nor a schedule.
        ValueError: `steps` has no number, or a negative one.
    """

    def __init__(self, steps: Steps = None) -> None:
        self._first = 0
        self._schedule = steps if callable(steps) else _third_to_fifth if steps is None else None
        self._numbers = () if callable(steps) or steps is None else _numbers(steps)

    def start_at(self, first: int) -> None:
        """Set the first step of this run of the training."""
        self._first = first

    def has(self, step: int) -> bool:
        """Return whether this step is to be profiled."""
        if self._schedule is None:
            return step in self._numbers
        return step >= self._first and self._schedule(step - self._first) in _RECORDING

    def ends_window(self, step: int) -> bool:
        """Return whether the window ends with this step, which must be one to be profiled."""
        if self._schedule is not None:
            saved = self._schedule(step - self._first) == ProfilerAction.RECORD_AND_SAVE
            return saved or not self.has(step + 1)
        return step + 1 not in self._numbers


def _third_to_fifth(step: int) -> ProfilerAction:
    """Record steps 2 to 4: the optimizer has its state by then, and three steps show what grows."""
    return ProfilerAction.RECORD if step in (2, 3, 4) else ProfilerAction.NONE


def _numbers(steps: Iterable[int]) -> Collection[int]:
    try:
        kept: Collection[int] = steps if isinstance(steps, range) else frozenset(map(index, steps))
    except TypeError as error:
        raise TypeError(
            f"steps is {steps!r}; give whole numbers such as [10] or range(10, 13), "
            "or torch.profiler.schedule(...)"
        ) from error
    if not kept:
        raise ValueError("steps is empty: nothing would be recorded")
    lowest = min(kept[0], kept[-1]) if isinstance(kept, range) else min(kept)
    if lowest < 0:
        raise ValueError(f"steps contains {lowest}, but the first step is 0")
    return kept


_LOST = "The memory of this window is not recorded"
_LAST = "the end of the training"
_OTHER = (
    "Another torch profiler is on, and only one can run at a time, so no memory is recorded while it runs.\n"
    "  fix: turn that profiler off; or give it on_trace_ready=tb_memplugin.memory_trace_handler(...) and "
    "profile_memory=True, and remove this recorder."
)


@dataclass(frozen=True, slots=True)
class Training:
    """A training loop that is about to run.

    Attributes:
        folder: returns the folder where it logs; called when the first window opens.
        model: returns its module, or several by name; called when the first window opens.
        optimizers: returns those that exist, when the first window opens; others are found when they step.
    """

    folder: Callable[[], str]
    model: Callable[[], nn.Module | Mapping[str, nn.Module] | None]
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]]


class StepRecorder:
    """Records the chosen steps of one training after another.

    The loop's callback reports its progress: `begin_training`, then `expect`, `begin_step` and `end_step` for
    each step, `pause` when an evaluation begins, and `end_training`. A window opens at `expect`, so that it
    contains the loading of a step's first batch, and closes when its last step ends. What happens between
    two of its steps counts to the earlier one; a pause splits the window.

    Args:
        steps: which steps to record; see `ChosenSteps`.
        folder: where to write; None means where the training logs.
        worker_name, snapshot, durable, log_to: as for `memory_trace_handler`.
        record_shapes: record what operators receive, which tells the tensors in blocks.
        log_level: level of this recorder's own messages; None means that of the package.

    Raises:
        TypeError, ValueError: `steps` is not a valid choice of steps.
        MemPluginError: `log_level` is no level, or `log_to` no tracker that is installed.
    """

    def __init__(
        self,
        steps: Steps = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        worker_name: str | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        snapshot: bool = False,
        durable: bool = False,
        log_level: int | str | None = None,
        log_to: LogTo = None,
    ) -> None:
        self._chosen = ChosenSteps(steps)
        self._folder = None if folder is None else os.fspath(folder)
        self._worker_name = worker_name
        self._with_stack, self._record_shapes, self._snapshot = with_stack, record_shapes, snapshot
        self._durable = durable
        self._log_level, self._log_to = log_level, chosen(log_to)
        self._guard = Guard(_LOST, instance_logger(log_level))
        self._trainings: Counter[str] = Counter()
        self._training: Training | None = None
        self._handler: Handler | None = None
        self._window: ProfiledWindow | None = None
        self._first = self._next = 0
        self._recorded = False
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: the choices, and nothing of a training or a window."""
        return {**vars(self), "_training": None, "_handler": None, "_window": None, "_guard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._guard = Guard(_LOST, instance_logger(self._log_level))

    @guarded("begin_training")
    def begin_training(self, training: Training, first: int) -> None:
        """Start or resume a training with step `first`. A previous training that did not end ends here."""
        self.end_training(raised=True)
        self._training, self._handler = training, None
        self._first = self._next = first
        self._recorded = False
        self._chosen.start_at(first)

    @guarded("expect")
    def expect(self, step: int) -> None:
        """Announce that step `step` comes next; its data may be loaded from here on."""
        self._next = step
        if self._training is not None and self._window is None and self._chosen.has(step):
            self._open()

    @guarded("begin_step")
    def begin_step(self, step: int) -> None:
        """Begin a step; a repeated call within the step (for each micro-batch) does nothing."""
        if self._window is not None and self._window.is_in_step:
            return
        if self._window is not None and not self._chosen.has(step):
            self._close()
        self.expect(step)
        if self._window is not None:
            self._window.begin_step(step)

    @guarded("end_step")
    def end_step(self, *, pause: bool = False) -> None:
        """End the step after the optimizer has stepped. `pause`: an evaluation comes before the next step."""
        step, self._next = self._next, self._next + 1
        if self._window is not None:
            self._window.end_step()
            if pause or self._chosen.ends_window(step):
                self._close()
        if not pause:
            self.expect(step + 1)

    def next_step(self, step: int) -> None:
        """End a step, and begin this one at once. Where neither is recorded, it raises what goes wrong."""
        if self._window is None and not self._chosen.has(step):
            self._next = step
            return
        self.end_step()
        self.begin_step(step)

    @guarded("pause")
    def pause(self) -> None:
        """Close the window because something other than a step begins; within a step it does nothing."""
        if self._window is not None and not self._window.is_in_step:
            self._close()

    @guarded("resume")
    def resume(self) -> None:
        """Expect the next step, after a pause."""
        self.expect(self._next)

    @guarded(_LAST)
    def end_training(self, *, raised: bool = False) -> None:
        """End the training and write the open window; `raised` if an error ended the training."""
        self._close()
        if self._training is not None and not (raised or self._recorded or self._has_warned):
            self._warn(
                f"No memory was recorded: the training ran {self._ran()}, and steps= selects none of "
                "them.\n  fix: choose other steps; step 0 is the first step of the whole training."
            )
        self._training = self._handler = None

    def decline(self, why: str) -> None:
        """Record nothing of this training, and log the reason."""
        self._training = None
        self._warn(why)

    def _ran(self) -> str:
        return f"steps {self._first} to {self._next - 1}" if self._next > self._first else "no step"

    def _open(self) -> None:
        if is_profiling():
            self._warn(_OTHER)
            return
        if self._handler is None:
            self._handler = self._new_handler()
        self._window = ProfiledWindow(
            self._handler, with_stack=self._with_stack, record_shapes=self._record_shapes, yields=self._yield
        )

    def _yield(self) -> None:
        """Discard the open window, because the program starts a profiler of its own."""
        window, self._window = self._window, None
        if window is not None:
            try:
                window.discard()
            except Exception as error:  # the program's profiler must start, whatever happens to us
                self._guard.end("the program's own profiler", error)
            self._warn(_OTHER)

    def _new_handler(self) -> Handler:
        assert self._training is not None
        folder = self._folder if self._folder is not None else self._training.folder()
        self._trainings[folder] += 1
        worker, times = self._worker_name or default_worker_name(), self._trainings[folder]
        return memory_trace_handler(
            folder,
            worker if times == 1 else f"{worker}_training{times}",
            model=self._training.model(),
            optimizer=self._training.optimizers(),
            snapshot=self._snapshot,
            durable=self._durable,
            log_to=self._log_to,
            log_level=self._log_level,
        )

    def _close(self) -> None:
        window = self._window
        if window is not None:
            self._recorded = self._recorded or bool(window.steps)
            window.close()
            self._window = None

    def fail(self, where: str, error: BaseException) -> None:
        """Drop the open window because of an error. The next one is recorded."""
        window, self._window = self._window, None
        if where == _LAST:
            self._training = self._handler = None
        self._has_warned = True
        self._guard.end(where, error, *([] if window is None else [window.discard]))

    def _warn(self, message: str) -> None:
        """Log a warning, once per message."""
        self._has_warned = True
        self._guard.warn(message)


class StepCallback:
    """A mixin with a recorder of chosen steps; list it before the library's own callback class."""

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002  # as the libraries call it
        *,
        steps: Steps = None,
        worker_name: str | None = None,
        with_stack: bool = False,
        snapshot: bool = False,
        durable: bool = False,
        log_level: int | str | None = None,
        log_to: LogTo = None,
    ) -> None:
        """Choose what to record.

        Args:
            dir: where to write. Default: where the library logs, see `logging_folder`.
            steps: numbers (`[10, 500]`, `range(10, 13)`) or `torch.profiler.schedule(...)`, which counts
                from where the training begins. Default: the third and fourth step of each training.
            worker_name: unique per process. Default: `rank<N>`, or `<host>_<pid>` in a single process.
            with_stack: record Python stacks as well: slower, with source lines.
            snapshot: record the allocator's history as well, on CUDA, ROCm and XPU.
            log_level: level of this callback's own messages, a name or number. Default: that of the package.
            durable, log_to: as for `memory_trace_handler`.

        Raises:
            TypeError, ValueError: `steps` is not a valid choice of steps.
            MemPluginError: `log_level` is no level, or `log_to` no tracker that is installed.
        """
        super().__init__()
        self._recorder = StepRecorder(
            steps,
            folder=dir,
            worker_name=worker_name,
            with_stack=with_stack,
            snapshot=snapshot,
            durable=durable,
            log_level=log_level,
            log_to=log_to,
        )
        self._listen()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._listen()

    def fail(self, where: str, error: BaseException) -> None:
        """Drop the open window because of an error."""
        self._recorder.fail(where, error)

    def _listen(self) -> None:
        """Hook into the library for what it has no callback event for; does nothing by default."""
