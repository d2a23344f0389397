"""What may be in a file's place and is no file."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(before)


KINDS: dict[str, Callable[[Path], None]] = {
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("/nowhere"),
    "link to a device": lambda path: path.symlink_to(os.devnull),
}
"""Functions that create one at a path, by what it is."""
if hasattr(os, "mkfifo"):
    KINDS |= {"pipe": os.mkfifo, "socket": _socket}
