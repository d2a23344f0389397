"""Names of files and folders in a logdir, and conversion of any name to a safe one."""

from __future__ import annotations

import hashlib
import re

PLUGIN_NAME = "tb_memplugin"
"""The plugin's name in TensorBoard: in the metadata of tags, in URLs, and in the logdir."""

SIDE_FOLDER = f"plugins/{PLUGIN_NAME}"
"""The folder of a worker's side files, relative to the worker's folder."""

HEAD_MAGIC = b"\x89TBMEM\r\n"
"""The first bytes of a side file."""

CLAIM = "claimed"
"""The file in the side folder that marks the worker's folder as taken by a writer."""

EVENT_FILE_END = f".{PLUGIN_NAME}"
"""Suffix of this plugin's event files, so that commands need not open other event files."""

STEPS_END = ".steps"
"""Suffix of the worker's folder that contains figures of steps; its windows are in the one without it."""

STEPS_TAG = "memory/steps"
"""The tag of the records with figures of steps."""

_LONGEST = 120
_HOSTILE = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\ud800-\udfff]+')
_SIDE_FILE = re.compile(r"window-[0-9]{6,}\.mem")


def side_file_name(window: int) -> str:
    """Return the name of the side file of a writer's n-th window, counted from 0."""
    return f"window-{window:06d}.mem"


def is_side_file_name(name: str) -> bool:
    """Whether a name has the form of a side file's name, without folders or anything else."""
    return _SIDE_FILE.fullmatch(name) is not None


def folder_name(name: str) -> str:
    """Return a folder name for a worker's name: one path component that is valid on every system.

    A name that must be changed ends in a hash of the original, so that different names stay different.
    """
    clean = _HOSTILE.sub("_", name).strip(". ")
    while len(clean.encode()) > _LONGEST:
        clean = clean[: min(len(clean) - 1, _LONGEST)]
    if clean == name and clean:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean}-{digest}" if clean else f"worker-{digest}"


def readable(text: str) -> str:
    """Return text that protobuf accepts: lone surrogates, which UTF-8 cannot encode, become `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
