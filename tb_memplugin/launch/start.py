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
_at_end: list[Callable[[], int | None]] = []
"""What ends the recorder and returns its number of steps: torch, imported before this module, has Python tell
first and end that later.
"""


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
        _say(f"nothing is recorded. {error}\n")
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
        finders = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in finders)), None)
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
        kind = "" if isinstance(error, MemPluginError) else f"{type(error).__name__}: "
        _say(f"nothing is recorded. {kind}{error}\n")


def _say(text: str) -> None:
    """Write to stderr, where one is open. That this fails does not change the exit code of the program."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"tb-memplugin: {text}")
        sys.stderr.flush()
    except ValueError:  # the program has closed it
        pass
    except OSError:
        sys.stderr = None  # what it holds still cannot be written: Python would fail again at exit


def _why_nothing(steps: int) -> str:
    if "torch" not in sys.modules:
        return "The program did not import torch."
    if steps:
        return f"{steps:,} steps were seen, but nothing could be written: see the warning above."
    return "No optimizer of torch has stepped; without one, no module with parameters was called."


def _tell(settings: Settings, *, is_told: bool) -> None:
    """Print what was recorded to stderr. Another process reads it, so that this one needs no more memory."""
    if os.getpid() != settings.owner:  # a fork that ran to its end
        return
    steps = sum(end() or 0 for end in _at_end)
    if "://" not in settings.folder and not Path(settings.folder).is_dir():
        if is_told:
            _say(f"nothing was recorded. {_why_nothing(steps)}\n")
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LOGDIR)}
    command = [sys.executable, "-m", "tb_memplugin", "summary", settings.folder]
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, timeout=SUMMARY_SECONDS, check=False
        )
        text = (result.stdout + result.stderr).decode("utf-8", "replace").removeprefix("tb-memplugin: ")
    except (OSError, subprocess.TimeoutExpired) as error:
        text = (
            f"see what was recorded with: tb-memplugin summary {settings.folder} ({type(error).__name__})\n"
        )
    _say(text)


begin()
