"""Each kind of error is logged once."""

from __future__ import annotations

import errno
import logging

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.guard import Guard
from tests.faults.test_faults import Messages


def refusal(where: str, number: int, text: str) -> MemPluginError:
    error = MemPluginError(f"It could not be written: {text}.", where=where)
    error.__cause__ = OSError(number, text)
    return error


@pytest.mark.parametrize(
    ("where", "numbers", "count"),
    [
        ("/runs/a", [errno.ENOSPC, errno.ENOSPC], 1),
        ("/runs/a", [errno.ENOSPC, errno.EACCES], 2),
        ("s3://runs/a", [errno.EIO, errno.EREMOTEIO], 1),  # s3fs: of a HEAD and of a PUT that got a 500
    ],
)
def test_a_failure_to_write_is_logged_once_whatever_its_words(where, numbers, count):
    logger, messages = logging.Logger("test", logging.WARNING), list[str]()
    logger.addFilter(lambda record: messages.append(record.getMessage()) or True)
    guard, error = Guard("nothing is recorded", logger), refusal("/runs/a", errno.ENOSPC, "full")
    guard.warn(str(error))
    guard.end("a window", error)
    assert messages == [str(error)]
