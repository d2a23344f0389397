"""Where things lie in a logdir, and names that are safe to lie there."""

from __future__ import annotations

import hashlib
import re

PLUGIN_NAME = "tb_memplugin"
"""TensorBoard's name for the plugin: in tags' metadata, in URLs, in the logdir."""

SIDE_FOLDER = f"plugins/{PLUGIN_NAME}"
"""Where a worker's side files lie, relative to the worker's folder."""

CLAIM = "claimed"
"""Stands in the side folder from the first write on: the folder has a writer."""

EVENT_FILE_END = f".{PLUGIN_NAME}"
"""How the names of our event files end, so that commands need not open everyone else's."""

STEPS_END = ".steps"
"""How the name of a worker's folder ends that holds figures of steps, beside the one of its windows."""

STEPS_TAG = "memory/steps"
"""The tag of the records with figures of steps."""

_LONGEST = 120
_HOSTILE = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\ud800-\udfff]+')
_SIDE_FILE = re.compile(r"window-[0-9]{6,}\.mem")


def side_file_name(window: int) -> str:
    """The side file of a writer's n-th window."""
    return f"window-{window:06d}.mem"


def is_side_file_name(name: str) -> bool:
    """Whether a name from a file can be a side file's: no folders, nothing else either."""
    return _SIDE_FILE.fullmatch(name) is not None


def folder_name(name: str) -> str:
    """A folder's name for a worker, whatever it is called: one path component on every system.

    Names that had to change end in a hash of the true one, so that two never meet.
    """
    clean = _HOSTILE.sub("_", name).strip(". ")
    while len(clean.encode()) > _LONGEST:
        clean = clean[: min(len(clean) - 1, _LONGEST)]
    if clean == name and clean:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean}-{digest}" if clean else f"worker-{digest}"


def readable(text: str) -> str:
    """Text that protobuf takes: lone surrogates, which no encoding knows, become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
