"""What runs on the stand-in: the user's program, in a process of its own, until it has stepped often enough.

`python -m tb_memplugin.dryrun.program FOLDER` reads `Request` from `request.json` in the folder, and writes
`Outcome` to `outcome.json` and the allocator's history to `history.pickle`.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import pickle
import shutil
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch

from tb_memplugin.dryrun.values import Values
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.script import (
    Program,
    StartsRanks,
    as_one_rank,
    import_libraries,
    run_program,
)
from tb_memplugin.estimate.program.saved_files import Checkpoints
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.record.history.allocators import SWITCH, Allocator, allocators
from tb_memplugin.record.torch_private.allocators import RECORD_HISTORY

REQUEST, OUTCOME, HISTORY = "request.json", "outcome.json", "history.pickle"
MOST_ENTRIES = 20_000_000
"""The largest number of entries of the allocator's history."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to run: the fields of a `Program`, the steps and seconds that end it, hints, and its rank."""

    program: dict[str, Any]
    steps: int
    limit_s: int
    hints: dict[str, Any] | None = None
    rank: int = 0

    @property
    def words(self) -> Program:
        """The program."""
        return Program(**{**self.program, "arguments": tuple(self.program["arguments"])})


@dataclass(slots=True)
class Outcome:
    """How a program went.

    Attributes:
        why: one sentence on why it ended; "" if it failed.
        notes: sentences for the reader of the report.
        allocated, reserved: the allocator's own peaks, in bytes, by device, since the program reset them.
        error: what a `MemPluginError` says, where the program failed.
        starts_ranks: where the program makes itself one of several ranks, how many; it has to run as such.
    """

    steps: int = 0
    why: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    starts_ranks: int = 0

    def note(self, sentence: str) -> None:
        """Add a note, unless it is there already."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def step(self) -> None:
        """Do nothing at the end of an optimizer's step, which `run_program` counts."""


def run(request: Request, folder: Path) -> Outcome:
    """Run a program in this process, and write the allocator's history of it."""
    outcome, patches = Outcome(), Patches()
    recorded = allocators()
    import_libraries()
    values = Values(request.hints, outcome.note)
    for allocator in recorded:
        allocator.when_in_use(partial(_turn_on, allocator))
        allocator.when_in_use(values.watch_allocations)
    _keep_history(patches, outcome)
    checkpoints = Checkpoints(
        outcome.note, values.copied, values.kept, lambda: True, folder.parent, request.rank
    )
    checkpoints.apply(patches)
    values.start(patches)
    began = monotonic()
    try:
        with as_one_rank(request.words, request.rank):  # the report is of the rank that reserves the most
            ending = run_program(
                request.words,
                outcome,
                steps=request.steps,
                limit_s=request.limit_s,
                rank=request.rank,
                where="on the stand-in",
            )
        outcome.why, outcome.steps = ending.why, ending.steps
    except MemPluginError as error:
        outcome.error = {"what": error.what, "where": error.where, "fix": error.fix}
    except StartsRanks as begun:
        outcome.starts_ranks = begun.ranks
    outcome.seconds = monotonic() - began
    values.note_what_is_not_counted()
    checkpoints.remove_files()
    _write_history(recorded, outcome, folder)
    return outcome


def _turn_on(allocator: Allocator) -> None:
    SWITCH.on(allocator, max_entries=MOST_ENTRIES)


def _keep_history(patches: Patches, outcome: Outcome) -> None:
    """Leave the history on where the program turns it on or off: the report is made from it."""

    def left_on(*_: Any, **__: Any) -> None:
        outcome.note(
            "In a dry run the allocator's history is on, with Python stacks, whatever the program sets."
        )

    patches.set(torch.cuda.memory, RECORD_HISTORY, left_on)


def _write_history(recorded: tuple[Allocator, ...], outcome: Outcome, folder: Path) -> None:
    for allocator in recorded:
        if not allocator.is_in_use():
            continue
        for device in range(torch.cuda.device_count()):
            outcome.allocated.append(torch.cuda.max_memory_allocated(device))
            outcome.reserved.append(torch.cuda.max_memory_reserved(device))
        with (folder / HISTORY).open("wb") as file:
            pickle.dump(allocator.snapshot(), file)


def _end_with(parent: int) -> None:
    """End this process once the one that started it is gone."""
    while os.getppid() == parent:
        sleep(1)
    os._exit(1)


def main() -> None:
    """Run what the folder in `sys.argv` asks for."""
    folder = Path(sys.argv[1])
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = Request(**json.loads((folder / REQUEST).read_text("utf-8")))
    outcome = run(request, folder)
    (folder / OUTCOME).write_text(json.dumps(asdict(outcome)), "utf-8")
    shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of the program, and for ranks that have ended


if __name__ == "__main__":
    main()
