"""`tb-memplugin check`: exit codes, limits, locks. The peak of a step is 90 bytes above what is kept."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tb_memplugin.store.writer import RunWriter
from tests.commands.files import refused, run, step_snapshot, write
from tests.traces import trace


@pytest.fixture
def files(tmp_path: Path) -> dict[int, Path]:
    """Snapshots by their peaks."""
    return {
        peak: write(tmp_path / f"{peak}.pickle", step_snapshot(peak - 90)) for peak in (390, 397, 398, 990)
    }


@pytest.mark.parametrize(
    ("peak", "limit", "code"),
    [
        (390, "0", 0),
        (397, "2%", 0),  # 390 + 2 % = 397.8
        (398, "2%", 1),
        (398, "8", 0),
        (398, "7B", 1),
        (390, "0MiB", 0),
        (397, "0MiB", 1),
        (397, ".5%", 1),
        (990, "1KiB", 0),
    ],
)
def test_the_exit_code_tells_whether_a_peak_is_above_the_limit(
    files: dict[int, Path], peak: int, limit: str, code: int
) -> None:
    assert run("check", files[390], files[peak], "--fail-above", limit).exit_code == code


@pytest.mark.parametrize(
    ("size", "limit", "code"),
    [(129, "29%", 0), (157, "57%", 0), (158, "57%", 1), (158, "57.9%", 1), (158, "58%", 0)],
)
def test_a_peak_that_grew_by_exactly_the_share_is_within_it(
    tmp_path: Path, size: int, limit: str, code: int
) -> None:
    """In binary fractions, 29 % of 100 are less than 29."""
    for name, kept in (("base", 100), ("new", size)):
        RunWriter(str(tmp_path / name), "rank0").write(trace("step 0", f"alloc {kept} a"))
    assert run("check", tmp_path / "base", tmp_path / "new", "--fail-above", limit).exit_code == code


def test_what_is_less_is_within(files: dict[int, Path]) -> None:
    result = run("check", files[990], files[390])
    assert result.exit_code == 0
    assert result.stdout == "cuda:0: peak 390 B, base 990 B: -600 B (-60.61 %), within the limit of 2%\n"


def test_what_grew_is_named(files: dict[int, Path]) -> None:
    result = run("check", files[390], files[990], "--by", "line")
    assert result.stdout.splitlines() == [
        "cuda:0: peak 990 B, base 390 B: +600 B (+153.85 %), ABOVE the limit of 2%",
        "  line model.py:7 (forward): +600 B",
    ]


def test_repeated_layers_that_grew_are_one_part_and_a_single_one_has_its_name(tmp_path: Path) -> None:
    for name, layer, expert in (("base", 10, 10), ("new", 15, 17)):
        lines = (
            f"alloc {layer} a module=layers.0.mlp",
            f"alloc {layer} b module=layers.1.mlp",
            "alloc 10 c module=experts.0.up",
            f"alloc {expert} d module=experts.1.up",
        )
        RunWriter(str(tmp_path / name), "rank0").write(trace("step 0", *lines))
    grown = run("check", tmp_path / "base", tmp_path / "new").stdout.splitlines()[1:]
    assert grown == ["  module layers.*.mlp: +10 B", "  module experts.1.up: +7 B"]


def test_what_is_named_sums_to_the_change_also_where_layers_were_renamed(tmp_path: Path) -> None:
    for name, *lines in (
        ("base", "alloc 90 a module=old.0", "alloc 30 b module=head"),
        ("new", "alloc 95 a module=new.0", "alloc 50 b module=head"),
    ):
        RunWriter(str(tmp_path / name), "rank0").write(trace("step 0", *lines))
    result = run("check", tmp_path / "base", tmp_path / "new", "--fail-above", "7")
    assert result.stdout.splitlines() == [
        "cpu: peak 145 B, base 120 B: +25 B (+20.83 %), ABOVE the limit of 7 B",
        "  module new.0: +95 B",
        "  module head: +20 B",
        "  others: -90 B",
    ]


def test_of_several_bases_the_highest_counts(files: dict[int, Path]) -> None:
    result = run("check", files[390], files[398], files[397], files[398], "--fail-above", "0")
    assert result.exit_code == 0
    assert "base 390 B to 398 B: 0 B" in result.stdout


def test_a_lock_is_a_base(files: dict[int, Path], tmp_path: Path) -> None:
    lock = tmp_path / "memory.lock"
    assert run("check", files[390], files[397], "--write", lock).exit_code == 0
    content = json.loads(lock.read_text("utf-8"))
    (device,) = content["devices"]
    assert (device["lowest_peak_bytes"], device["highest_peak_bytes"]) == (390, 397)
    assert device["parts"]["line"] == {"model.py:7 (forward)": 307, "optim.py:3 (step)": 90}
    assert run("check", lock, files[397]).exit_code == 0
    result = run("check", lock, files[990], "--by", "line")
    assert result.exit_code == 1
    assert "line model.py:7 (forward): +593 B" in result.stdout


def test_another_version_of_torch_is_named_where_the_peak_differs(tmp_path: Path) -> None:
    for name, size, version in (("a", 390, "2.12.0"), ("b", 390, "2.13.0"), ("c", 391, "2.13.0")):
        recorded = replace(trace("step 0", f"alloc {size} x"), properties={"torch": version})
        RunWriter(str(tmp_path / name), "rank0").write(recorded)
    lock = tmp_path / "memory.lock"
    run("check", tmp_path / "a", "--write", lock)
    assert "torch" not in run("check", lock, tmp_path / "b").stdout
    for layout in ("text", "github", "markdown"):
        result = run("check", lock, tmp_path / "c", "--format", layout)
        assert result.exit_code == 0
        assert "with torch 2.13.0, base 2.12.0" in result.stdout, layout
    lock.write_text(lock.read_text("utf-8").replace('"torch"', '"of another version"'), "utf-8")
    assert "torch" not in run("check", lock, tmp_path / "c").stdout


def test_json_sums_to_the_difference(files: dict[int, Path]) -> None:
    (device,) = json.loads(run("check", files[390], files[990], "--format", "json").stdout)["devices"]
    assert (device["base_bytes"], device["bytes"], device["delta_bytes"]) == (390, 990, 600)
    assert device["is_above"]
    assert sum(row["delta_bytes"] for row in device["rows"]) == 600


def test_markdown_and_annotations_escape_names(tmp_path: Path) -> None:
    hostile = copy.deepcopy(step_snapshot(900))
    hostile["device_traces"][0][0]["frames"][1]["name"] = "<b>|`x`\n::error::y"
    base = write(tmp_path / "a.pickle", step_snapshot())
    new = write(tmp_path / "b.pickle", hostile)
    markdown = run("check", base, new, "--by", "line", "--format", "markdown").stdout
    assert "### Memory: above the limit of 2%" in markdown
    assert "| cuda:0 | 990 B | 390 B | +153.85 % |" in markdown
    assert not set("<`") & set(markdown)
    annotations = run("check", base, new, "--by", "line", "--format", "github").stdout.splitlines()
    assert len(annotations) == 1
    assert annotations[0].startswith(
        "::error title=Memory::cuda:0: peak 990 B, base 390 B: +600 B (+153.85 %25)"
    )


@pytest.mark.parametrize("layout", ["text", "markdown", "github"])
def test_the_name_of_a_device_begins_no_line(files: dict[int, Path], tmp_path: Path, layout: str) -> None:
    """A line that begins with `::` is a command of GitHub Actions; whoever commits can write a lock."""
    lock, hostile = tmp_path / "memory.lock", "cuda:0\n::error::y"
    assert run("check", files[390], "--write", lock).exit_code == 0
    lock.write_text(lock.read_text("utf-8").replace('"cuda:0"', json.dumps(hostile)), "utf-8")
    printed = run("check", lock, lock, "--format", layout).stdout
    assert ": peak 390 B" in printed or "| 390 B | 390 B |" in printed
    assert not [line for line in printed.splitlines() if line.startswith("::error")]


def test_what_cannot_be_compared_is_refused(files: dict[int, Path], tmp_path: Path) -> None:
    other = write(tmp_path / "xpu.pickle", step_snapshot())
    lock = tmp_path / "memory.lock"
    assert run("check", files[390], "--write", lock).exit_code == 0
    assert "the new recording has no cuda:0" in refused("check", lock, other, "--device-type", "xpu")
    assert "There is no base" in refused("check", other)
    assert f"A lock is a base by itself.\n  where: {lock}" in refused("check", other, lock, other)


@pytest.mark.parametrize("limit", ["2 %%", "1.5", "1.5B", "much", "64M", "-1", "-2%", "nan%", "1e2%", ""])
def test_what_is_no_limit_is_refused(files: dict[int, Path], limit: str) -> None:
    answer = refused("check", files[390], files[390], "--fail-above", limit)
    assert f"{limit!r} is no limit.\n  where: --fail-above\n  fix: Give 2%, 64MiB, or bytes." in answer


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"highest_peak_bytes": 390', '"highest_peak_bytes": 391', "do not sum"),
        ('_lock": 1', '_lock": 2', "version 2"),
        ("390", "[]", "damaged"),
        ('"highest_peak_bytes": 390', '"highest_peak_bytes": Infinity', "damaged"),
        ('"lowest_peak_bytes": 390', '"lowest_peak_bytes": 1.5', "1.5 is no size in bytes"),
        ('": 90', '": 100, "x": -10', "-10 is no size in bytes"),
        ('"devices"', '"device"', "damaged"),
        (' "devices"', '<<<<<<< HEAD\n "devices"', "could not merge"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_damaged_lock_is_refused(
    files: dict[int, Path], tmp_path: Path, old: str, new: str, why: str, encoding: str
) -> None:
    lock = tmp_path / "memory.lock"
    assert run("check", files[390], "--write", lock).exit_code == 0
    lock.write_text(lock.read_text("utf-8").replace(old, new), encoding)
    assert why in refused("check", lock, files[390])


def test_a_lock_that_names_a_device_twice_is_refused(files: dict[int, Path], tmp_path: Path) -> None:
    lock = tmp_path / "memory.lock"
    assert run("check", files[390], "--write", lock).exit_code == 0
    content = json.loads(lock.read_text("utf-8"))
    lock.write_text(json.dumps({**content, "devices": 2 * content["devices"]}), "utf-8")
    assert "it names a device twice" in refused("check", lock, files[390])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_lock_in_the_encoding_of_another_shell_is_a_base(
    files: dict[int, Path], tmp_path: Path, encoding: str
) -> None:
    lock = tmp_path / "peaks.json"
    assert run("check", files[390], "--write", lock).exit_code == 0
    lock.write_text(lock.read_text("utf-8"), encoding)
    assert "+8 B (+2.05 %), ABOVE" in run("check", lock, files[398]).stdout


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("name", ["base", "memory.lock"])
def test_a_pipe_is_refused_and_not_waited_for(files: dict[int, Path], tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    error = refused("check", str(tmp_path / name), str(files[390]))
    assert error.startswith("error: This cannot be read: it is a pipe, not a file.")


@pytest.mark.parametrize(
    ("text", "why"), [("", "empty"), ("\n", "empty"), ("{}", "damaged"), ("[]", "damaged")]
)
def test_a_file_that_is_named_as_a_lock_is_judged_as_a_lock(
    files: dict[int, Path], tmp_path: Path, text: str, why: str
) -> None:
    lock = tmp_path / "memory.lock"
    lock.write_text(text, "utf-8")
    answer = refused("check", lock, files[390])
    assert f"The lock is {why}" in answer
    assert "fix: Write it again with: tb-memplugin check --write memory.lock RUN" in answer
