"""What we have to say goes through standard `logging`, under the name `tb_memplugin`.

Nothing is set up on import, unless the environment asks for it: warnings reach stderr by Python's last
resort, or the handlers that the program has. So there is no NullHandler, which would silence them.
"""

from __future__ import annotations

import logging
import os

from tb_memplugin.errors import MemPluginError

LOGGER = "tb_memplugin"
LEVEL_VARIABLE = "TB_MEMPLUGIN_LOG_LEVEL"
"""Environment variable: a level's name or number. Where it is set, importing the package shows messages."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_attached: list[logging.Handler] = []


def configure_logging(
    level: int | str | None = None,
    log_file: str | os.PathLike[str] | None = None,
    rich_format: bool = False,
) -> logging.Logger:
    """Show our messages on stderr, and keep them in a file; gives the logger `tb_memplugin`.

    A second call replaces what the first set up. From then on the messages are not passed to the root
    logger's handlers as well, so that no line appears twice. Programs that set up logging themselves
    need no call: `logging.getLogger("tb_memplugin")` is an ordinary logger.

    Args:
        level: the least that is shown, as a name ("DEBUG") or a number (10). Default: the environment
            variable TB_MEMPLUGIN_LOG_LEVEL, else INFO.
        log_file: a file that the messages are added to, beside stderr.
        rich_format: colours and columns on stderr, by rich.

    Raises:
        MemPluginError: there is no such level, or the file cannot be opened. What was set up stays.

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
    """Show messages where an environment variable asks for it. A level that is none is told, no error."""
    level = os.environ.get(variable)
    if not level:
        return
    try:
        configure_logging(level)
    except MemPluginError as error:
        logging.getLogger(LOGGER).warning("%s", error)


def instance_logger(log_level: int | str | None = None) -> logging.Logger:
    """The logger of one object: the package's own, or one below it with a level for itself.

    The latter is in no registry and goes with its object. Its messages are shown by the same handlers.

    Raises:
        MemPluginError: there is no such level.
    """
    package = logging.getLogger(LOGGER)
    if log_level is None:
        return package
    own = logging.Logger(LOGGER, level_number(log_level))
    own.parent = package
    return own


def tell_trace_is_lost(logger: logging.Logger, error: Exception) -> None:
    """Say that what was traced could not be read, and what to do; the training goes on."""
    logger.debug("ending the trace failed", exc_info=error)
    logger.warning(
        "What was traced could not be read (%s: %s). The training goes on.\n"
        "  fix: set the logger tb_memplugin to DEBUG for the traceback, and report it with that.",
        type(error).__name__,
        error,
    )


def level_number(level: int | str) -> int:
    """`10` for 10, "10", "DEBUG" and "debug".

    Raises:
        MemPluginError: there is no such level.
    """
    known = logging.getLevelName(level.strip().upper()) if isinstance(level, str) else level
    if isinstance(known, int) and not isinstance(known, bool):
        return known
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
            fix="Choose a file in a folder that exists and that this process may write to.",
        ) from error
