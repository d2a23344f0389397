"""What `LineTracer` tells: whose lines it names, as a table, as JSON, in the tab."""

from __future__ import annotations

import io
import json

import torch
from torch import nn

import tb_memplugin.record.line_tracer as mem_tracer
from tb_memplugin.analysis.lines import line_table
from tb_memplugin.store.reader import load_window
from tests.traced_lines import line_of, made_now, nothing_is_left, traced, two_lines  # noqa: F401

HERE = __file__


def forward_only():
    return nn.functional.softmax(torch.ones(1000, requires_grad=True), 0)


def test_the_users_line_is_named_before_the_librarys():
    tracer = traced(forward_only)
    here = line_of(forward_only, "softmax")
    assert made_now(tracer) == {here: (8_000, 2, 4_000.0)}
    library = made_now(tracer, library_code=True)
    (softmax,) = (key for key in library if key.endswith("(softmax)"))
    assert softmax.partition(":")[0].endswith("torch/nn/functional.py")
    assert library == {softmax: (4_000, 1, 4_000.0), here: (4_000, 1, 4_000.0)}


def test_files_are_included_and_excluded_by_patterns():
    tracer = traced(forward_only)
    (included,) = (key for key in made_now(tracer, include=["*/torch/nn/functional.py"]) if "softmax" in key)
    assert made_now(tracer, include="*/torch/nn/functional.py")[included][0] == 4_000
    without = made_now(tracer, exclude=[HERE])
    assert not any(key.startswith(HERE) for key in without)
    assert sum(size for size, *_ in without.values()) == 8_000
    assert made_now(tracer, exclude=["*"]) == {"(excluded)": (8_000, 2, 4_000.0)}


def test_the_report_is_a_table():
    before = torch.zeros(1_000_000)
    tracer = traced(two_lines)
    text = io.StringIO()
    tracer.report_stats(text)
    lines = text.getvalue().splitlines()
    report = tracer.report()
    assert lines[0] == "Device: cpu"
    assert lines[1].startswith("Max mem: ")
    assert lines[1].endswith(f"({report.max_bytes:,} bytes)")
    assert lines[2] == "Total mem allocated: 15.63 KiB (16,000 bytes)"
    assert lines[3].split() == ["Mem", "Cumulative", "Mem", "Median", "Count", "Location"]
    assert lines[4].endswith("  untraced")
    assert lines[5].split()[:2] == ["11.72", "KiB"]
    assert lines[5].split()[4:] == ["3.91", "KiB", "3", *line_of(two_lines, "parts =").split()]
    del before


def test_what_is_not_shown_is_one_row():
    before = torch.zeros(1_000_000)
    tracer = traced(two_lines)
    text = io.StringIO()
    tracer.report_stats(text, top=1)
    rows = text.getvalue().splitlines()[4:6]
    rest = tracer.report().lines[1:]
    assert before.nbytes <= tracer.report().lines[0].bytes
    assert rows[1].split() == ["15.63", "KiB", *rows[1].split()[2:4], "4", "...", "2", "more", "lines"]
    assert sum(use.bytes for use in rest) == 16_000


def test_json_has_exact_bytes_of_all_lines():
    tracer = traced(two_lines)
    text = io.StringIO()
    tracer.report_stats(text, as_json=True, top=1)
    data = json.loads(text.getvalue())
    assert data["max_bytes"] == data["lines"][-1]["cumulative_bytes"] == tracer.report().max_bytes
    assert len(data["lines"]) == len(tracer.report().lines) >= 2
    (mine,) = (use for use in data["lines"] if use["bytes"] == 4_000)
    assert (mine["file"], mine["function"]) == (two_lines.__code__.co_filename, "two_lines")
    assert mine["median_bytes"] == 4_000.0
    assert f"{mine['file']}:{mine['line']} (two_lines)" == mine["location"]


def test_names_cannot_steer_a_terminal():
    made = compile("kept = torch.zeros(1000)", "/evil\x1b[31m\n.py", "exec")
    tracer = traced(lambda: exec(made, {"torch": torch}))
    text = io.StringIO()
    tracer.report_stats(text)
    assert "/evil\\x1b[31m\\n.py:1 (<module>)" in text.getvalue()


def test_it_is_saved_for_the_tab(tmp_path):
    tracer = traced(two_lines)
    tracer.save(tmp_path, "w")
    (side_file,) = tmp_path.rglob("*.mem")
    read = load_window(str(side_file))
    assert read.stacks == tracer.trace_result().stacks
    assert line_table(read, 0) == line_table(tracer.trace_result(), 0)


def test_the_module_has_the_calls_that_scripts_use(capsys):
    mem_tracer.switch_allocator()
    mem_tracer.start_tracing()
    kept = two_lines()
    mem_tracer.stop_tracing()
    mem_tracer.report_stats()
    said = capsys.readouterr().out
    assert "Max mem: " in said
    assert "Mem  Cumulative Mem" in said
    assert line_of(two_lines, "zeros(1000)") in said
    del kept
