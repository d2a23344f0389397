"""What a tracer recorded in addition to an allocator's history: when layers began and ended, and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.trace.notes import HISTORY_FULL, Note

Crossing = tuple[int, int, bool, int]
"""(epoch ns, layer, whether it lies in a backward, thread ident).

The layer is a module's row where its call begins, and -1 - row where it ends. With `BY_AUTOGRAD` or a
negative ident for the thread, it is the row whose backward begins, or `NO_LAYER`: backward runs for one layer
at a time. The negative ident is that of a thread of autograd that has the layer's mark from then on.
"""

BY_AUTOGRAD = 0
"""No thread has this ident."""

NO_LAYER = -1
"""Autograd is between layers, or the backward has ended."""

_CROWDED = (
    "Another tracer ran on another thread meanwhile. The allocator's history does not record threads, so the "
    "figures of layers, {in_layers:,} allocated bytes, may contain what the other's layers allocated."
)
_THREADS = (
    "Layers ran on {threads:,} threads. The allocator's history does not record threads, so what other "
    "threads allocate while a backward runs counts to the layer whose backward it is: up to "
    "{in_backward:,} bytes."
)
_SHARED = (
    "A backward of one thread ran when another thread began its first. One thread of autograd runs both, so "
    "what one of them allocates then may count to a layer whose backward belongs to the other: up to "
    "{in_backward:,} bytes."
)
_INSIDE = (
    "Layers inside compiled or scripted modules have no figures of their own: {:,} of them. What they "
    "allocate, at most {in_layers:,} bytes, counts to the layers around them."
)


@dataclass(frozen=True, slots=True)
class HistoryCalls:
    """What was recorded in addition to an allocator's history. Times are epoch nanoseconds.

    `counted_peak` is the peak in bytes by the allocator's own counter, -1 if that is not known; `is_full`
    is True if the history, which has `entries` entries, overwrote its oldest ones; `phases` are (time,
    name, whether it ends); `unseen` counts the layers inside compiled or scripted modules,
    and `crowded` is True if another tracer ran on another thread meanwhile; `optimizer` are the starts and
    ends of optimizer steps; `requests` is how many allocations and frees the allocator counted, 0 if unknown;
    `has_marks` is whether layers mark what they allocate, and `shared` whether backward passes of several
    threads ran at the same time and were not told apart.
    """

    names: ModuleNames
    device: str
    crossings: Sequence[Crossing]
    phases: Sequence[tuple[int, str, bool]]
    start_ns: int
    stop_ns: int
    counted_peak: int = -1
    is_full: bool = False
    entries: int = 0
    max_events: int = 0
    with_fragmentation: bool = True
    unseen: int = 0
    crowded: bool = False
    optimizer: Sequence[tuple[int, int]] = ()
    requests: int = 0
    has_marks: bool = False
    shared: bool = False

    def threads(self) -> set[int]:
        """Return the idents of the threads that ran layers forward."""
        return {thread for *_, in_backward, thread in self.crossings if not in_backward}

    def notes(self, *, in_layers: int, in_backward: int, kept_peak: int) -> list[Note]:
        """Return what the figures of layers cannot tell.

        Args:
            in_layers: the bytes that were allocated in layers.
            in_backward: those of them that were allocated in their backward.
            kept_peak: the highest live bytes of the entries that were kept.
        """
        notes: list[Note] = []
        if self.unseen:
            notes.append(
                Note(_INSIDE.format(self.unseen, in_layers=in_layers), "layers_in_compiled", in_layers)
            )
        if self.crowded:
            notes.append(Note(_CROWDED.format(in_layers=in_layers), "other_tracer", in_layers))
        if self.shared:
            notes.append(Note(_SHARED.format(in_backward=in_backward), "shared_backward", in_backward))
        by_time = any(layer >= 0 and thread == BY_AUTOGRAD for _, layer, _, thread in self.crossings)
        if by_time and (threads := len(self.threads())) > 1:
            text = _THREADS.format(threads=threads, in_backward=in_backward)
            notes.append(Note(text, "layers_on_threads", in_backward))
        return notes + ([self._overwritten(kept_peak)] if self.is_full else [])

    def _overwritten(self, kept_peak: int) -> Note:
        peak = (
            f"The peak of {self.counted_peak:,} bytes comes from the allocator's own counter."
            if self.counted_peak >= 0
            else (
                f"The peak of {kept_peak:,} bytes is that of the entries that were kept: the allocator's "
                "counter was higher before the block."
            )
        )
        room = (
            f"{self.entries:,} entries (the limit that was set when it was turned on before the block)"
            if 0 < self.entries < self.max_events
            else f"{self.max_events:,} entries (max_events)"
        )
        return Note(
            f"The history holds {room} and overwrote older ones, so the figures of layers count only the "
            f"entries that were kept, which reach {kept_peak:,} live bytes. {peak}",
            HISTORY_FULL,
            kept_peak,
        )
