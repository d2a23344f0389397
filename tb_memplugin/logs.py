"""Logging: all messages of the package go to the standard logger `tb_memplugin`.

Importing the package sets up no handler, unless an environment variable requests it. Warnings go to the
program's handlers, or to stderr through Python's handler of last resort; a NullHandler would silence them
there, so none is added.
"""

from __future__ import annotations

import logging
import os
import shlex
from contextlib import suppress

import click

from tb_memplugin.errors import MemPluginError, is_of_signal

LOGGER = "tb_memplugin"
LEVEL_VARIABLE = "TB_MEMPLUGIN_LOG_LEVEL"
"""Environment variable with a level's name or number. If it is set, importing the package shows messages."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_attached: list[logging.Handler] = []


class _Logger(logging.Logger):
    """A logger whose message is lost alone where a handler or a filter of the program raises."""

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except Exception as error:
            if isinstance(error, RecursionError) or is_of_signal(error):
                raise


def _own(logger: logging.Logger) -> logging.Logger:
    """Make a logger, perhaps of a class that the program has set, one of ours."""
    if not isinstance(logger, _Logger):
        with suppress(TypeError):  # a class of C or with slots
            logger.__class__ = type("_Logger", (_Logger, type(logger)), {})
    return logger


_own(logging.getLogger(LOGGER))


def configure_logging(
    level: int | str | None = None, log_file: str | os.PathLike[str] | None = None, rich_format: bool = False
) -> logging.Logger:
    """Show the package's messages on stderr and, if asked, in a file. Return the logger `tb_memplugin`.

    A second call replaces the handlers of the first. From the first call on, messages no longer go to the
    root logger's handlers, so that no line appears twice. Programs that set up logging themselves need not
    call this: `logging.getLogger("tb_memplugin")` is an ordinary logger.

    Args:
        level: the lowest level that is shown, as a name ("DEBUG") or a number (10). Default: the
            environment variable TB_MEMPLUGIN_LOG_LEVEL, else INFO.
        log_file: a file to which the messages are appended, in addition to stderr.
        rich_format: format stderr in colours and columns with rich.

    Raises:
        MemPluginError: the level does not exist, or the file cannot be opened. Earlier handlers stay.

    Example:
        >>> configure_logging("DEBUG", log_file="memory.log")
    """
    least = level_number(level if level is not None else os.environ.get(LEVEL_VARIABLE) or logging.INFO)
    handlers = [_rich_console() if rich_format else _plain(logging.StreamHandler())]
    if log_file is not None:
        handlers.append(_file(log_file))
    logger = logging.getLogger(LOGGER)
    while _attached:
        old = _attached.pop()
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)
    _attached.extend(handlers)
    logger.setLevel(least)
    logger.propagate = False
    return logger


def configure_from_environment(variable: str = LEVEL_VARIABLE) -> None:
    """Set up logging if the environment variable is set. An unknown level is a warning, not an error."""
    level = os.environ.get(variable)
    if not level:
        return
    try:
        configure_logging(level)
    except MemPluginError as error:
        logging.getLogger(LOGGER).warning("%s", error)


def instance_logger(log_level: int | str | None = None) -> logging.Logger:
    """Return the logger for one object: the package's, or a child of it if the object has its own level.

    A child is not in logging's registry, so it lives as long as its object. The package's handlers show its
    messages.

    Raises:
        MemPluginError: the level does not exist.
    """
    package = logging.getLogger(LOGGER)
    if log_level is None:
        return package
    own = _Logger(LOGGER, level_number(log_level))
    own.parent = package
    return own


def level_number(level: int | str) -> int:
    """Return the number of a level: 10 for 10, "10", "DEBUG" and "debug".

    Raises:
        MemPluginError: the level does not exist.
    """
    number = logging.getLevelName(level.strip().upper()) if isinstance(level, str) else level
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(level, str) and level.strip().isdecimal():
        return int(level)
    raise MemPluginError(
        f"There is no logging level {level!r}.",
        where=f"level, log_level or {LEVEL_VARIABLE}",
        fix="Give DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number.",
    )


def _plain(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(logging.Formatter(_FORMAT))
    return handler


def _rich_console() -> logging.Handler:
    from rich.console import Console
    from rich.logging import RichHandler

    return RichHandler(console=Console(stderr=True), show_path=False)


def _file(path: str | os.PathLike[str]) -> logging.Handler:
    try:
        return _plain(logging.FileHandler(path, encoding="utf-8"))
    except OSError as error:
        raise MemPluginError(
            f"The log file cannot be opened: {error.strerror or error}.",
            where=os.fspath(path),
            fix="Choose a file in an existing folder that this process can write to.",
        ) from error


def say_where(logdir: str, what: str, logger: logging.Logger) -> None:
    """Print on stderr, on rank 0 only, where something was recorded and how to see it.

    Args:
        logger: that of the recorder; nothing is printed if it shows no warnings.
    """
    if os.environ.get("RANK", "0") != "0" or os.environ.get("TB_MEMPLUGIN_OWNER"):  # whose summary says it
        return
    if not logger.isEnabledFor(logging.WARNING):
        return
    with suppress(OSError, ValueError):  # stderr is closed
        click.echo(
            f"tb_memplugin: {what} recorded in {logdir}\n  see it in the Memory tab: "
            f"tensorboard --logdir {shlex.quote(logdir)}",
            err=True,
        )
