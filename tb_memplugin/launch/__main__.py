"""Run and record a program without the start file: `python -m tb_memplugin.launch SCRIPT` or `-m MODULE`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType
from zipfile import is_zipfile

import tb_memplugin.launch.start  # noqa: F401  # begins to record, if this process has not


def main() -> None:
    """Run the program in `sys.argv`, in this process, as its main module."""
    if sys.argv[1] == "-m":
        module = sys.argv[2]
        sys.argv = sys.argv[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0])
    if script.is_dir() or is_zipfile(script):
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.path[0] = str(script.resolve().parent)
    code = compile(script.read_bytes(), str(script), "exec")
    # Not by runpy, which takes the module away when the script has ended, while its threads go on.
    program = ModuleType("__main__")
    vars(program).update(__file__=str(script), __builtins__=__builtins__)
    sys.modules["__main__"] = program
    exec(code, vars(program))


if __name__ == "__main__":
    main()
