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
    logger, messages = logging.Logger("test"), Messages()
    logger.addHandler(messages)
    guard = Guard("nothing is recorded", logger)
    for text, number in enumerate(numbers):
        guard.end("a window", refusal(where, number, str(text)))
    assert len(messages.warnings) == count


def test_what_another_part_of_the_recorder_has_logged_in_the_same_words_is_not_logged_again():
    logger, messages = logging.Logger("test"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    guard, error = Guard("nothing is recorded", logger), refusal("/runs/a", errno.ENOSPC, "full")
    guard.warn(str(error))
    guard.end("a window", error)
    assert messages == [str(error)]
