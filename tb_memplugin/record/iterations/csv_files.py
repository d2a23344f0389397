"""Iterations as two CSV files for data frames: one row per iteration; one row per weight and iteration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.csv import cell
from tb_memplugin.record.iterations.figures import PARTS, IterationMemory
from tb_memplugin.store.paths import folder_name

DEFAULT_FOLDER = "memory_csv_data"

ITERATION_COLUMNS = (
    "step",
    "epoch",
    "iteration",
    "devices",
    "peak_cached_bytes",
    "peak_cached_is_exact",
    "cached_bytes",
    "peak_allocated_bytes",
    "peak_allocated_is_exact",
    "allocated_bytes",
    "feature_map_bytes",
    "weight_bytes",
    "gradient_bytes",
    "intermediate_gradient_bytes",
    "traced_peak_bytes",
    *(f"at_peak_{part.replace(' ', '_')}_bytes" for part in PARTS),
    "untraced_peak_bytes",
    "seconds",
)
"""The columns of `<worker>.iterations.csv`. The `at_peak_` columns sum to `traced_peak_bytes`. Unknown values
are empty cells. A peak whose `_is_exact` is False is a lower bound."""

WEIGHT_COLUMNS = (
    "step",
    "epoch",
    "iteration",
    "name",
    "bytes",
    "gradient_bytes",
    "shape",
    "dtype",
    "device",
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
        self._folder, self._worker = Path(folder), folder_name(worker)
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._ends: list[int] = []
        self._is_torn = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
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
                first = _new(self._folder / f"{start}.iterations.csv")
            except FileExistsError:
                continue
            files = [first]
            try:
                files.append(_new(self._folder / f"{start}.weights.csv"))
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
        raise FileExistsError(17, "too many files of this name", str(self._folder))


def _new(path: Path) -> BinaryIO:
    return path.open("xb", buffering=0)  # unbuffered, so that a full disk is noticed at once


def _write(file: BinaryIO, text: bytes) -> None:
    while text:
        text = text[file.write(text) :]


def _line(values: Iterable[object]) -> bytes:
    return (",".join(map(_cell, values)) + "\n").encode("utf-8", "backslashreplace")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return cell(value) if isinstance(value, str) else str(value)


def _iteration_row(memory: IterationMemory) -> Sequence[object]:
    traced = memory.traced
    return (
        memory.step,
        memory.epoch,
        memory.iteration,
        " ".join(memory.devices),
        memory.peak_cached_bytes,
        _if_known(memory.cached_is_exact, memory.peak_cached_bytes),
        memory.cached_bytes,
        memory.peak_allocated_bytes,
        _if_known(memory.allocated_is_exact, memory.peak_allocated_bytes),
        memory.allocated_bytes,
        memory.feature_map_bytes,
        memory.weight_bytes,
        memory.gradient_bytes,
        memory.intermediate_gradient_bytes,
        traced.peak_bytes if traced is not None else None,
        *(traced.at_peak[part] if traced is not None else None for part in PARTS),
        memory.untraced_peak_bytes,
        round(memory.seconds, 6),
    )


def _if_known(is_exact: bool, size: int | None) -> bool | None:
    return None if size is None else is_exact


def _weight_rows(memory: IterationMemory) -> Iterable[Sequence[object]]:
    for weight in memory.weights:
        yield (
            memory.step,
            memory.epoch,
            memory.iteration,
            weight.name,
            weight.bytes,
            weight.gradient_bytes,
            "x".join(map(str, weight.shape)),
            weight.dtype,
            weight.device,
            " ".join(weight.aliases),
        )
