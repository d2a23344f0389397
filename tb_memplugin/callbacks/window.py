"""One run of torch.profiler over consecutive steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from tb_memplugin.record.guard import call_all
from tb_memplugin.record.handler import Handler
from tb_memplugin.record.torch_private.profiler import ENABLES, PREPARES

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
        with_stack: record Python stacks.
        record_shapes: record what operators receive, which tells the tensors in blocks.
        yields: called before the program prepares or starts a profiler of its own, which would fail while
            this one runs.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        with_stack: bool,
        yields: Callable[[], object],
        record_shapes: bool = False,
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

    def end_step(self) -> None:
        """Mark the end of the step; does nothing if none has begun."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def close(self) -> None:
        """Stop the profiler and pass its profile to the handler."""
        self.end_step()
        self._stop()

    def discard(self) -> None:
        """Stop the profiler without a record."""
        self.steps.clear()
        call_all(self.end_step, self._stop)

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
    others = [each for each in gc.get_referrers(kind) if type(each) is kind and id(each) not in ours]
    return any(other.entered and other.kineto_results is None for other in others)
