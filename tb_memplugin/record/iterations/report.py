"""`IterationReport`: the memory of every iteration, or every n-th, of a training loop.

It writes two CSV files for data frames: one row per iteration; one row per weight and iteration.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.errors import MemPluginError, fix_of
from tb_memplugin.exports.csv import cell
from tb_memplugin.exports.terminal import printable
from tb_memplugin.logs import instance_logger
from tb_memplugin.record.arguments import (
    Optimizers,
    at_least_one,
    checked_model,
    checked_optimizers,
    default_worker_name,
    referents,
)
from tb_memplugin.record.guard import Ending, Guard, call_all, guarded
from tb_memplugin.record.iterations.figures import (
    PARTS,
    IterationMemory,
    IterationWatch,
    Observation,
    TracedMemory,
    compiled_modules,
    iteration_memory,
)
from tb_memplugin.record.iterations.weights import WeightMemory
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.torch_private.modules import modules_in
from tb_memplugin.store.paths import folder_name
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import MemoryTrace, Note, Step

DEFAULT_FOLDER = "memory_csv_data"


def _at_peak_column(part: str) -> str:
    return f"at_peak_{part.replace(' ', '_')}_bytes"


ITERATION_COLUMNS = (
    *("step", "epoch", "iteration", "devices", "peak_cached_bytes", "peak_cached_is_exact", "cached_bytes"),
    *("peak_allocated_bytes", "peak_allocated_is_exact", "allocated_bytes", "feature_map_bytes"),
    *("weight_bytes", "gradient_bytes", "intermediate_gradient_bytes", "traced_peak_bytes"),
    *map(_at_peak_column, PARTS),
    *("untraced_peak_bytes", "seconds"),
)
"""The columns of `<worker>.iterations.csv`. The `at_peak_` columns sum to `traced_peak_bytes`. Unknown values
are empty cells. A peak whose `_is_exact` is False is a lower bound."""

WEIGHT_COLUMNS = (
    *("step", "epoch", "iteration", "name", "bytes", "gradient_bytes", "shape", "dtype", "device"),
    "aliases",
)
"""The columns of `<worker>.weights.csv`. Shapes are written `4x3`; aliases are separated by blanks."""

_MOST_NAMES = 10_000


class IterationCsv:
    """The two files of one report. They are created with the first iteration; existing files are kept.

    Args:
        folder: where to create the files; created if it does not exist.
        worker: the beginning of their names; `<worker>.2` and so on if such files exist.

    Raises:
        MemPluginError: the folder cannot be created, or is not writable.
    """

    def __init__(self, folder: str | os.PathLike[str], worker: str) -> None:
        self.folder, self._worker = Path(folder), folder_name(worker)
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._ends: list[int] = []
        self._is_torn = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(13, "it may not be written to")
        except OSError as error:
            raise MemPluginError(
                f"The folder for CSV files cannot be used: {error.strerror or error}.",
                where=f"csv={os.fspath(folder)}",
                fix="Give a folder that this process can write to, or csv=True for ./memory_csv_data/.",
            ) from error

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of the files; empty before they are created."""
        return tuple(Path(file.name) for file in self._files) if self._files is not None else ()

    def write(self, memory: IterationMemory) -> None:
        """Append an iteration to both files; to neither if it raises OSError (the disk is full, say)."""
        if self._files is None:
            self._files = self._make()
            self._ends = [file.tell() for file in self._files]
        rows = _line(_iteration_row(memory)), b"".join(map(_line, _weight_rows(memory)))
        self._take_back()
        try:
            for file, more in zip(self._files, rows, strict=True):
                self._is_torn = True
                _write(file, more)
        except OSError:
            with suppress(OSError):  # the next call tries again, before it writes
                self._take_back()
            raise
        self._ends, self._is_torn = [file.tell() for file in self._files], False

    def _take_back(self) -> None:
        """Cut what an iteration wrote that could not be written to both files."""
        if self._is_torn and self._files is not None:
            for file, end in zip(self._files, self._ends, strict=True):
                file.seek(end)
                file.truncate()
            self._is_torn = False

    def close(self) -> None:
        """Close the files."""
        with ExitStack() as stack:
            for file in self._files or ():
                stack.callback(file.close)
            with suppress(OSError):
                self._take_back()

    def _make(self) -> tuple[BinaryIO, BinaryIO]:
        for number in range(1, _MOST_NAMES):
            start = self._worker if number == 1 else f"{self._worker}.{number}"
            try:
                first = _new(self.folder / f"{start}.iterations.csv")
            except FileExistsError:
                continue
            files = [first]
            try:
                files.append(_new(self.folder / f"{start}.weights.csv"))
                _write(first, _line(ITERATION_COLUMNS))
                _write(files[1], _line(WEIGHT_COLUMNS))
            except OSError as error:
                for file in files:
                    with suppress(OSError):
                        file.close()
                    with suppress(OSError):
                        Path(file.name).unlink(missing_ok=True)
                if isinstance(error, FileExistsError):
                    continue
                raise
            return first, files[1]
        raise FileExistsError(17, "too many files of this name", str(self.folder))


def _new(path: Path) -> BinaryIO:
    return path.open("xb", buffering=0)  # unbuffered, so that a full disk is noticed at once


def _write(file: BinaryIO, text: bytes) -> None:
    while text:
        text = text[file.write(text) :]


def _line(values: Iterable[object]) -> bytes:
    return (",".join(map(cell, values)) + "\n").encode("utf-8", "backslashreplace")


def _iteration_row(memory: IterationMemory) -> Sequence[object]:
    traced = memory.traced
    cells = {
        "devices": " ".join(memory.devices),
        "peak_cached_is_exact": _if_known(memory.cached_is_exact, memory.peak_cached_bytes),
        "peak_allocated_is_exact": _if_known(memory.allocated_is_exact, memory.peak_allocated_bytes),
        "traced_peak_bytes": traced and traced.peak_bytes,
        **{_at_peak_column(part): traced and traced.at_peak[part] for part in PARTS},
        "seconds": round(memory.seconds, 6),
    }
    return [cells[name] if name in cells else getattr(memory, name) for name in ITERATION_COLUMNS]


def _if_known(is_exact: bool, size: int | None) -> bool | None:
    return None if size is None else is_exact


def _weight_rows(memory: IterationMemory) -> Iterable[Sequence[object]]:
    for weight in memory.weights:
        shape, aliases = "x".join(map(str, weight.shape)), " ".join(weight.aliases)
        own = {**asdict(weight), "shape": shape, "aliases": aliases}
        yield [own[name] if name in own else getattr(memory, name) for name in WEIGHT_COLUMNS]


UNKNOWN = "not known"
_LONGEST = 120


def show(memory: IterationMemory, console: Console, max_weights: int, notes: Sequence[str] = ()) -> None:
    """Print an iteration.

    Args:
        max_weights: how many of the largest weights to show, in the model's order; the others share one row.
    """
    head = f"Iteration {memory.iteration} of epoch {memory.epoch}, {', '.join(memory.devices)}"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(_totals(memory))
    if memory.weights:
        console.print(_weights(memory, max_weights))
    if memory.traced is not None:
        console.print(Text(_at_peak(memory.traced)))
    for note in notes:
        console.print(Text(f"note: {printable(note)}", style="dim"))
    console.print()


def size(count: int | None) -> str:
    """Return bytes as text: `48 B`, `12.50 MiB`; `UNKNOWN` for None."""
    return UNKNOWN if count is None else size_text(count)


def _peak(count: int | None, is_exact: bool) -> str:
    return size(count) if is_exact or count is None else f"≥ {size(count)}"


def _totals(memory: IterationMemory) -> Table:
    table = _table("", "peak", "now")
    cached = "cached" if memory.has_cache else "cached (no cache on this device: same as allocated)"
    rows: Sequence[tuple[str, str, str]] = (
        (cached, _peak(memory.peak_cached_bytes, memory.cached_is_exact), size(memory.cached_bytes)),
        (
            "allocated",
            _peak(memory.peak_allocated_bytes, memory.allocated_is_exact),
            size(memory.allocated_bytes),
        ),
        ("feature maps", size(memory.feature_map_bytes), ""),
        ("intermediate gradients", size(memory.intermediate_gradient_bytes), ""),
        ("weights", "", size(memory.weight_bytes)),
        ("weight gradients", "", size(memory.gradient_bytes)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _weights(memory: IterationMemory, most: int) -> Table:
    table = _table("weight", "bytes", "gradient")
    largest = sorted(memory.weights, key=lambda weight: -max(weight.bytes, weight.gradient_bytes))[:most]
    shown = {weight.name for weight in largest}
    rest = [weight for weight in memory.weights if weight.name not in shown]
    for weight in memory.weights:
        if weight.name in shown:
            table.add_row(
                Text(printable(_name(weight), _LONGEST)), size(weight.bytes), size(weight.gradient_bytes)
            )
    if rest:
        sums = sum(weight.bytes for weight in rest), sum(weight.gradient_bytes for weight in rest)
        table.add_row(f"{len(rest):,} smaller weights", *map(size, sums))
    return table


def _name(weight: WeightMemory) -> str:
    return weight.name if not weight.aliases else f"{weight.name} (also {', '.join(weight.aliases)})"


def _at_peak(traced: TracedMemory) -> str:
    parts = sorted(traced.at_peak.items(), key=lambda part: -part[1])
    breakdown = ", ".join(f"{name} {size(count)}" for name, count in parts if count)
    return f"at the peak of {size(traced.peak_bytes)} in tensors: {breakdown or 'nothing'}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=bool(number))
    return table


SOURCE = "IterationReport"
_KEPT = 1_000
_LOST = "An iteration is not reported"


class IterationReport:
    """Reports memory every `print_period`-th iteration in the console, in CSV files and in the Memory tab.

    Create it right before the loop. Call `record_stats()` at the end of each iteration and `epoch_end()` at
    the end of each epoch. An iteration goes from one `record_stats()` to the next; the first one of a later
    epoch begins with the first call of the model or of one of its modules. Iterations that are not reported
    are not observed.

    Args:
        model: the model; only a weak reference is kept, so it may change or be deleted.
        print_period: report every iteration of an epoch whose number (from 1) is a multiple of this.
        csv: True writes CSV files to `./memory_csv_data/`, a path to that folder.
        optimizer: one or several optimizers, to know their state from the start. Weak references are kept.
        logdir: write the reported iterations for the Memory tab of `tensorboard --logdir <logdir>`.
        worker_name: name of this process in `logdir` and in the names of CSV files.
        console: where to print; None means standard output.
        max_weights: how many of the largest weights to print; CSV files contain all.
        log_level: level of this report's own messages, a name or number. None means that of the package.

    Raises:
        TypeError: an argument has the wrong type.
        MemPluginError: `print_period` or `max_weights` is below 1, the folder for CSV files cannot be used,
            or `log_level` is no level.

    Example:
        >>> report = IterationReport(model, print_period=5, csv=True)
        >>> for epoch in range(epochs):
        ...     for batch in loader:
        ...         train_step(batch)
        ...         report.record_stats()
        ...     report.epoch_end()
    """

    def __init__(
        self,
        model: nn.Module,
        print_period: int = 1,
        csv: bool | str | os.PathLike[str] = False,
        *,
        optimizer: Optimizers = None,
        logdir: str | os.PathLike[str] | None = None,
        worker_name: str | None = None,
        console: Console | None = None,
        max_weights: int = 60,
        log_level: int | str | None = None,
    ) -> None:
        if worker_name is not None and not isinstance(worker_name, str):
            raise TypeError(f"worker_name is a {type(worker_name).__name__}; give text")
        self._logger = instance_logger(log_level)
        self._model = weakref.ref(checked_model(model))
        self._optimizers = [weakref.ref(checked) for checked in checked_optimizers(optimizer)]
        self.print_period = at_least_one("print_period", print_period, "IterationReport")
        self._max_weights = at_least_one("max_weights", max_weights, "IterationReport")
        self._console = console or Console(markup=False, highlight=False, emoji=False)
        worker = worker_name or default_worker_name()
        self._csv = IterationCsv(folder, worker) if (folder := _folder(csv)) is not None else None
        self._guard = Guard(_LOST, self._logger)
        self._writer = None if logdir is None else RunWriter(os.fspath(logdir), worker, self._guard.end_flush)
        self._kept: deque[IterationMemory] = deque(maxlen=_KEPT)
        self._lock = threading.RLock()
        self._slot = _Slot(self._guard)
        self._shown_notes: set[str] = set()
        self._is_closed = False
        self.epoch, self.iteration, self.step = 1, 0, 0
        self._end = Ending(self, self._slot.clear, self._guard.end, "the end of IterationReport")
        self._watch_next()

    @property
    def iterations(self) -> list[IterationMemory]:
        """The last reported iterations, oldest first, at most 1,000."""
        return list(self._kept)

    @guarded("IterationReport.record_stats")
    def record_stats(self) -> IterationMemory | None:
        """End an iteration and return its figures, None if it is not reported. Never raises."""
        with self._lock:
            if self._is_closed:
                self._warn("closed", "record_stats() was called after close(): nothing is reported.")
                return None
            self.iteration += 1
            self.step += 1
            memory = None
            if not self.iteration % self.print_period:
                memory = self._safely(self._report)
            self._watch_next()
            return memory

    @guarded("IterationReport.epoch_end")
    def epoch_end(self) -> None:
        """End an epoch: iterations restart at 1. What ran since the last `record_stats()` is not reported."""
        with self._lock:
            if self._is_closed:
                return
            self._slot.clear()
            self._safely(self._print_epoch)
            self.epoch, self.iteration = self.epoch + 1, 0
            if self.print_period == 1:
                self._safely(self._wait_for_the_model)

    @guarded("IterationReport.close")
    def close(self) -> None:
        """Stop watching and close the files. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            self._slot.clear()
            if self._csv is not None:
                self._safely(self._csv.close)

    def __enter__(self) -> IterationReport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fail(self, where: str, error: BaseException) -> None:
        """Do not report the running iteration, because of an error. The next one is watched."""
        undo = [self._slot.clear]
        if isinstance(error, Exception) and not self._is_closed:
            undo.append(self._watch_next)
        self._guard.end(where, error, *undo)

    def _watch_next(self) -> None:
        if not (self.iteration + 1) % self.print_period:
            self._safely(lambda: self._slot.watch(self._model(), referents(self._optimizers)))

    def _wait_for_the_model(self) -> None:
        model = self._model()
        if model is None or compiled_modules(model):
            self._watch_next()
        else:
            self._slot.wait(model, self._optimizers)

    def _report(self) -> IterationMemory:
        model, optimizers = self._model(), referents(self._optimizers)
        if not self._slot.is_watching:  # no module was called since the end of the last epoch
            self._slot.watch(model, optimizers)
        began, observation = self._slot.take(model, optimizers)
        memory = iteration_memory(
            model,
            observation,
            step=self.step,
            epoch=self.epoch,
            iteration=self.iteration,
            seconds=perf_counter() - began,
        )
        self._kept.append(memory)
        notes = [note for note in memory.notes if note not in self._shown_notes]
        self._shown_notes.update(notes)
        self._safely(lambda: show(memory, self._console, self._max_weights, notes))
        if self._csv is not None:
            csv = self._csv
            self._safely(lambda: self._write_csv(csv, memory))
        if self._writer is not None and observation.trace is not None:
            self._safely(lambda: self._write(observation, memory))
        return memory

    def _write_csv(self, csv: IterationCsv, memory: IterationMemory) -> None:
        try:
            csv.write(memory)
        except OSError as error:
            raise MemPluginError(
                f"The CSV files of an iteration could not be written: {error.strerror or error}.",
                where=os.fspath(csv.folder),
                fix=fix_of(error, "Give a folder that this process can write to."),
            ) from error

    def _write(self, observation: Observation, memory: IterationMemory) -> None:
        assert self._writer is not None
        assert observation.trace is not None
        self._writer.write(_as_step(observation.trace, memory))

    def _print_epoch(self) -> None:
        mine = [
            memory
            for memory in self._kept
            if memory.epoch == self.epoch and memory.peak_cached_bytes is not None
        ]
        if mine:
            highest = max(mine, key=lambda memory: memory.peak_cached_bytes or 0)
            self._console.print(
                f"Epoch {self.epoch}: {counted(self.iteration, 'iteration')}, {len(mine):,} reported; "
                f"highest cached {size(highest.peak_cached_bytes)} in iteration {highest.iteration}.",
                markup=False,
            )

    def _safely(self, work: Callable[[], Any]) -> Any:
        """Run `work`; end an error in it, so that what else is reported is."""
        try:
            with without_torch_functions():
                return work()
        except BaseException as error:
            if isinstance(error.__context__, BrokenPipeError):  # for which rich raises SystemExit
                error = error.__context__
            loss = "The report of an iteration is not complete"
            self._guard.end("IterationReport", error, self._slot.clear, loss=loss)
            return None

    def _warn(self, kind: str, message: str) -> None:
        self._guard.warn(message, once=kind)


class _Slot:
    """The watch of an iteration, or the hooks that start it at the first call of a module.

    It is cleared when its report is garbage-collected.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._watch: IterationWatch | None = None
        self._began = 0.0
        self._calls = ModuleCalls()

    @property
    def is_watching(self) -> bool:
        return self._watch is not None

    def watch(self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin to watch an iteration."""
        self.clear()
        watch, self._began = IterationWatch(guard=self._guard), perf_counter()
        if model is not None:
            watch.begin(model, optimizers)
        self._watch = watch

    def wait(self, model: nn.Module, optimizers: Sequence[weakref.ref[torch.optim.Optimizer]]) -> None:
        """Begin to watch at the first call of a module."""
        self.clear()
        reference = weakref.ref(model)

        def called(*_: object) -> None:
            root = reference()
            if root is None:
                return
            with without_torch_functions():
                self.watch(root, referents(optimizers))

        for _, module in modules_in(model):
            if not isinstance(module, torch.jit.ScriptModule):
                self._calls.watch(module, called, _ignore, self._fail)

    def take(
        self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[float, Observation]:
        """End the watch and return when it began (`perf_counter`) and what it saw."""
        watch, self._watch = self._watch, None
        assert watch is not None
        try:
            return self._began, watch.end(model, optimizers)
        except BaseException:
            call_all(watch.cancel)
            raise

    def clear(self) -> None:
        """Cancel the watch, and stop waiting for one."""
        watch, self._watch = self._watch, None
        call_all(self._calls.stop, *([] if watch is None else [watch.cancel]))

    def _fail(self, where: str, error: BaseException) -> None:
        self._guard.end(where, error, self.clear)


def _ignore(*_: object) -> None:
    pass


def _as_step(trace: MemoryTrace, memory: IterationMemory) -> MemoryTrace:
    """Return the trace for the tab, with the iteration's number as step and its cache in the notes."""
    note = f"Iteration {memory.iteration} of epoch {memory.epoch}."
    if memory.has_cache:
        note += (
            f" From the allocator: at most {memory.peak_cached_bytes:,} bytes cached, "
            f"{memory.cached_bytes:,} at the end; at most {memory.peak_allocated_bytes:,} allocated. "
            "Views show what tensors held."
        )
    steps = tuple(Step(memory.step, step.start_ns, step.end_ns) for step in trace.steps)
    return replace(trace, source=SOURCE, steps=steps, notes=(Note(note, "iteration"), *trace.notes))


def _folder(csv: Any) -> str | None:
    if isinstance(csv, bool) or csv is None:
        return DEFAULT_FOLDER if csv else None
    if not isinstance(csv, str | os.PathLike):
        raise TypeError(f"csv is a {type(csv).__name__}; give True, False or the path of a folder")
    path = os.fspath(csv)
    if isinstance(path, bytes) or not path or path.endswith(".csv"):
        raise MemPluginError(
            f"csv is {path!r}, which is not a folder name.",
            where="IterationReport",
            fix="Give a folder. Two files are written there: one with iterations, one with weights.",
        )
    return path
