"""One run of torch.profiler over steps that follow each other."""

from __future__ import annotations

from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from tb_memplugin.handler import Handler

_STEP = "ProfilerStep#{}"
"""How torch.profiler marks its steps."""


class ProfiledWindow:
    """A profiler that is on from here to `close`, with steps marked as torch.profiler marks them.

    The marks are set by us, not by `profile.step`, which would begin the next step before it is known
    whether an evaluation comes first. Memory is reported whatever the activities are, so the CPU's are
    enough: no CUPTI, no kernels, and no buffers of theirs on the device.

    Args:
        handler: is given the profile when the window closes, if a step was marked.
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
            on_trace_ready=self._hand_over,
        )
        self._profile.start()

    @property
    def is_in_step(self) -> bool:
        """Whether a step was begun and not ended."""
        return self._mark is not None

    def begin_step(self, number: int) -> None:
        """Mark where a step begins."""
        mark = record_function(_STEP.format(number))
        mark.__enter__()
        self._mark = mark
        self.steps.append(number)

    def end_step(self) -> None:
        """Mark where it ends; nothing where none is begun."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def close(self) -> None:
        """Stop the profiler and hand its profile over."""
        self.end_step()
        self._profile.stop()

    def _hand_over(self, prof: profile) -> None:
        if self.steps:
            self._handler(prof)


def is_profiling() -> bool:
    """Whether a torch profiler is on, in any thread. A second one would end the first without a word."""
    return bool(getattr(autograd_profiler, "_is_profiler_enabled", False))
