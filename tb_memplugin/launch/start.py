"""Begin to record this process as the environment asks, once it imports torch.

The package's start file (`tb_memplugin.pth`) imports this module in each Python process in whose environment
TB_MEMPLUGIN is set. Nothing heavy may be imported here.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tb_memplugin.errors import MemPluginError
from tb_memplugin.launch.settings import LOGDIR, OWNER, Settings, from_environment

SUMMARY_SECONDS = 60
"""How long the summary at the end may take."""

_begun: list[Settings] = []
_at_end: list[Callable[[], None]] = []
"""What ends the recorder: torch, imported before this module, has Python tell first and end that later."""


def begin() -> None:
    """Begin to record this process. Does nothing if it has begun, or if TB_MEMPLUGIN is not set."""
    if _begun:
        return
    is_told = (
        OWNER in os.environ
    )  # by the command; of other programs that do not train there is nothing to tell
    try:
        settings = from_environment()
    except MemPluginError as error:
        sys.stderr.write(f"tb-memplugin: nothing is recorded. {error}\n")
        return
    if settings is None:
        return
    _begun.append(settings)
    if settings.owner == os.getpid() and os.environ.get("RANK", "0") == "0":
        atexit.register(_tell, settings, is_told=is_told)
    if "torch" in sys.modules:
        _record(settings)
    else:
        sys.meta_path.insert(0, _BeforeTorch(settings))


class _BeforeTorch(MetaPathFinder):
    """Finds torch as the other finders would, and begins to record when it has been imported.

    Programs may look for torch before they import it, as transformers and vLLM do, so it stays until then.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's spec, whose loader begins to record afterwards; None for all other modules."""
        if fullname != "torch":
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            del loader.exec_module  # the loader's own again
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            _record(self._settings)

        loader.exec_module = execute_and_record  # type: ignore[method-assign]
        return spec


def _record(settings: Settings) -> None:
    """Begin to record; an error is told and ends only that."""
    try:
        from tb_memplugin.launch.recorder import ProgramRecorder

        recorder = ProgramRecorder(settings)
        _at_end.append(recorder.end)
        recorder.begin()
    except Exception as error:  # noqa: BLE001  # the program goes on, whatever happens to us
        sys.stderr.write(f"tb-memplugin: nothing is recorded ({type(error).__name__}: {error}).\n")


def _why_nothing() -> str:
    if "torch" not in sys.modules:
        return "The program did not import torch."
    return "No optimizer of torch has stepped; without one, no module with parameters was called."


def _tell(settings: Settings, *, is_told: bool) -> None:
    """Print what was recorded to stderr. Another process reads it, so that this one needs no more memory."""
    if os.getpid() != settings.owner:  # a fork that ran to its end
        return
    for end in _at_end:
        end()
    if "://" not in settings.folder and not Path(settings.folder).is_dir():
        if is_told:
            sys.stderr.write(f"tb-memplugin: nothing was recorded. {_why_nothing()}\n")
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LOGDIR)}
    command = [sys.executable, "-m", "tb_memplugin", "summary", settings.folder]
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, timeout=SUMMARY_SECONDS, check=False
        )
        sys.stderr.write((result.stdout + result.stderr).decode("utf-8", "replace"))
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(
            f"tb-memplugin: see what was recorded with: tb-memplugin summary {settings.folder}\n"
        )
        sys.stderr.write(f"  ({type(error).__name__})\n")


begin()
