"""Everything a route needs to answer: the step a request names, its summary, its window."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tb_memplugin.errors import NotRecordedError, UnreadableFileError
from tb_memplugin.proto.summary_pb2 import DeviceSummary, StepSummary
from tb_memplugin.server.catalogue import Catalogue, Entry
from tb_memplugin.server.monitored import Monitored
from tb_memplugin.server.selection import Request
from tb_memplugin.server.windows import Windows
from tb_memplugin.store import files
from tb_memplugin.store.health import unreadable_files
from tb_memplugin.store.reader import unfolded
from tb_memplugin.store.summary import step_span
from tb_memplugin.trace import MemoryTrace

_UNFOLDED_KEPT = 16


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step on a device, as a request named them."""

    entry: Entry
    device: str
    whole: bool = False
    """Whether all steps of its window are meant, as one."""

    @property
    def epoch_ns(self) -> int:
        """When the window began: times in requests and answers count from here."""
        return self.entry.metadata.epoch_ns


@dataclass(frozen=True, slots=True)
class Opened:
    """A window in memory, and the rows in it of the step and device that a request named.

    `whole`: the request means all steps of the window as one.
    """

    trace: MemoryTrace
    step: int
    device: int
    epoch_ns: int
    whole: bool = False

    def span(self) -> tuple[int, int]:
        """The span of what the request means, epoch nanoseconds."""
        return self.window_span() if self.whole else step_span(self.trace, self.step)

    def events(self) -> tuple[int, int]:
        """The first event of what the request means, and the one behind its last."""
        if self.whole:
            return self.trace.step_events(0)[0], self.trace.step_events(len(self.trace.steps) - 1)[1]
        return self.trace.step_events(self.step)

    def window_span(self) -> tuple[int, int]:
        """The whole window's span, epoch nanoseconds."""
        return step_span(self.trace, 0)[0], step_span(self.trace, len(self.trace.steps) - 1)[1]


class Session:
    """What the routes share, for as long as TensorBoard runs."""

    def __init__(self, catalogue: Catalogue, monitored: Monitored, windows: Windows, logdir: str) -> None:
        self.catalogue, self.monitored = catalogue, monitored
        self.windows, self.logdir = windows, logdir
        self._unfolded: OrderedDict[tuple[str, str, str], StepSummary] = OrderedDict()

    def unreadable_files(self) -> list[UnreadableFileError]:
        """Files of ours in the logdir that cannot be read, as far as a quick look and past requests tell."""
        found = self.windows.problems()
        if self.logdir and not files.is_remote(self.logdir):
            found += unreadable_files(self.logdir)
        return found

    def chosen(self, request: Request, prefix: str = "", step: int | None = None) -> Chosen:
        """The step and device that a request names.

        Args:
            request: its parameters begin with `prefix`.
            prefix: "base_" for the other side of a comparison.
            step: takes the place of the parameter.

        Raises:
            NotRecordedError: there is no such step or device.
            MemPluginError: a parameter is absent or wrong.
        """
        number = request.number(f"{prefix}step") if step is None else step
        window = request.number(f"{prefix}window") if request.given(f"{prefix}window") else None
        entry = self.catalogue.find(
            request.ctx,
            request.experiment,
            request.text(f"{prefix}run"),
            request.text(f"{prefix}worker"),
            number,
            window,
        )
        device = request.text(f"{prefix}device", entry.devices[0] if entry.devices else None)
        if device not in entry.devices:
            raise NotRecordedError(
                f"Device {device!r} has no events here.",
                where=f"{prefix}device",
                fix=f"Choose one of: {', '.join(entry.devices)}.",
            )
        return Chosen(entry, device, whole=request.text(f"{prefix}span", "step") == "window")

    def summary(self, request: Request, chosen: Chosen) -> StepSummary:
        """The step's summary; made anew from the window where it had to be shortened. Do not change it."""
        summary = self.catalogue.summary(request.ctx, request.experiment, chosen.entry)
        if not summary.folded:
            return summary
        entry = chosen.entry
        key = (entry.folder, entry.tag, entry.metadata.writer_id)
        if key not in self._unfolded:
            try:
                opened = self.opened(chosen)
            except UnreadableFileError:
                return summary
            self._unfolded[key] = unfolded(opened.trace, entry.metadata)
            while len(self._unfolded) > _UNFOLDED_KEPT:
                self._unfolded.popitem(last=False)
        return self._unfolded[key]

    def device_summary(self, request: Request, chosen: Chosen) -> tuple[StepSummary, DeviceSummary]:
        """The step's summary, and the part of it that concerns the device."""
        summary = self.summary(request, chosen)
        for device in summary.devices:
            if device.name == chosen.device:
                return summary, device
        raise UnreadableFileError(
            "The step's summary lacks the device.", where=chosen.entry.tag, fix="Record it again."
        )

    def opened(self, chosen: Chosen) -> Opened:
        """The step's window in memory.

        Raises:
            UnreadableFileError: its side file is absent or cannot be read.
        """
        trace = self.windows.load(chosen.entry)
        rows = [row for row, device in enumerate(trace.devices) if _same(device.name, chosen.device)]
        if not rows:
            where = self.windows.display(chosen.entry)
            raise UnreadableFileError(
                "The side file is of another window.", where=where, fix="Record the window again."
            )
        step = trace.step_row(chosen.entry.metadata.step)
        return Opened(trace, step, rows[0], chosen.epoch_ns, chosen.whole)


def error_body(error: Exception) -> dict[str, dict[str, str]]:
    """An error as the HTTP API tells it."""
    what, where, fix = (str(getattr(error, part, "")) for part in ("what", "where", "fix"))
    return {"error": {"what": what or f"{type(error).__name__}: {error}", "where": where, "fix": fix}}


def _same(name: str, shown: str) -> bool:
    return name == shown or name.encode("utf-8", "replace").decode() == shown
