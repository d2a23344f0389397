"""`tb-memplugin summary`: what fills the peak of a recorded run, and what to do, in some lines."""

import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from tb_memplugin import load
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tb_memplugin.trace.labels import DUMP_OF
from tests.analysis.test_growth import of_process
from tests.commands.files import failing_snapshot, refused, run, write
from tests.step_figures import figures
from tests.traces import trace

MIB = 1 << 20


def lines(folder):
    shown = run("summary", folder).stdout.splitlines()
    return dict(line[2:].split(maxsplit=1) for line in shown if line.startswith("  ") and line[2] != " ")


def test_what_only_a_variable_holds_is_named_and_the_rest_is_not_known(tmp_path):
    recorded = trace(
        f"start {6 * MIB} w category=parameter",
        f"start {3 * MIB} data reason=reachable label=data",
        "step 0",
        f"alloc {MIB} a",
    )
    RunWriter(str(tmp_path / "run"), "rank0").write(recorded)
    filled = lines(tmp_path / "run")["filled"]
    assert filled == (
        "by  parameter 6.00 MiB (60.0 %), variable data 3.00 MiB (30.0 %), not known 1.00 MiB (10.0 %)"
    )


def test_growth_of_the_process_is_the_first_advice(tmp_path):
    """A window in which nothing grows, and 60 watched steps with half a MiB more in each."""
    RunWriter(str(tmp_path / "run"), "rank0").write(trace("start 100 w", "step 0", "alloc 10 a", "free a"))
    writer = StepsWriter(str(tmp_path / "run"), "rank0", 0)
    writer.write(of_process(60, lambda at: (200 + at) * MIB // 2, lambda at: at * MIB // 2))
    writer.close()
    shown = lines(tmp_path / "run")
    assert shown["steps"].endswith("0.50 MiB more with every step")
    assert shown["advice"] == (
        "The process grows over 60 watched steps, because memory that it frees stays in the heap of the "
        "C library. 0.50 MiB more with every step."
    )


def test_a_step_that_is_far_higher_than_the_recorded_ones_is_said_and_how_to_record_it(tmp_path):
    """Step 4, which writes what steps 2 and 3 recorded, has 110 MiB, and one with an evaluation 300 MiB."""
    RunWriter(str(tmp_path / "run"), "rank0").write(trace("step 2", "alloc 10 a", "step 3", "alloc 10 b"))
    writer = StepsWriter(str(tmp_path / "run"), "rank0", 0)
    peaks = [100, 100, 100, 100, 110, 100, 100, 300, 100, 100]
    writer.write(figures([peak * MIB for peak in peaks], device="process"))
    writer.close()
    shown = run("summary", tmp_path / "run").stdout
    assert (
        "  steps      10 steps of rank0 watched: process highest 300.0 MiB resident in step 7\n"
        "             That is 190.0 MiB above the steps that are recorded in full. To record it: --steps 7\n"
    ) in shown


def test_no_step_is_to_be_recorded_where_the_dump_of_the_failure_has_it(tmp_path):
    """Step 7 has 300 MiB, and the snapshot that was taken when memory ran out in it 310 MiB."""
    for worker, size, dump_of in (("rank0", 100, ""), ("dump", 310, "rank0")):
        recorded = trace("step 2", f"alloc {size * MIB} a device=cuda:0")
        RunWriter(str(tmp_path / "run"), worker).write(replace(recorded, properties={DUMP_OF: dump_of}))
    writer = StepsWriter(str(tmp_path / "run"), "rank0", 0)
    writer.write(figures([100 * MIB] * 7 + [300 * MIB]))
    writer.close()
    shown = run("summary", tmp_path / "run").stdout
    assert "cuda:0 highest 300.0 MiB in step 7" in shown
    assert "To record it" not in shown


def test_parts_of_ten_percent_are_named_and_those_below_one_percent_are_not(tmp_path):
    sizes = {"parameter": 400, "gradient": 250, "input": 200, "cache": 145, "temporary": 5}
    lines_of = [f"alloc {size * MIB} {name} category={name}" for name, size in sizes.items()]
    RunWriter(str(tmp_path / "run"), "rank0").write(trace("step 0", *lines_of))
    assert lines(tmp_path / "run")["filled"] == (
        "by  parameter 400.0 MiB (40.0 %), gradient 250.0 MiB (25.0 %), input 200.0 MiB (20.0 %), "
        "cache 145.0 MiB (14.5 %), others 5.00 MiB (0.5 %)"
    )


def test_why_memory_ran_out_is_the_first_advice_and_no_step_is_named_that_none_marked(tmp_path):
    recorded = load(write(tmp_path / "oom.pickle", failing_snapshot()))
    RunWriter(str(tmp_path / "run"), "a").write(trace("step 2", "alloc 310 a device=cuda:0"))
    RunWriter(str(tmp_path / "run"), "dump").write(replace(recorded, properties={DUMP_OF: "a"}))
    shown = lines(tmp_path / "run")
    assert shown["failed"] == "a request of 8.79 KiB on cuda:0"
    assert shown["peak"] == "300 B on cuda:0"
    assert shown["advice"].startswith("A request for 8.79 KiB failed on cuda:0")
    assert "run/dump, written when a request failed. To see" in run("advice", tmp_path / "run").stderr


def test_a_step_that_peaked_far_above_the_failed_one_is_shown(tmp_path):
    recorded = load(write(tmp_path / "oom.pickle", failing_snapshot()))
    RunWriter(str(tmp_path / "run"), "a").write(trace("step 2", "alloc 400 a device=cuda:0"))
    RunWriter(str(tmp_path / "run"), "dump").write(replace(recorded, properties={DUMP_OF: "a"}))
    assert lines(tmp_path / "run")["peak"].startswith("400 B on cuda:0 in step 2")


@pytest.mark.parametrize(
    ("folder", "logdir"),
    [
        ("runs/first", "runs/first"),
        ("runs", "runs"),
        ("runs/train/20261125-221811", "runs"),
        ("runs/train/20261125-221811-29500", "runs"),
    ],
)
def test_only_of_a_folder_that_run_named_the_logdir_is_two_above(tmp_path, monkeypatch, folder, logdir):
    monkeypatch.chdir(tmp_path)
    RunWriter(folder, "rank0").write(trace("step 0", "alloc 10 a"))
    assert lines(folder)["open"] == f"tensorboard --logdir {logdir}   (the tab Memory)"
    address = (
        f"http://localhost:6006/#tb_memplugin&p.tb_memplugin.run={quote(folder[len('runs/') :], safe='')}"
    )
    (last,) = run("summary", folder).stdout.splitlines()[-1:]
    assert last.strip() == address if folder != logdir else "http" not in last  # opens on this run


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ("20261125-221811", "20261126-090000", "+5 B since 20261125-221811: unknown +5 B"),
        ("20261125-221811-29500", "20261126-090000", "+5 B since 20261125-221811-29500: unknown +5 B"),
        ("20261125-221811", "trace", None),
        ("another", "20261126-090000", None),
        ("another", "trace", None),
    ],
)
def test_only_runs_that_run_named_by_their_time_are_compared(tmp_path, before, now, changed):
    RunWriter(tmp_path / before, "rank0").write(trace("step 0", "alloc 10 a"))
    RunWriter(tmp_path / now, "rank0").write(trace("step 0", "alloc 15 a"))
    assert lines(tmp_path / now).get("changed") == changed


def test_what_changed_is_of_the_device_that_peaks_highest(tmp_path):
    """The GPU has 3 MiB more, the host 1 MiB less."""
    sizes = {"20261125-221811": (2, 5), "20261126-090000": (1, 8)}
    for name, (host, gpu) in sizes.items():
        blocks = (f"alloc {host * MIB} a", f"alloc {gpu * MIB} b device=cuda:0 module=head")
        RunWriter(tmp_path / name, "rank0").write(trace("step 0", *blocks))
    shown = run("summary", tmp_path / "20261126-090000").stdout
    assert "  peak       8.00 MiB on cuda:0" in shown
    assert "  changed    +3.00 MiB since 20261125-221811: unknown +3.00 MiB\n" in shown
    assert "layers: head +3.00 MiB\n" in shown


def test_what_changed_is_of_steps_recorded_in_full_where_the_dump_of_a_failure_names_other_modules(tmp_path):
    for name, size, dumped in (
        ("20261125-221811", 5, True),
        ("20261126-090000", 8, True),
        ("20261127-090000", 6, False),
    ):
        for worker, module, of in (("rank0", "head", ""), ("dump", "inferred", "rank0")):
            recorded = trace("step 0", f"alloc {size * MIB} b device=cuda:0 module={module}")
            if dumped or not of:
                RunWriter(tmp_path / name, worker).write(replace(recorded, properties={DUMP_OF: of}))
    shown = run("summary", tmp_path / "20261126-090000").stdout
    assert "  layers     inferred 8.00 MiB" in shown
    assert "layers: head +3.00 MiB\n" in shown
    assert "layers: head -2.00 MiB\n" in run("summary", tmp_path / "20261127-090000").stdout


def test_the_parts_of_a_change_have_one_unit(tmp_path):
    """5 MiB are gone, and four parts of 200 KiB are new."""
    new = [
        f"alloc {200 << 10} {name} category={name}" for name in ("input", "cache", "gradient", "temporary")
    ]
    parts = {"20261125-221811": [f"alloc {5 * MIB} a category=activation"], "20261126-090000": new}
    for name, lines_of in parts.items():
        RunWriter(tmp_path / name, "rank0").write(trace("step 0", *lines_of))
    changed = lines(tmp_path / "20261126-090000")["changed"].partition(": ")[2]
    assert re.fullmatch(
        r"activation -5\.00 MiB \(gone\), (\w+ \+0\.20 MiB \(new\), ){2}others \+0\.39 MiB", changed
    )


def test_repeated_layers_are_one_part(tmp_path):
    """Ten layers with 1 MiB each are more than the 4 MiB of the head."""
    layers = [f"alloc {MIB} a{at} module=layers.{at}.mlp" for at in range(10)]
    RunWriter(str(tmp_path / "run"), "rank0").write(
        trace("step 0", f"alloc {4 * MIB} a module=head", *layers)
    )
    assert lines(tmp_path / "run")["layers"] == "layers.*.mlp 10.00 MiB (71.4 %), head 4.00 MiB (28.6 %)"


def test_a_run_without_a_finding_says_so(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(trace("step 0", "alloc 10 a", "free a"))
    assert lines(tmp_path / "run")["advice"].startswith("No problem found; ")


def test_a_module_that_is_a_number_is_called_a_module(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(trace("step 0", "alloc 10 a module=0.1"))
    assert lines(tmp_path / "run")["layers"] == "module 0.1 10 B (100.0 %)"


@pytest.mark.parametrize("command", ["summary", "ranks"])
def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path, command):
    window = trace("step 3", "alloc 70 a")
    RunWriter(str(tmp_path / "run"), "rank0").write(window)
    event_file = Path(RunWriter(str(tmp_path / "run"), "rank1").write(window).event_file)
    event_file.write_bytes(event_file.read_bytes()[:-1])
    shown = run(command, tmp_path / "run")
    assert shown.exit_code == 0
    assert "70" in shown.stdout
    where = re.escape(str(event_file))
    assert re.fullmatch(rf"warning: The event file ends .*\n  where: {where}\n.*\n", shown.stderr)


@pytest.mark.parametrize("command", ["summary", "ranks"])
@pytest.mark.parametrize(("file", "what"), [("a", "This is no folder."), ("b", "There is no such folder.")])
def test_a_file_is_no_run(tmp_path, command, file, what):
    write(tmp_path / "a", failing_snapshot())
    assert refused(command, tmp_path / file).startswith(f"error: {what}\n  where: {tmp_path / file}\n  fix: ")


def test_of_several_ranks_the_one_that_grows_is_named_and_where_its_advice_is(tmp_path):
    """rank0 peaks highest, 10 MiB, and keeps nothing; rank1 keeps 1 MiB more in each step."""
    level = [line for n in range(4) for line in (f"step {n}", f"alloc {10 * MIB} a{n}", f"free a{n}")]
    rising = [line for n in range(4) for line in (f"step {n}", f"alloc {MIB} a{n}")]
    for rank, steps in enumerate((level, rising)):
        RunWriter(str(tmp_path / "run"), f"rank{rank}").write(trace(*steps))
    shown = run("summary", tmp_path / "run").stdout
    assert "in rank0, the highest of 2\n" in shown
    assert (
        "  grows      1 of 2 workers: rank1, 1.00 MiB more with every step\n"
        f"             tb-memplugin advice {tmp_path / 'run' / 'rank1'}\n"
    ) in shown
    rows = re.findall(r"^(rank\d) .* (none|\S+ MiB) +4$", run("ranks", tmp_path / "run").stdout, re.MULTILINE)
    assert rows == [("rank0", "none"), ("rank1", "1.00 MiB")]
