"""The memory of a block of code, in torch's allocators: what a test's limits are held against."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

from torch import nn

from tb_memplugin.analysis.comparison import with_folded_layers
from tb_memplugin.analysis.divisions import By, Part
from tb_memplugin.analysis.moments import Moment, peak
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.callbacks.recorder import ProfiledWindow, is_profiling
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.record.handler import memory_trace_handler
from tb_memplugin.store.reader import load_window, read_recordings
from tb_memplugin.temporary import new_folder
from tb_memplugin.trace import MemoryTrace


class MeasuredMemory:
    """Measures a `with` block, as one step or several, on all devices. May be entered once.

    What was alive before the block does not count: the figures are what the block added.

    Args:
        model: a module, or a dict of named modules, whose layers are told apart.
        with_stack: record Python stacks, which tell source lines.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, nn.Module] | None = None, *, with_stack: bool = True
    ) -> None:
        self._model, self._with_stack = model, with_stack
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._window: ProfiledWindow | None = None
        self._steps = 0
        self._is_lost = False
        self._trace: MemoryTrace | None = None

    def __enter__(self) -> MeasuredMemory:
        """Begin to measure.

        Raises:
            MemPluginError: another torch profiler is on.
        """
        if is_profiling():
            raise _lost()
        self._folder = new_folder()
        handler = memory_trace_handler(
            self._folder.name, "measured", model=self._model, start="given", log_level="ERROR"
        )
        self._window = ProfiledWindow(handler, with_stack=self._with_stack, yields=self._lose)
        self._window.begin_step(0)
        return self

    def step(self) -> None:
        """End a step, and begin the next one."""
        if self._window is not None:
            self._steps += 1
            self._window.end_step()
            self._window.begin_step(self._steps)

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        window, self._window = self._window, None
        assert self._folder is not None
        try:
            if window is not None:
                if raised is None:
                    window.end_step()
                window.close()
                steps = read_recordings(self._folder.name).steps
                if steps:
                    self._trace = load_window(steps[0].side_file or "")
        finally:
            self._folder.cleanup()

    def _lose(self) -> None:
        window, self._window = self._window, None
        self._is_lost = True
        if window is not None:
            window.discard()

    @property
    def trace(self) -> MemoryTrace | None:
        """What was recorded; None if the block allocated nothing in torch.

        Raises:
            MemPluginError: the block started a torch profiler of its own, so it was not measured.
        """
        if self._is_lost:
            raise _lost()
        return self._trace

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the block had allocated at once, on the device where that is most."""
        return max(self.peak_bytes_of().values(), default=0)

    def peak_bytes_of(self) -> dict[str, int]:
        """Return the same by device."""
        trace = self.trace
        if trace is None:
            return {}
        rows = {device.name: trace.live(row) for row, device in enumerate(trace.devices)}
        return {name: int(live.max() - live[0]) for name, live in rows.items()}

    def peak(self, device: str | None = None) -> Moment:
        """Return the moment of the peak.

        Raises:
            NotRecordedError: the block allocated nothing, or not on this device.
        """
        trace = self.trace
        if trace is None:
            raise NotRecordedError("The block allocated nothing in torch.")
        return peak(trace, device)

    def parts(self, by: By, device: str | None = None) -> tuple[Part, ...]:
        """Return the parts of all that was alive at the peak, largest first; () if nothing was."""
        return () if self.trace is None else self.peak(device).parts(by)

    def largest(self, by: By, device: str, most: int) -> tuple[Part, ...]:
        """Return the largest parts of the same, repeated layers as one."""
        parts = self.parts(by, device)
        return (with_folded_layers(parts) if by == "module" else parts)[:most]

    def levels(self) -> dict[str, list[int]]:
        """Return, by device, how many bytes more than at the start were alive when each step ended."""
        trace = self.trace
        if trace is None:
            return {}
        return {
            device.name: [stats.end_bytes - int(trace.live(row)[0]) for stats in step_stats(trace, row)]
            for row, device in enumerate(trace.devices)
        }


def _lost() -> MemPluginError:
    return MemPluginError(
        "The memory was not measured: another torch profiler is on, and only one can run at a time.",
        fix="Measure what is within the profiler's block, or take it away.",
    )
