"""An allocator with a history, where no GPU is: it keeps what it is told, as torch's keeps what happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tb_memplugin.record.history.allocators import Allocator, Observer
from tests.snapshots import block, segment


@dataclass
class StandIn:
    """The state behind an `Allocator`: `ask` is a request that fails, `note` an entry of the history."""

    device_type: str = "cuda"
    in_use: bool = True
    recording: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=lambda: [segment(block(0x1000, 400))])
    mark: str = ""
    queued: list[Any] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)
    broken: str = ""

    def as_allocator(self, *, observes: bool = True) -> Allocator:
        return Allocator(
            device_type=self.device_type,
            record=self.record,
            snapshot=self.snapshot,
            is_recording=lambda: self.recording,
            is_in_use=lambda: self.in_use,
            when_in_use=lambda call: call() if self.in_use else self.queued.append(call),
            current_device=lambda: 0,
            set_mark=self.set_mark,
            mark=lambda: self.mark,
            observe=self.observers.append if observes else None,
        )

    def record(self, enabled: str | None = "all", max_entries: int = 0, stacks: str = "all") -> None:
        if self.broken == "record":
            raise RuntimeError("no history here")
        self.recording = enabled is not None
        self.settings = {"max_entries": max_entries, "stacks": stacks}
        if not self.recording:
            self.entries = []

    def snapshot(self) -> dict[str, Any]:
        if self.broken == "snapshot":
            raise MemoryError("the host is full too")
        return {"segments": list(self.segments), "device_traces": [list(self.entries)]}

    def set_mark(self, mark: str) -> None:
        self.mark = mark

    def come_into_use(self) -> None:
        self.in_use = True
        for call in self.queued:
            call()

    def note(self, action: str, address: int, size: int, time_us: int) -> None:
        if self.recording:
            place = {"device_free" if action == "oom" else "addr": address}
            self.entries.append(
                {"action": action, **place, "size": size, "stream": 0, "frames": [], "time_us": time_us}
            )

    def ask(self, size: int, *, device: int = 0, time_us: int = 0) -> None:
        """A request that fails: the entry, the observers, and then torch's error."""
        import torch

        self.note("oom", 100, size, time_us)
        for observer in self.observers:
            observer(device, size, 1000, 100)
        raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes.")
