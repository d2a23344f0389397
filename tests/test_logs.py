"""Logging: nothing before it is asked for, one line for each message, and no print anywhere."""

from __future__ import annotations

import ast
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tb_memplugin
from tb_memplugin import MemPluginError, configure_logging, logs, memory_trace_handler
from tb_memplugin.logs import configure_from_environment, instance_logger, say_where

PACKAGE = Path(tb_memplugin.__file__).parent


@pytest.fixture(autouse=True)
def as_before():
    """The logger as an import leaves it, also afterwards."""
    logger = logging.getLogger("tb_memplugin")
    yield
    for handler in logs._attached:
        logger.removeHandler(handler)
        handler.close()
    logs._attached.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def said(code: str, **environment: str) -> list[str]:
    """The lines on stderr of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


SPEAK = (
    "import logging, tb_memplugin as t; l = logging.getLogger('tb_memplugin'); "
    "{}l.debug('d'); l.info('i'); l.warning('w')"
)


def test_unasked_only_warnings_are_shown():
    assert said(SPEAK.format("")) == ["w"]


@pytest.mark.parametrize("logger", [logging.getLogger("tb_memplugin"), instance_logger("DEBUG")])
def test_a_handler_of_the_program_that_raises_costs_its_message_alone(logger):
    class Failing(logging.Handler):
        def emit(self, record):
            raise error

    root, failing = logging.getLogger(), Failing()
    root.addHandler(failing)
    try:
        error: BaseException = ValueError("a handler of the program's")
        logger.warning("lost")
        error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            logger.warning("passes")
    finally:
        root.removeHandler(failing)


def test_configured_it_shows_the_level_the_logger_and_the_message():
    lines = said(SPEAK.format("t.configure_logging(); "))
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO tb_memplugin: i", "WARNING tb_memplugin: w"]


@pytest.mark.parametrize("level", ["DEBUG", "debug", "10"])
def test_the_environment_sets_the_level_without_a_call(level):
    assert len(said(SPEAK.format(""), TB_MEMPLUGIN_LOG_LEVEL=level)) == 3


def test_another_tools_variable_goes_for_its_scripts_until_ours_is_set():
    script = SPEAK.format("import tb_memplugin.coming_from.memory_profiler as p; {}")
    assert len(said(SPEAK.format(""), MEMORY_PROFILER_LOG_LEVEL="10")) == 1
    assert len(said(script.format(""), MEMORY_PROFILER_LOG_LEVEL="10")) == 3
    assert len(said(script.format("p.configure_logging(); "), MEMORY_PROFILER_LOG_LEVEL="10")) == 3
    ours = {"MEMORY_PROFILER_LOG_LEVEL": "10", "TB_MEMPLUGIN_LOG_LEVEL": "WARNING"}
    assert len(said(script.format("p.configure_logging(rich_format=False); "), **ours)) == 1


def test_an_argument_goes_before_the_environment():
    assert len(said(SPEAK.format("t.configure_logging('ERROR'); "), TB_MEMPLUGIN_LOG_LEVEL="DEBUG")) == 0


def test_a_wrong_level_in_the_environment_is_told_and_ends_nothing():
    lines = said(SPEAK.format(""), TB_MEMPLUGIN_LOG_LEVEL="loud")
    assert lines[0] == "There is no logging level 'loud'."
    assert lines[-1] == "w"


def test_no_line_twice_beside_a_root_logger_that_shows_everything():
    lines = said(
        SPEAK.format(
            "logging.basicConfig(level=10); t.configure_logging('DEBUG'); t.configure_logging('DEBUG'); "
        )
    )
    assert len(lines) == 3


def test_without_our_set_up_the_programs_own_handlers_get_the_messages(caplog):
    logging.getLogger("tb_memplugin").warning("hello")
    assert caplog.messages == ["hello"]


def test_a_second_call_replaces_the_first(tmp_path):
    configure_logging("DEBUG", log_file=tmp_path / "first.log")
    logger = configure_logging("INFO", log_file=tmp_path / "second.log")
    logger.debug("small")
    logger.info("large")
    assert (tmp_path / "first.log").read_text() == ""
    assert (tmp_path / "second.log").read_text().endswith("INFO tb_memplugin: large\n")
    assert len(logger.handlers) == 2


def test_a_file_is_added_to(tmp_path):
    for word in ("one", "two"):
        configure_logging(log_file=tmp_path / "log").info(word)
    assert [line[-3:] for line in (tmp_path / "log").read_text().splitlines()] == ["one", "two"]


def test_a_file_that_cannot_be_opened_is_refused_and_what_was_there_stays(tmp_path, capsys):
    logger = configure_logging()
    with pytest.raises(MemPluginError, match="log file"):
        configure_logging("DEBUG", log_file=tmp_path / "absent" / "log")
    logger.info("still here")
    assert "still here" in capsys.readouterr().err
    assert logger.level == logging.INFO


def test_rich_shows_the_message_as_it_is(capsys):
    configure_logging(rich_format=True).warning("[red]a name[/red]")
    line = capsys.readouterr().err
    assert "WARNING" in line
    assert "[red]a name[/red]" in line


@pytest.mark.parametrize("level", ["loud", "", True, 1.5])
def test_what_is_no_level_is_refused(level):
    with pytest.raises(MemPluginError, match="no logging level"):
        instance_logger(level)


def test_an_object_may_say_more_or_less_than_the_package(capsys):
    configure_logging("INFO")
    instance_logger("DEBUG").debug("more")
    instance_logger("ERROR").warning("less")
    instance_logger().info("the same")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["more", "the same"]


def test_the_loggers_of_objects_are_in_no_registry():
    before = set(logging.Logger.manager.loggerDict)
    instance_logger("DEBUG")
    assert set(logging.Logger.manager.loggerDict) == before


@pytest.mark.parametrize(("level", "expected"), [(None, 1), ("ERROR", 0)])
def test_a_handlers_own_level(tmp_path, caplog, level, expected):
    import torch

    memory_trace_handler(tmp_path, log_level=level)(torch.profiler.profile())
    assert len(caplog.records) == expected


def test_a_handler_refuses_a_level_that_is_none(tmp_path):
    with pytest.raises(MemPluginError, match="no logging level"):
        memory_trace_handler(tmp_path, log_level="loud")


def test_nothing_happens_where_the_environment_asks_for_nothing(monkeypatch):
    monkeypatch.delenv("TB_MEMPLUGIN_LOG_LEVEL", raising=False)
    configure_from_environment()
    assert logs._attached == []


def prints(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    bare = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("print", "pprint")]
    return [f"{path.relative_to(PACKAGE)}:{call.lineno}" for call in bare]


def test_nothing_in_the_package_prints():
    assert [place for path in sorted(PACKAGE.rglob("*.py")) for place in prints(path)] == []


def test_every_logger_is_the_packages():
    names = [
        node.args[0].value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("getLogger")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    assert set(names) == {"tb_memplugin"}


@pytest.mark.parametrize(
    "make",
    [
        lambda folder, level: tb_memplugin.MemoryTracer(log_level=level),
        lambda folder, level: tb_memplugin.LineTracer(log_level=level),
        lambda folder, level: tb_memplugin.MemoryMonitor(folder, log_level=level),
        lambda folder, level: tb_memplugin.IterationReport(torch.nn.Linear(2, 2), log_level=level),
        lambda folder, level: tb_memplugin.MemoryEstimator(log_level=level),
    ],
    ids=["MemoryTracer", "LineTracer", "MemoryMonitor", "IterationReport", "MemoryEstimator"],
)
def test_every_object_takes_a_level_of_its_own_and_leaves_the_packages(tmp_path, make):
    package = logging.getLogger("tb_memplugin")
    made = make(tmp_path, "error")
    assert (made._logger.level, made._logger.parent, package.level) == (
        logging.ERROR,
        package,
        logging.NOTSET,
    )
    assert make(tmp_path, None)._logger is package
    with pytest.raises(MemPluginError, match="no logging level 'loud'"):
        make(tmp_path, "loud")


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_rank_0_says_where_something_was_recorded(capsys, monkeypatch, rank, times):
    monkeypatch.setenv("RANK", rank)
    say_where("a run", "memory", logging.getLogger("tb_memplugin"))
    told = (
        "tb_memplugin: memory recorded in a run\n  see it in the Memory tab: tensorboard --logdir 'a run'\n"
    )
    assert capsys.readouterr().err == told * times
    say_where("a run", "memory", instance_logger("ERROR"))
    assert capsys.readouterr().err == ""


def test_where_is_not_said_where_nobody_listens(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    say_where("a run", "memory", logging.getLogger("tb_memplugin"))
