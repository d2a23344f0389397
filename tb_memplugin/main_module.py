"""Run a Python program in this process as its main module: a script, a folder, an archive, or `-m MODULE`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from zipfile import is_zipfile


def run_as_main(main: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run a program to its end, with its own arguments.

    Of the process, `sys.argv`, the first entry of `sys.path` and `sys.modules["__main__"]` become the
    program's, and stay so: its threads may go on.

    Args:
        main: the path of a script, folder or archive, or the name of a module where `is_module`.
        arguments: what the program finds in `sys.argv[1:]`.
        is_module: whether it is started by `-m`.
    """
    sys.argv = [main, *arguments]
    if is_module:
        runpy.run_module(main, run_name="__main__", alter_sys=True)
        return
    script = Path(main)
    if script.is_dir() or is_zipfile(script):
        runpy.run_path(main, run_name="__main__")
        return
    sys.path[0] = str(script.resolve().parent)
    code = compile(script.read_bytes(), main, "exec")
    # Not by runpy, which takes the module away when the script has ended, while its threads go on.
    program = ModuleType("__main__")
    vars(program).update(__file__=main, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    exec(code, vars(program))
