"""Run and record a program without the start file: `python -m tb_memplugin.launch SCRIPT`.

In place of a script it takes what `python` does: `-`, `-c CODE` or `-m MODULE`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType
from zipfile import is_zipfile

import tb_memplugin.launch.start  # noqa: F401  # begins to record, if this process has not
from tb_memplugin.launch.settings import CODE


def main() -> None:
    """Run the program in `sys.argv`, in this process, as its main module."""
    if sys.argv[1] == "-m":
        module = sys.argv[2]
        sys.argv = sys.argv[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv = sys.argv[1:]
    if sys.argv[0] in CODE:
        sys.path[0] = ""
        is_text = sys.argv[0] == "-c"
        source = sys.argv.pop(1) if is_text else sys.stdin.buffer.read()
        _execute(source, "<string>" if is_text else "<stdin>")
        return
    script = Path(sys.argv[0])
    if script.is_dir() or is_zipfile(script):
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.path[0] = str(script.resolve().parent)
    _execute(script.read_bytes(), str(script), __file__=str(script))


def _execute(source: str | bytes, name: str, **variables: str) -> None:
    """Run a source as the main module; `name` stands in tracebacks."""
    code = compile(source, name, "exec")
    # Not by runpy, which takes the module away when the script has ended, while its threads go on.
    program = ModuleType("__main__")
    vars(program).update(__builtins__=__builtins__, **variables)
    sys.modules["__main__"] = program
    exec(code, vars(program))


if __name__ == "__main__":
    main()
