"""Real IPython shows traces as reports and measures cells. Bytes are those of float32 tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from tb_memplugin import notebook
from tb_memplugin.analysis import peak
from tests.traces import trace


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "tb_memplugin")
    yield shell
    shell.reset(new_session=True)
    InteractiveShell.clear_instance()


def html_of(shell: Any, value: object) -> str:
    data, _ = shell.display_formatter.format(value)
    return data.get("text/html", "")


def test_a_trace_is_shown_as_a_report_that_reaches_nothing_outside(shell: Any) -> None:
    html = html_of(shell, trace("alloc 100 a module=</iframe><script>x", "free a"))
    assert html.startswith('<iframe sandbox="allow-scripts" ')
    assert html.count("<") == 2  # the frame's own tags: all of the page is in an attribute
    page = unescape(html[html.index('srcdoc="') + 8 :])
    assert '<script type="application/json" id="report-data">' in page
    assert "Content-Security-Policy" in page
    assert "<title>Memory over time</title>" in page


def test_a_trace_of_too_many_events_is_a_line_of_text(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "MOST_EVENTS", 1)
    long = trace("alloc 100 a", "free a")
    assert html_of(shell, long) == ""
    assert repr(long) == "<MemoryTrace of 'test': 2 events on cpu>"


def test_a_cell_is_measured_by_layer(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("import torch; net = torch.nn.Linear(100, 50); rows = torch.ones(10, 100)")
    result = shell.run_cell("%%memory net\nout = net(rows)")
    assert result.success
    assert "cpu: at most 1.95 KiB more than before; the peak: (root) " in capsys.readouterr().out
    assert shell.user_ns["out"].shape == (10, 50)


def test_repeated_layers_are_one_part(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each layer has 8 x 8 weights, 8 biases and 10 x 8 kept outputs; the last one its input to ReLU, too."""
    shell.run_cell("import torch; from torch.nn import Linear, ReLU, Sequential")
    shell.run_cell("net = Sequential(*(Sequential(Linear(8, 8), ReLU()) for _ in range(8)))")
    assert shell.run_cell("%%memory net\nout = net(torch.ones(10, 8))").success
    assert "the peak: module *.0 2.56 KiB, module *.1 2.50 KiB, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("%%memory nothing\n1", "name 'nothing' is not defined"),
        ("%%memory kept[\n1", "SyntaxError"),
        ("%%memory kept\n1", "model is a Tensor; give a torch.nn.Module"),
    ],
)
def test_a_model_that_is_none_is_told_without_a_traceback(
    shell: Any, capsys: pytest.CaptureFixture[str], cell: str, told: str
) -> None:
    shell.run_cell("import torch; kept = torch.ones(1)")
    assert not shell.run_cell(cell).success
    printed = "".join(capsys.readouterr())
    assert printed.startswith("UsageError: %%memory: ")
    assert told in printed
    assert "notebook.py" not in printed


def test_a_model_may_be_an_expression(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The cell adds 10 x 100 inputs and 10 x 50 outputs."""
    shell.run_cell("import torch; both = {'net': torch.nn.Sequential(torch.nn.Linear(100, 50))}")
    assert shell.run_cell("%%memory both['net'][0]\nout = both['net'](torch.ones(10, 100))").success
    assert "cpu: at most 5.86 KiB more than before; the peak: (root) " in capsys.readouterr().out


def test_a_cell_that_allocates_nothing_says_so(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell("%%memory\n1 + 1").success
    assert "The cell allocated no memory in torch.\n" in capsys.readouterr().out


def test_a_cell_that_only_frees_names_no_parts(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The profiler tells the end only of what it saw begin, in whatever window."""
    shell.run_cell("import torch; torch.ones(1)")
    assert shell.run_cell("%%memory\nkept = torch.ones(1000); None").success
    assert shell.run_cell("%%memory\ndel kept").success
    assert "cpu: at most 0 B more than before\n" in capsys.readouterr().out


def test_a_cell_with_a_profiler_of_its_own_is_no_error(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("import torch")
    assert shell.run_cell("%%memory\nwith torch.profiler.profile():\n    finished = 1").success
    assert "The memory was not measured: another torch profiler is on" in capsys.readouterr().out
    assert shell.user_ns["finished"] == 1


def test_the_step_of_a_cell_has_ended(shell: Any) -> None:
    shell.run_cell("import torch")
    shell.run_cell("%%memory\nkept = torch.ones(1000)")
    assert not [note for note in shell.user_ns["_"].notes if "did not end" in note]


@pytest.mark.parametrize(
    ("cell", "error", "told"),
    [
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("kept.", SyntaxError, "SyntaxError: "),
        ("%nothing", UsageError, "`%nothing` not found"),
        ("raise KeyboardInterrupt('mine')", KeyboardInterrupt, "KeyboardInterrupt: mine"),
    ],
)
def test_an_error_in_a_cell_ends_it_and_is_shown_once(
    shell: Any, capsys: pytest.CaptureFixture[str], cell: str, error: type[BaseException], told: str
) -> None:
    """So Jupyter gets one traceback, and none that is empty, which it would draw as a red strip."""
    tracebacks: list[list[str]] = []
    show = shell._showtraceback

    def showtraceback(kind: Any, raised: Any, lines: list[str]) -> None:
        tracebacks.append(lines)
        show(kind, raised, lines)

    shell.run_line_magic("colors", "nocolor")
    shell._showtraceback = showtraceback
    result = shell.run_cell(f"%%memory\nimport torch\nkept = torch.ones(1000)\n{cell}")
    assert isinstance(result.error_in_exec, error)
    printed = "".join(capsys.readouterr())
    assert printed.count(told) == 1
    assert all(tracebacks)
    assert len(tracebacks) <= 1
    assert ("cpu: at most 3.91 KiB more than before" in printed) == (error is not SyntaxError)
    assert "allocated no memory" not in printed  # of a cell that did not run

    assert not shell.run_cell("1 / 0").success  # what comes after is shown as always
    assert "division by zero" in "".join(capsys.readouterr())


def test_the_magic_can_be_taken_away_and_loaded_again(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("unload_ext", "tb_memplugin")
    assert capsys.readouterr().out == ""
    assert not shell.run_cell("%%memory\n1").success
    shell.run_line_magic("load_ext", "tb_memplugin")
    assert shell.run_cell("%%memory\n1").success


def test_a_cell_that_waits_is_refused_where_a_loop_runs(shell: Any) -> None:
    cell = "%%memory\nimport asyncio\nawait asyncio.sleep(0)\nfinished = 1"

    async def kernel() -> Any:
        return shell.run_cell(cell)

    error = asyncio.run(kernel()).error_in_exec
    assert "A notebook cannot wait within a magic" in str(error)
    assert "finished" not in shell.user_ns
    shell.run_cell(cell)
    assert shell.user_ns["finished"] == 1


def test_results_are_short_as_text() -> None:
    small = trace("alloc 100 a", "free a")
    assert len(repr(peak(small))) < 800
