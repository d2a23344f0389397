"""The PEP 517 hooks: setuptools, with the Memory tab bundled into the package before it builds.

Node.js is a build requirement only where the bundle is missing or stale, so that a wheel built from an
sdist needs neither Node.js nor an npm registry. `--config-settings bundle=no` leaves the tab out.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setuptools import build_meta
from start_file import add_start_file

from bundle import NODE, Bundle

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "node_modules", "build", "dist", "runs", "*.egg-info")

Settings = dict[str, str | list[str] | None] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Ask for Node.js where there is a bundle to make."""
    return [NODE] if _wants_bundle(config_settings) and not Bundle(ROOT).is_fresh() else []


get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, bundle and start file included."""
    with _bundled_tree(config_settings):
        name = str(build_meta.build_wheel(wheel_directory, metadata_directory=metadata_directory))
    add_start_file(Path(wheel_directory, name))
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Build the source distribution, bundle included."""
    with _bundled_tree(config_settings):
        return str(build_meta.build_sdist(sdist_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the editable wheel; the bundle is made in this tree, where Python will look for it."""
    if _wants_bundle(config_settings):
        Bundle(ROOT).build()
    name = str(build_meta.build_editable(wheel_directory, metadata_directory=metadata_directory))
    add_start_file(Path(wheel_directory, name))
    return name


@contextmanager
def _bundled_tree(settings: Settings) -> Iterator[None]:
    """Stand in a tree that holds the bundle and may be written to: this one, or a copy of a read-only one."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        root = ROOT if os.access(ROOT, os.W_OK) else _writable_copy(Path(scratch))
        shutil.rmtree(root / "build" / "lib", ignore_errors=True)  # setuptools would pack its old files too
        if _wants_bundle(settings):
            Bundle(root).build()
        os.chdir(root)
        try:
            yield
        finally:
            os.chdir(before)


def _writable_copy(scratch: Path) -> Path:
    root = shutil.copytree(ROOT, scratch / ROOT.name, ignore=NOT_COPIED)
    for path in (root, *root.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    return root


def _wants_bundle(settings: Settings) -> bool:
    return (settings or {}).get("bundle") != "no"
