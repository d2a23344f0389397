"""`tb-memplugin check`: every kind of base against every kind of new, in every layout, division and limit.

A program keeps 300 bytes of `model.py:7`, in a larger form 999, and 90 bytes come and go. An estimate is of a
linear layer without a bias.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from tb_memplugin.analysis.units import size_text
from tb_memplugin.commands.check import LAYOUTS
from tb_memplugin.commands.divisions import shown_key
from tb_memplugin.store.writer import RunWriter
from tests.commands.files import refused, run, step_snapshot, told, write
from tests.traces import trace

KEPT = {"small": 300, "large": 999}
MODELS = """
import torch


def small():
    return torch.nn.Linear(64, 64, bias=False), torch.zeros(1, 64)


def large():
    return torch.nn.Linear(64, 128, bias=False), torch.zeros(1, 64)
"""


def recording(folder: Path, size: str) -> Path:
    lines = (
        f"alloc {KEPT[size]} a device=cuda:0 module=net category=parameter",
        "alloc 90 b device=cuda:0 module=head category=gradient",
        "free b",
    )
    RunWriter(str(folder), "rank0").write(trace("step 0", *lines))
    return folder


def snapshot(path: Path, size: str) -> Path:
    return write(path, step_snapshot(KEPT[size]))


Files = dict[tuple[str, str], list[Path]]
"""The paths by kind and size."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The paths of each kind of a program, by size."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "models.py").write_text(MODELS)
    paths: Files = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        patched.chdir(folder)
        for size in KEPT:
            paths["recording", size] = [recording(folder / f"run-{size}", size)]
            paths["snapshot", size] = [snapshot(folder / f"{size}.pickle", size)]
            estimate = folder / f"estimate-{size}"
            result = run("estimate", f"models:{size}", "--gpu", "h100", "--logdir", estimate)
            assert result.exit_code == 0, result.output
            paths["estimate", size] = [estimate]
            lock = folder / f"{size}.lock"
            assert run("check", *paths["recording", size], "--write", lock).exit_code == 0
            paths["lock", size] = [lock]
            lower = recording(folder / f"run-{size}-again", size)
            paths["several", size] = [lower, *paths["recording", size]]
    return paths


BASES, NEWS = (
    ("recording", "snapshot", "estimate", "lock", "several"),
    ("recording", "snapshot", "estimate", "lock"),
)
BY = (None, "category", "module", "line")


def peak_of(files: Files, kind: str, size: str) -> int:
    """The peak in bytes: of a program, by hand; of an estimate, as the command `peak` has it."""
    if kind != "estimate":
        return KEPT[size] + 90
    (device,) = told("peak", *files[kind, size])["devices"]
    peak: int = device["peak_bytes"]
    return peak


def parts_of(files: Files, kind: str, size: str, by: str) -> dict[str, int]:
    """The parts of the peak, as the command `peak` has them. A lock and several runs are of a recording."""
    kind = "recording" if kind in ("lock", "several") else kind
    (device,) = told("peak", *files[kind, size], "--by", by, "--top", "0")["devices"]
    return {part["key"]: part["bytes"] for part in device["breakdown"]}


@pytest.mark.parametrize("new", NEWS)
@pytest.mark.parametrize("base", BASES)
def test_the_exit_code_is_that_of_the_bytes(files: Files, base: str, new: str) -> None:
    for before, after in (("small", "large"), ("large", "small"), ("small", "small")):
        low, high = peak_of(files, base, before), peak_of(files, new, after)
        paths = (*files[base, before], *files[new, after])
        for limit, allowed in (
            ("0", 0),
            ("50%", low // 2),
            (str(max(high - low, 0)), max(high - low, 0)),
            (f"{max(high - low - 1, 0)}B", max(high - low - 1, 0)),
        ):
            result = run("check", *paths, "--fail-above", limit)
            assert result.exit_code == (high - low > allowed), (limit, result.output)
            assert ("ABOVE" in result.stdout) == (high - low > allowed)


@pytest.mark.parametrize("new", NEWS)
@pytest.mark.parametrize("base", BASES)
def test_each_division_and_layout_names_what_grew(files: Files, base: str, new: str) -> None:
    low, high = peak_of(files, base, "small"), peak_of(files, new, "large")
    for by in BY:
        options = ("check", *files[base, "small"], *files[new, "large"], *(["--by", by] if by else []))
        (device,) = json.loads(run(*options, "--format", "json").stdout)["devices"]
        assert (device["device"], device["base_bytes"], device["bytes"]) == ("cuda:0", low, high)
        assert device["delta_bytes"] == high - low == sum(row["delta_bytes"] for row in device["rows"])
        if by in ("category", "module"):
            before, after = parts_of(files, base, "small", by), parts_of(files, new, "large", by)
            assert {row["key"]: row["delta_bytes"] for row in device["rows"] if row["delta_bytes"]} == {
                key: size for key in {**before, **after} if (size := after.get(key, 0) - before.get(key, 0))
            }
        grown = max(device["rows"], key=lambda row: row["delta_bytes"])
        name = shown_key(grown["key"])
        for layout in LAYOUTS:
            result = run(*options, "--format", layout)
            assert result.exit_code == int(high > 1.02 * low), (layout, result.output)
            if layout != "json" and high > low:
                assert f"+{size_text(grown['delta_bytes'])}" in result.stdout
                assert name in html.unescape(result.stdout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_grew_where_the_peak_fell(files: Files, layout: str) -> None:
    """Another module of 90 bytes in place of 999: the peak fell, whatever is new in it."""
    result = run("check", *files["recording", "large"], *files["snapshot", "small"], "--format", layout)
    assert result.exit_code == 0
    assert "head" not in result.stdout or layout == "json"
    assert "Grew" not in result.stdout


def unreadable(folder: Path) -> dict[str, Path]:
    """Files and folders without a peak."""
    (folder / "empty").touch()
    (folder / "empty folder").mkdir()
    (folder / "broken.pickle").write_bytes(b"\x80\x04broken")
    (folder / "broken.json").write_text('{"traceEvents": [')
    (folder / "broken.lock").write_text('{"tb_memplugin_memory_lock": 1}')
    RunWriter(str(folder / "on the CPU"), "rank0").write(trace("step 0", "alloc 1 a"))
    write(folder / "no steps.pickle", {"segments": [], "device_traces": []})
    recording(folder / "cut", "small")
    for path in (folder / "cut").rglob("*.*"):
        path.write_bytes(path.read_bytes()[:40])
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_such_peak_cannot_be_compared(files: Files, tmp_path: Path, layout: str) -> None:
    (good,) = files["recording", "small"]
    paths = [*unreadable(tmp_path).values(), tmp_path / "absent"]
    for path in paths:
        for pair in ((good, path), (path, good)):
            message = refused("check", *pair, "--format", layout)
            assert "error: " in message, message
            assert "\n  fix: " in message, message
