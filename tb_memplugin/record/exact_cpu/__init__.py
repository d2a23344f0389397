"""Count every block of torch's CPU allocator in the running process, exactly, on all threads."""

from __future__ import annotations

import logging

from tb_memplugin.errors import MemPluginError
from tb_memplugin.logs import instance_logger


def count_if_possible(logger: logging.Logger | None = None) -> None:
    """Begin to count; if that is not possible, log a warning, once per logger, and go on without."""
    try:
        from tb_memplugin.record.exact_cpu.counting import start_counting

        start_counting()
    except (MemPluginError, ImportError) as error:
        (logger or instance_logger(None)).warning(
            "The calls of the CPU's allocator are not counted: %s", error
        )
