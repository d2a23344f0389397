"""One run of torch.profiler over consecutive steps."""

from __future__ import annotations

from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from tb_memplugin.record.guard import call_all
from tb_memplugin.record.handler import Handler

_STEP = "ProfilerStep#{}"
"""The name by which torch.profiler marks its steps."""


class ProfiledWindow:
    """A profiler that runs from its creation to `close`, with steps marked as torch.profiler marks them.

    We set the marks ourselves, because `profile.step` would begin the next step before it is known whether
    an evaluation comes first. Memory is reported for any activities, so CPU activity is enough: CUPTI is not
    started and allocates no buffers on the device.

    Args:
        handler: called with the profile when the window closes, if a step was marked.
        with_stack: record Python stacks.
    """

    def __init__(self, handler: Handler, *, with_stack: bool) -> None:
        self.steps: list[int] = []
        self._handler = handler
        self._mark: record_function | None = None
        self._profile = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            with_stack=with_stack,
            on_trace_ready=self._call_handler,
        )
        self._profile.start()
        self._is_on = True

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
            self._is_on = False
            self._profile.stop()

    def _call_handler(self, prof: profile) -> None:
        if self.steps:
            self._handler(prof)


def is_profiling() -> bool:
    """Return whether a torch profiler runs in any thread. Starting a second one would silently end it."""
    return bool(getattr(autograd_profiler, "_is_profiler_enabled", False))
