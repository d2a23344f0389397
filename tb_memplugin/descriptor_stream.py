"""Writing to an open file with functions of `os` only, so that tests can let each of them fail."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

_NO_FLUSH = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""What file systems answer that cannot flush."""


class DescriptorStream(io.RawIOBase):
    """An unbuffered stream that writes to a file descriptor, and closes it.

    Args:
        descriptor: the descriptor of a file that was opened for writing.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        """Whether the stream can be written to: yes."""
        return True

    def write(self, data: Any) -> int:
        """Write some of the data; return how many bytes."""
        return os.write(self._descriptor, data)

    def close(self) -> None:
        """Close the descriptor."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def flush(descriptor: int) -> None:
    """Wait until the disk has the content of an open file or folder, where the file system can do that.

    Raises:
        OSError: the disk failed.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
