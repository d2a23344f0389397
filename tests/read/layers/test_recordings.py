"""Recordings whose entries name their modules: without the names, the same modules are found."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.moments import peak
from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import Category, Kind, MemoryTrace
from tests.read.test_recordings import DATA, LABELLED
from tests.snapshots import load_plain

FORWARD_OF_BLOCK = "return x + self.down"


def _snapshot(version: str) -> dict[str, Any]:
    packed = (DATA / f"torch-{version}" / "training.pickle.gz").read_bytes()
    content: Any = load_plain(gzip.decompress(packed), "training")
    assert isinstance(content, dict)
    return content


def _source(folder: Path, line: int) -> Path:
    """The models of the program that recorded, with the forward of `Block` in a line."""
    text = (DATA / "record.py").read_text(encoding="utf-8")
    models = text[text.index("class Block") : text.index("class Marks")].split("\n")
    before = next(row for row, code in enumerate(models) if FORWARD_OF_BLOCK in code)
    file = folder / "record.py"
    file.write_text("\n" * (line - 1 - before) + "\n".join(models), encoding="utf-8")
    return file


CONTEXTS = ("all", "alloc")
"""What PyTorch records stacks of. The recordings have all; with the second, a free has its allocation's."""


def _without_names(version: str, folder: Path, context: str = "all") -> MemoryTrace:
    """The recording as if nobody had named modules, on a machine that has the source."""
    snapshot = _snapshot(version)
    entries = snapshot["device_traces"][0]
    if context == "alloc":
        stack: dict[int, Any] = {}
        for entry in entries:
            if entry["action"] == "alloc":
                stack[entry["addr"]] = entry["frames"]
            elif entry["action"].startswith("free") and entry["addr"] in stack:
                entry["frames"] = stack[entry["addr"]]
    frames = [
        frame for entry in entries for frame in entry.get("frames", ()) if frame["filename"] == "record.py"
    ]
    source = _source(folder, min(frame["line"] for frame in frames if frame["name"] == "forward"))
    for frame in frames:
        if frame["name"] == "forward":
            frame["filename"] = str(source)
    for entry in entries:
        entry["user_metadata"] = ""
    return with_inferred_layers(trace_from_snapshot(snapshot, "training"))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("version", LABELLED)
def test_forwards_have_the_names_that_the_program_gave(version: str, context: str, tmp_path: Path) -> None:
    named = trace_from_snapshot(_snapshot(version), "training")
    inferred = _without_names(version, tmp_path, context)
    events = named.events
    in_modules = (events.kind == Kind.ALLOC) & (events.module > 0) & (events.category == Category.ACTIVATION)
    assert events.bytes[in_modules].sum() > 100 << 20
    for event in in_modules.nonzero()[0].tolist():
        assert inferred.modules[inferred.events.module[event]].key == named.modules[events.module[event]].key


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("version", LABELLED)
@pytest.mark.parametrize("category", [Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE])
def test_what_a_module_keeps_has_the_bytes_of_its_parameters(
    version: str, tmp_path: Path, category: Category, context: str
) -> None:
    trace = _without_names(version, tmp_path, context)
    blocks, end = trace.allocations, len(trace.events) - 1
    if category == Category.GRADIENT:  # all are freed when the step is over
        end = int(blocks.born[(blocks.category == category) & (blocks.born >= 0)].max())
    held: Counter[str] = Counter()
    for row in blocks.alive_at(end, 0).tolist():
        if blocks.category[row] == category:
            held[trace.modules[blocks.module[row]].key] += int(blocks.bytes[row])
    width, words, each = 256, 1000, 4 * (1 + (category == Category.OPTIMIZER_STATE))
    linear = {"up": 4 * width * width + 4 * width, "down": 4 * width * width + width, "norm": 2 * width}
    wanted = {f"blocks.{block}.{name}": each * count for block in (0, 1) for name, count in linear.items()}
    wanted |= {"embed": each * words * width, "head": each * (words * width + words)}
    assert {key: size for key, size in held.items() if key != "(not named)"} == wanted
    assert sum(held.values()) - sum(wanted.values()) in range(1000)  # the counts of steps are nobody's


def _broken(stack: list[dict[str, Any]], rng: Random) -> list[dict[str, Any]]:
    """Return a stack with frames left out, repeated, in another order, or with other names and lines."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(stack))
        inserted = rng.choice(stack)
        stack = rng.choice(
            (
                stack[:at] + stack[at + 1 :] or stack,
                [*stack[:at], inserted, *stack[at:]],
                rng.sample(stack, len(stack)),
                stack[: at + 1],
                stack[at:],
                [*stack, *stack[:at]],
                [*stack[:at], {**stack[at], "name": rng.choice(FUNCTIONS)}, *stack[at + 1 :]],
                [*stack[:at], {**stack[at], "line": rng.choice((-1, 0, 10**6))}, *stack[at + 1 :]],
            )
        )
    return stack


FUNCTIONS = ("forward", "_call_impl", "_wrapped_call_impl", "__init__", "<module>", "step", "_apply", "apply")


@pytest.mark.parametrize("seed", range(12))
def test_broken_stacks_keep_every_byte(seed: int) -> None:
    rng, snapshot = Random(seed), _snapshot("2.13.0")
    share = (0.02, 0.3, 1.0)[seed % 3]
    for entry in (entry for entries in snapshot["device_traces"] for entry in entries):
        entry.pop("user_metadata", None)
        if entry.get("frames") and rng.random() < share:
            entry["frames"] = _broken(entry["frames"], rng)
    trace = trace_from_snapshot(snapshot, "broken")
    found = with_inferred_layers(trace, read_text=False)
    assert with_inferred_layers(found) is found
    moment = peak(trace)
    device = [one.name for one in trace.devices].index(moment.device)
    assert sum(part.bytes for part in breakdown(found, device, moment.event, "module")) == moment.bytes
    assert found.events.bytes.tolist() == trace.events.bytes.tolist()
