"""Run a Python program in this process as its main module: what `python` takes as its arguments."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from zipfile import is_zipfile

CODE = ("-", "-c")
"""In place of a script: the program is read from standard input, or is the next argument."""


def run_as_main(main: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run a program to its end, with its own arguments.

    Of the process, `sys.argv`, the first entry of `sys.path` and `sys.modules["__main__"]` become the
    program's, and stay so: its threads may go on.

    Args:
        main: the path of a script, folder or archive, one of `CODE`, or the name of a module where
            `is_module`.
        arguments: what the program finds in `sys.argv[1:]`.
    """
    sys.argv = [main, *arguments]
    if is_module:
        runpy.run_module(main, run_name="__main__", alter_sys=True)
        return
    if main in CODE:
        sys.path[0] = ""
        is_text = main == "-c"
        source = sys.argv.pop(1) if is_text else sys.stdin.buffer.read()
        _execute(source, "<string>" if is_text else "<stdin>")
        return
    script = Path(main)
    if script.is_dir() or is_zipfile(script):
        runpy.run_path(main, run_name="__main__")
        return
    sys.path[0] = str(script.resolve().parent)
    _execute(script.read_bytes(), main, __file__=main)


def _execute(source: str | bytes, name: str, **variables: str) -> None:
    """Run a source as the main module; `name` stands in tracebacks."""
    code = compile(source, name, "exec")
    # Not by runpy, which takes the module away when the script has ended, while its threads go on.
    program = ModuleType("__main__")
    vars(program).update(__builtins__=__builtins__, **variables)
    sys.modules["__main__"] = program
    exec(code, vars(program))
